"""Add the held-out accuracy of a reference trainer's weights to points.json, with the evaluator of runs, and print
when the target was reached.

python -m benchmarks.peers evaluate --out DIR [--prompts 1000]
"""

import argparse
import asyncio
import logging
import os
import statistics
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors import torch as safetensors

from benchmarks.peer_points import peer_run
from benchmarks.peers.record import read_points, weights_file, write_points
from pipelinerl_core.comparison.analysis import first_crossing, learning_curve
from pipelinerl_core.config import RunConfig
from pipelinerl_core.interfaces import WeightUpdate
from pipelinerl_core.models.resolve import build_config
from pipelinerl_core.roles.runtime.evaluation import build_set, measure
from pipelinerl_core.roles.runtime.inference import build_engine
from pipelinerl_core.roles.runtime.process import configure_logging, exit_codes, limit_threads

logger = logging.getLogger(__name__)

# Sequences decoded at once.
_CONCURRENCY = 256


async def add_accuracies(out: Path, num_prompts: int) -> None:
    """Evaluate every saved version that has no accuracy yet, in order."""
    document = read_points(out)
    config = build_config(document["config"])
    wide = config.model_copy(update={"engine": config.engine.model_copy(update={"concurrency": _CONCURRENCY})})
    engine, held_out = build_engine(wide), build_set(config)
    try:
        for point in document["points"]:
            if "accuracy" in point:
                continue
            await engine.swap(_update(out, point["step"]))
            record = await measure(engine, held_out, slots=_CONCURRENCY, num_prompts=num_prompts)
            point["accuracy"] = record.accuracy
            logger.info("step %d: accuracy %.3f, %.1f tokens", point["step"], record.accuracy, record.mean_tokens)
            write_points(out, document)
    finally:
        await held_out.task.close()
        await engine.close()


def outcome(document: Mapping[str, Any]) -> str:
    """When an evaluated run reached its target, and the seconds of its steps."""
    curve = [(point.seconds, point.accuracy) for point in learning_curve(peer_run(document))]
    reached = first_crossing(curve, document["target"])
    seconds = statistics.median(document["step_seconds"])
    after = "never" if reached is None else f"after {reached:.0f} s"
    return (
        f"{document['name']}, seed {document['seed']}: reaches {document['target']} {after}; "
        f"{seconds:.2f} s per step (median of {len(document['step_seconds'])}); best accuracy "
        f"{max(accuracy for _, accuracy in curve):.3f}"
    )


def _update(out: Path, step: int) -> WeightUpdate:
    data = (out / weights_file(step)).read_bytes()
    return WeightUpdate(version=step, tensors=safetensors.load(data), num_bytes=len(data))


@exit_codes
def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="directory of the reference trainer")
    parser.add_argument("--prompts", type=int, default=RunConfig().eval.num_prompts)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    arguments = parser.parse_args()
    configure_logging()
    limit_threads(arguments.threads)
    asyncio.run(add_accuracies(arguments.out, arguments.prompts))
    sys.stdout.write(f"{outcome(read_points(arguments.out))}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
