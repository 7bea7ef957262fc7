"""Measure the cost of a weight version from the learner to the engine, beside one copy of its bytes.

Each version takes the path of a run (docs/architecture.md, "One weight version"), in one process and through shared
memory: copy of the learner's weights, digest and publication; mapping, verification (with adapters: merge) and
staging by an actor; swap of an embedded engine. The model has random weights.

CPU seconds are those of the process, wall seconds those of a clock; both are the fastest of several versions. The
longest hold of Python's interpreter lock is the longest time in which another thread of the process could not run,
while this thread computed. Memory is what the resident memory of the process grew by, pages in shared memory
included, in models.
"""

import asyncio
import mmap
import os
import shutil
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from benchmarks import report
from benchmarks.engine_load import random_model
from benchmarks.sizes import SIZES
from pipelinerl_core.config import RunConfig
from pipelinerl_core.engine.embedded.load import load_engine
from pipelinerl_core.models.paths import require_model
from pipelinerl_core.models.resolve import load_config
from pipelinerl_core.roles.runtime.device import model_device
from pipelinerl_core.roles.runtime.inference import base_weights
from pipelinerl_core.roles.runtime.process import exit_codes, limit_threads
from pipelinerl_core.roles.trainer.learners import build_alone
from pipelinerl_core.storage.object_store import open_store
from pipelinerl_core.weights.files import take_snapshot
from pipelinerl_core.weights.memory import shm_directory
from pipelinerl_core.weights.publish import WeightPublisher
from pipelinerl_core.weights.subscribe import WeightSubscriber

CONTENTS = ("merged", "adapters")
STAGES = ("copy", "publish", "take", "pause")
_TICK_SECONDS = 0.0003


