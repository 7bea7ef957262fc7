"""Compare the memory of trainer and actor that `pipelinerl doctor` predicts for a CPU with measured memory.

Each role is a process of its own. The trainer builds its learner and trains steps, while the committer publishes each
version and writes a checkpoint. The actor fills all slots of its embedded engine while versions are swapped. Measured
is the largest resident memory without pages of shared memory, which `doctor` counts once for the host; pages of
libraries are included. The model has random weights, versions go through shared memory.
"""

import asyncio
import multiprocessing
import os
import shutil
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest import mock

import torch

from benchmarks import report
from benchmarks.engine_load import complete, random_model, random_prompts
from benchmarks.sizes import SIZES
from pipelinerl_core.algo.packed import PackedBatch
from pipelinerl_core.batching.assemble import assemble_rows
from pipelinerl_core.config import RunConfig
from pipelinerl_core.engine.embedded.load import load_engine
from pipelinerl_core.interfaces import WeightLayout
from pipelinerl_core.models.resolve import load_config
from pipelinerl_core.roles.runtime.process import exit_codes, keep_freed_memory, limit_threads
from pipelinerl_core.roles.trainer.committer import Committer, ComputedStep
from pipelinerl_core.roles.trainer.learners import build_alone, pack_batcher
from pipelinerl_core.run.history import take_over
from pipelinerl_core.storage.object_store import open_store
from pipelinerl_core.supervision.fit import fit_of
from pipelinerl_core.supervision.role_commands import ALLOCATOR
from pipelinerl_core.weights.files import lay_out, metas_of
from pipelinerl_core.weights.memory import shm_directory
from pipelinerl_core.weights.publish import WeightPublisher
from pipelinerl_core.weights.subscribe import WeightSubscriber
from tests.rollout_rows import build_group

ROLES = ("trainer", "actor")
GROUP_SIZE = 8
PROMPT_TOKENS, COMPLETION_TOKENS = 5, 59
_VERSIONS = 2
_TICK_SECONDS = 0.002


class _Memory:
    """Resident bytes of this process without shared memory, now and the largest since the last `mark`."""

    def __init__(self) -> None:
        self.marks: dict[str, dict[str, int]] = {}
        self._peak = 0
        threading.Thread(target=self._watch, daemon=True).start()

    def mark(self, name: str) -> None:
        now = _resident()
        self.marks[name] = {"now": now, "peak": max(now, self._peak)}
        self._peak = 0

    def _watch(self) -> None:
        while True:
            self._peak = max(self._peak, _resident())
            time.sleep(_TICK_SECONDS)


def _resident() -> int:
    lines = (line.split() for line in Path("/proc/self/status").read_text().splitlines())
    return 1024 * sum(int(line[1]) for line in lines if line and line[0] in ("RssAnon:", "RssFile:"))


