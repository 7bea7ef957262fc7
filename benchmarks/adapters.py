"""Measure the cost of a weight version with weights.content=merged and adapters: bytes, and seconds of each stage.

Each version takes the path of a run (docs/architecture.md, "One weight version"), in one process and through shared
memory: snapshot of the learner, serialize and publish, fetch (with adapters: merge), and swap of an idle embedded
engine. The model is `--model`, or a random model with the shapes of Qwen2.5-0.5B.
"""

import argparse
import asyncio
import os
import shutil
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from tempfile import TemporaryDirectory
from typing import Any

import torch

from benchmarks import report
from benchmarks.engine_load import random_model
from pipelinerl_core.config import RunConfig
from pipelinerl_core.engine.embedded.load import load_engine
from pipelinerl_core.models.resolve import load_config
from pipelinerl_core.roles.runtime.inference import base_weights, model_directory
from pipelinerl_core.roles.runtime.process import exit_codes, limit_threads
from pipelinerl_core.roles.trainer.learners import build_alone
from pipelinerl_core.storage.object_store import open_store
from pipelinerl_core.weights.files import take_snapshot
from pipelinerl_core.weights.memory import shm_directory
from pipelinerl_core.weights.publish import WeightPublisher
from pipelinerl_core.weights.subscribe import WeightSubscriber

CONTENTS = ("merged", "adapters")
STAGES = ("snapshot", "publish", "take", "pause")
RANDOM_MODEL = "random:0.5B"


def measure(config: RunConfig, versions: int) -> dict[str, Any]:
    """Bytes of a version and seconds of each stage: the minimum over `versions` versions after one that warms up."""
    run_id = f"bench-adapters-{os.getpid()}"
    learner = build_alone(config)
    engine = load_engine(model_directory(config), config, max_prompt_tokens=1)
    store = open_store(f"memory://{run_id}")
    publisher = WeightPublisher(store, run_id=run_id, epoch=1, use_shm=True)
    subscriber = WeightSubscriber(store, base_weights(config))
    times: dict[str, list[float]] = {stage: [] for stage in STAGES}

    async def swap_versions() -> int:
        num_bytes = 0
        for version in range(versions + 1):
            with _timed(times["snapshot"]):
                weights = take_snapshot(learner, publisher.memory)
            with _timed(times["publish"]):
                manifest = publisher.publish(version, weights, durable=False)
            del weights
            with _timed(times["take"]):
                update = subscriber.fetch(manifest)
            times["pause"].append((await engine.swap(update)).pause_seconds)
            num_bytes = manifest.num_bytes
        await engine.close()
        return num_bytes

    try:
        num_bytes = asyncio.run(swap_versions())
    finally:
        shutil.rmtree(shm_directory(run_id), ignore_errors=True)
    first_take = times["take"][0]  # with adapters, the first fetch also reads the base model for a checksum
    fastest = {f"{stage}_seconds": min(taken[1:]) for stage, taken in times.items()}
    return {"content": config.weights.content, "bytes": num_bytes, "first_take_seconds": first_take, **fastest}


def table(result: dict[str, Any]) -> str:
    """The measurement as Markdown."""
    stages = (*STAGES, "first_take")
    header = ("weights.content", "MB", *(stage.replace("_", " ") for stage in stages))
    rows = [
        (f"`{row['content']}`", f"{row['bytes'] / 1e6:,.2f}",
         *(f"{1000 * row[f'{stage}_seconds']:,.1f}" for stage in stages))
        for row in result["rows"]
    ]  # fmt: skip
    title = f"{result['model']} {result['dtype']}, rank {result['rank']}: ms per version, fastest of several"
    return "\n".join([title, "", *report.markdown(header, rows), ""])


@contextmanager
def _timed(times: list[float]) -> Iterator[None]:
    started = time.perf_counter()
    yield
    times.append(time.perf_counter() - started)


@exit_codes
def main() -> int:
    """Command line of the benchmark."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", default="builtin:sums", help=f"as model.path, or {RANDOM_MODEL}")
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    parser.add_argument("--rank", type=int, default=8)
    parser.add_argument("--versions", type=int, default=20)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    limit_threads(1)
    with TemporaryDirectory(prefix="pipelinerl-bench-") as directory:
        model = arguments.model
        if model == RANDOM_MODEL:
            model = directory
            random_model("0.5b", dtype=getattr(torch, arguments.dtype)).save_pretrained(directory)
        settings = [
            f"model.path={model}", f"model.dtype={arguments.dtype}", f"learner.lora_rank={arguments.rank}",
            "engine.concurrency=1", "rollouts.max_tokens=8",
        ]  # fmt: skip
        rows = [
            measure(load_config("quickstart", [*settings, f"weights.content={content}"]), arguments.versions)
            for content in CONTENTS
        ]
    result = {"model": arguments.model, "dtype": arguments.dtype, "rank": arguments.rank, "rows": rows}
    report.write(result, table, as_json=arguments.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