class Meter:
    """CPU time, longest hold of the interpreter lock, and growth of the memory of named parts on this thread."""

    def __init__(self) -> None:
        self.cpu_seconds: dict[str, list[float]] = {}
        self.wall_seconds: dict[str, list[float]] = {}
        self.hold_seconds: dict[str, float] = {}
        self.grown_bytes: dict[str, int] = {}
        self._clock = time.pthread_getcpuclockid(threading.get_ident())
        self._hold = 0.0
        threading.Thread(target=self._watch, daemon=True).start()

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Measure what the block does."""
        with suppress(OSError):  # some containers refuse it: the peak then is that since the start
            Path("/proc/self/clear_refs").write_text("5")  # the peak begins here
        before, self._hold, begun, started = _memory("VmRSS"), 0.0, time.perf_counter(), time.process_time()
        yield
        self.cpu_seconds.setdefault(name, []).append(time.process_time() - started)
        self.wall_seconds.setdefault(name, []).append(time.perf_counter() - begun)
        time.sleep(3 * _TICK_SECONDS)
        if len(self.cpu_seconds[name]) > 1:  # the first one warms up
            self.hold_seconds[name] = max(self.hold_seconds.get(name, 0.0), self._hold)
            self.grown_bytes[name] = max(self.grown_bytes.get(name, 0), _memory("VmHWM") - before)

    def _watch(self) -> None:
        last = time.clock_gettime(self._clock)
        while True:
            time.sleep(_TICK_SECONDS)
            now = time.clock_gettime(self._clock)
            self._hold, last = max(self._hold, now - last), now


def _memory(field: str) -> int:
    lines = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(field))
    return 1024 * int(next(lines, "- 0").split()[1])


def measure(config: RunConfig, versions: int) -> dict[str, Any]:
    """Bytes of a version and figures of each stage, over `versions` versions after one that warms up."""
    run_id = f"bench-swap-{os.getpid()}"
    learner = build_alone(config)
    engine = load_engine(
        require_model(config.model.path), config, max_prompt_tokens=1, device=model_device(config), eos_token_ids=()
    )
    store = open_store(f"memory://{run_id}")
    publisher = WeightPublisher(store, run_id=run_id, epoch=1, use_shm=True)
    subscriber = WeightSubscriber(store, base_weights(config))
    meter, pauses = Meter(), list[float]()

    async def swap_versions() -> int:
        num_bytes = 0
        for version in range(versions + 1):
            with meter.part("copy"):
                snapshot = take_snapshot(learner, publisher.memory)
            with meter.part("publish"):
                manifest = publisher.publish(version, snapshot, durable=False)
            del snapshot
            with meter.part("take"):
                update = subscriber.fetch(manifest)
                engine._decoder.stage(update.tensors)  # a swap does it again, before its pause
            pauses.append((await engine.swap(update)).pause_seconds)
            del update
            num_bytes = manifest.num_bytes
        await engine.close()
        return num_bytes

    try:
        num_bytes = asyncio.run(swap_versions())
    finally:
        shutil.rmtree(shm_directory(run_id), ignore_errors=True)
    figures = {f"{stage}_seconds": min(meter.cpu_seconds[stage][1:]) for stage in STAGES[:-1]}
    figures |= {f"{stage}_wall_seconds": min(meter.wall_seconds[stage][1:]) for stage in STAGES[:-1]}
    return {
        "content": config.weights.content,
        "bytes": num_bytes,
        "plain_copy_seconds": min(plain_copy_seconds(num_bytes) for _ in range(3)),
        **figures,
        "pause_seconds": min(pauses[1:]),
        "hold_seconds": max(meter.hold_seconds.values()),
        "grown_models": {stage: grown / num_bytes for stage, grown in meter.grown_bytes.items()},
    }


def plain_copy_seconds(num_bytes: int) -> float:
    """CPU seconds of one copy of so many bytes into fresh pages."""
    source = torch.ones(num_bytes, dtype=torch.uint8)
    started = time.process_time()
    target = torch.frombuffer(mmap.mmap(-1, num_bytes), dtype=torch.uint8)
    target.copy_(source)
    return time.process_time() - started


def table(result: dict[str, Any]) -> str:
    """The measurement as Markdown."""
    header = (
        "weights.content", "MB", "plain copy", "copy", "publish", "over a plain copy", "take", "over a plain copy",
        "pause", "longest hold of the lock", "memory of copy, publish, take (models)",
    )  # fmt: skip
    rows = []
    for row in result["rows"]:
        plain = row["plain_copy_seconds"]
        published = row["copy_seconds"] + row["publish_seconds"]
        rows.append((
            f"`{row['content']}`", f"{row['bytes'] / 1e6:,.2f}", milliseconds(plain),
            milliseconds(row["copy_seconds"]), milliseconds(row["publish_seconds"]), f"{published / plain:.2f}",
            milliseconds(row["take_seconds"]), f"{row['take_seconds'] / plain:.2f}",
            milliseconds(row["pause_seconds"]), milliseconds(row["hold_seconds"]),
            ", ".join(f"{row['grown_models'][stage]:.1f}" for stage in STAGES[:-1]),
        ))  # fmt: skip
    title = f"{result['model']} {result['dtype']}, rank {result['rank']}: CPU ms per version, fastest of several"
    return "\n".join([title, "", *report.markdown(header, rows), ""])


def milliseconds(seconds: float) -> str:
    """Seconds as milliseconds, as text."""
    return f"{1000 * seconds:,.1f}"


@exit_codes
def main() -> int:
    """Command line of the benchmark."""
    parser = report.parser(__doc__)
    parser.add_argument("--model", default="135m", choices=tuple(SIZES), help="shapes of the random model")
    parser.add_argument("--dtype", default="bfloat16", choices=("float32", "bfloat16"))
    parser.add_argument("--rank", type=int, default=0, help="of adapters, measured too; 0: all weights alone")
    parser.add_argument("--versions", type=int, default=8)
    arguments = parser.parse_args()
    limit_threads(1)
    with TemporaryDirectory(prefix="pipelinerl-bench-") as directory:
        random_model(arguments.model, dtype=getattr(torch, arguments.dtype)).save_pretrained(directory)
        settings = [
            f"model.path={directory}", f"model.dtype={arguments.dtype}", f"learner.lora_rank={arguments.rank}",
            "engine.concurrency=1", "rollouts.max_tokens=8",
        ]  # fmt: skip
        rows = [
            measure(load_config("quickstart", [*settings, f"weights.content={content}"]), arguments.versions)
            for content in (CONTENTS if arguments.rank else CONTENTS[:1])
        ]
    result = {"model": arguments.model, "dtype": arguments.dtype, "rank": arguments.rank, "rows": rows}
    report.write(result, table, as_json=arguments.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
