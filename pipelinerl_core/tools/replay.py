"""`pipelinerl replay`: train recorded batches again and compare the results with the commits."""

import argparse
import json
import logging
import sys
from collections.abc import Iterator
from dataclasses import replace

from pipelinerl_core.errors import ConfigError, PipelineRLError
from pipelinerl_core.roles.runtime.device import model_device
from pipelinerl_core.roles.runtime.process import RUN, Arguments, limit_threads, run_main
from pipelinerl_core.roles.trainer.learners import open_learners
from pipelinerl_core.roles.trainer.own_code import load_stored_functions
from pipelinerl_core.roles.trainer.retrain import (
    ReplayedStep,
    inexact_steps,
    replay_steps,
    restore,
)
from pipelinerl_core.run.context import RunContext, open_run
from pipelinerl_core.run.history import counted_commit_keys, steps_to_replay
from pipelinerl_core.run.records import Commit
from pipelinerl_core.run.versions import stored_versions
from pipelinerl_core.telemetry.metrics import short_key
from pipelinerl_core.weights.files import Snapshot, take_snapshot

logger = logging.getLogger(__name__)


def replay_run(url: str, first: int | None, last: int | None) -> Iterator[ReplayedStep]:
    """Replay steps first..last of a run (default: all) with the recorded settings. Raises ConfigError."""
    context = open_run(url)
    load_stored_functions(context)
    commits = counted_commit_keys(context.store)
    begin, end = steps_to_replay(url, commits, first, last)
    with open_learners(url, context.config.trainer.ranks) as learners:
        learner = learners.build(context.config)
        restore(context.store, learner, commits, begin - 1)
        start = learner.version
        foreign = [step for step in inexact_steps(context.store, commits, context.config) if step > start]
        for replayed in replay_steps(context.store, learner, commits, end):
            if replayed.step >= begin:
                yield replace(replayed, is_exact=replayed.step < min(foreign, default=end + 1))


def replayed_weights(context: RunContext, commit: Commit) -> Snapshot:
    """The weights after a committed step, computed from the newest checkpoint before it.

    Raises ConfigError if there is no such checkpoint, or if a GPU would have to train steps again; PipelineRLError if
    the weights are not those of the run.
    """
    load_stored_functions(context)
    commits = counted_commit_keys(context.store)
    with open_learners(context.store.url, context.config.trainer.ranks) as learners:
        learner = learners.build(context.config)
        restore(context.store, learner, commits, commit.step)
        if learner.version < commit.step and model_device(context.config).type == "cuda":
            nearest = sorted(stored_versions(context.store), key=lambda version: abs(version - commit.step))[:4]
            raise ConfigError(
                f"version {commit.step}: its weights are not stored, and a GPU does not train steps again to the "
                f"last bit. Take a stored version: {', '.join(map(str, sorted(nearest)))}"
            )
        for replayed in replay_steps(context.store, learner, commits, commit.step):
            logger.info("trained step %d again", replayed.step)
        weights = take_snapshot(learner)
    if weights.entry.digest != commit.weights_digest:
        raise PipelineRLError(
            f"version {commit.step}: this host computes other weights than the run, whose processor or settings were "
            "others. `pipelinerl replay` names the first step; run the command on the trainer's kind of host"
        )
    return weights


_ARGUMENTS: Arguments = {
    **RUN,
    "--from-step": {"type": int},
    "--to-step": {"type": int},
    "--json": {"action": "store_true"},
}


def main() -> int:
    """Command line of the replay."""
    return run_main(__doc__, _ARGUMENTS, _replay)


def _replay(arguments: argparse.Namespace) -> int:
    context = open_run(arguments.run)
    limit_threads(context.config.placement.threads)
    steps = []
    for replayed in replay_run(arguments.run, arguments.from_step, arguments.to_step):
        figures = {short_key(name): value for name, value in replayed.metrics.items()}
        steps.append(
            {
                "step": replayed.step,
                **figures,
                "recorded_loss": replayed.recorded_loss,
                "verdict": replayed.verdict,
            }
        )
        if not arguments.json:
            print(f"step {replayed.step}: loss {figures['loss']!r} {replayed.verdict}", flush=True)  # noqa: T201
    all_equal = all(step["verdict"] == "equal" for step in steps)
    if arguments.json:
        print(json.dumps({"steps": steps, "all_equal": all_equal}))  # noqa: T201
    differs = any(step["verdict"] == "DIFFERS" for step in steps)
    return 1 if differs else 0


if __name__ == "__main__":
    sys.exit(main())