def train(config: RunConfig, memory: _Memory, root: str) -> None:
    """Steps of two full packs, or more on several threads, each with a version and a checkpoint."""
    store = open_store(root)
    learner = build_alone(config)
    memory.mark("built")
    epoch, _ = take_over(store, config.arithmetic)
    committer = Committer(store, config, run_id=Path(root).name, epoch=epoch, link=None)
    rollout_tokens = PROMPT_TOKENS + COMPLETION_TOKENS - 1  # the last token is not fed
    num_groups = -(-2 * config.trainer_threads * config.trainer.pack_tokens // (rollout_tokens * GROUP_SIZE))
    groups = [build_group(n, group_id=n, size=GROUP_SIZE, num_tokens=COMPLETION_TOKENS) for n in range(num_groups)]

    def packs(step: int) -> Iterator[PackedBatch]:
        """The packs of a step, which ends after the writing of the checkpoint before, as a step of a run does."""
        yield from pack_batcher(config).rows(assemble_rows(step, groups, config).rows)
        committer.flush()

    for step in range(_VERSIONS + 1):
        if step:
            learner.step_packs(packs(step))
        weights, state = committer.snapshot(learner), learner.state()
        committer.submit(
            ComputedStep(
                step=step, weights=weights, state=state, batch=None, reserved=None, reserved_at=0.0, computed_at=0.0
            )
        )
        if not step:
            committer.flush()
            memory.mark("checkpoint")
    committer.flush()
    committer.close()


async def generate(config: RunConfig, memory: _Memory, root: str) -> None:
    """Completions in all slots, and swaps beside them."""
    engine = load_engine(config.model.path, config, max_prompt_tokens=PROMPT_TOKENS, eos_token_ids=())
    memory.mark("built")
    prompts = random_prompts(config.engine.concurrency, PROMPT_TOKENS, engine._decoder.vocab_size)
    store = open_store(root)
    publisher, subscriber = (
        WeightPublisher(store, run_id=Path(root).name, epoch=1, use_shm=True),
        WeightSubscriber(store),
    )
    await complete(engine, prompts, max_tokens=2)
    for version in range(1, _VERSIONS + 1):
        own = {name: tensor.detach() for name, tensor in engine._decoder.model.named_parameters()}
        snapshot = lay_out(WeightLayout(metas_of(own)), publisher.memory)
        for name, target in snapshot.tensors.items():
            target.copy_(own[name])
        del own
        manifest = publisher.publish(version, snapshot, durable=False)
        running = asyncio.create_task(complete(engine, prompts, max_tokens=4, name=f"{version}."))
        await engine.swap(await asyncio.to_thread(subscriber.fetch, manifest))
        await running
    await engine.close()


def measure(role: str, settings: Sequence[str]) -> dict[str, Any]:
    """Predicted and measured bytes of a role. Call it in a new process: all memory of the process counts."""
    limit_threads(1)
    memory = _Memory()
    memory.mark("process")
    config = load_config("quickstart", settings)
    with TemporaryDirectory(prefix="pipelinerl-bench-memory-") as root:
        try:
            if role == "trainer":
                train(config, memory, root)
            else:
                keep_freed_memory()
                asyncio.run(generate(config, memory, root))
        finally:
            shutil.rmtree(shm_directory(Path(root).name), ignore_errors=True)
    memory.mark("end")
    fit = fit_of(config)
    assert fit is not None
    (predicted,) = [role_fit for role_fit in fit.roles if role_fit.role == role]
    return {
        "role": role,
        "parts": dict(predicted.host),
        "predicted_bytes": predicted.host_bytes,
        "measured_bytes": max(mark["peak"] for mark in memory.marks.values()),
        "marks": memory.marks,
    }


def measure_roles(model: str, dtype: str, tokens: int, slots: int, roles: Sequence[str] = ROLES) -> dict[str, Any]:
    """`measure` for each role in a process of its own."""
    with TemporaryDirectory(prefix="pipelinerl-bench-") as directory:
        settings = [
            f"model.path={directory}", f"model.dtype={dtype}", "model.device=cpu", f"trainer.pack_tokens={tokens}",
            f"rollouts.max_prompt_tokens={PROMPT_TOKENS}", f"rollouts.max_tokens={COMPLETION_TOKENS}",
            f"engine.concurrency={slots}",
        ]  # fmt: skip
        rows = []
        with _process() as process:
            process.submit(_write_model, model, dtype, directory).result()
        for role in roles:
            with mock.patch.dict(os.environ, ALLOCATOR), _process() as process:
                rows.append(process.submit(measure, role, settings).result())
    return {"model": model, "dtype": dtype, "tokens": tokens, "rows": rows, **report.machine()}


def _process() -> ProcessPoolExecutor:
    return ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn"))


def _write_model(model: str, dtype: str, directory: str) -> None:
    random_model(model, dtype=getattr(torch, dtype)).save_pretrained(directory)


def table(result: dict[str, Any]) -> str:
    """The measurement as Markdown."""
    header = ("role", "predicted", "measured", "predicted / measured", "sum")
    rows = [
        (
            row["role"], f"{row['predicted_bytes'] / 1e9:.2f} GB", f"{row['measured_bytes'] / 1e9:.2f} GB",
            f"{row['predicted_bytes'] / row['measured_bytes']:.2f}",
            " + ".join(f"{name} {size / 1e9:.2f}" for name, size in row["parts"].items() if size),
        )
        for row in result["rows"]
    ]  # fmt: skip
    title = f"{result['model']} {result['dtype']}, packs of {result['tokens']} tokens; {report.conditions(result)}"
    return "\n".join([title, "", *report.markdown(header, rows), ""])


@exit_codes
def main() -> int:
    """Command line of the benchmark."""
    parser = report.parser(__doc__)
    parser.add_argument("--model", default="135m", choices=tuple(SIZES), help="shapes of the random model")
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    parser.add_argument("--tokens", type=int, default=252, help="of a pack")
    parser.add_argument("--slots", type=int, default=128, help="of the engine")
    parser.add_argument("--roles", nargs="*", choices=ROLES, default=list(ROLES))
    arguments = parser.parse_args()
    result = measure_roles(arguments.model, arguments.dtype, arguments.tokens, arguments.slots, arguments.roles)
    report.write(result, table, as_json=arguments.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
