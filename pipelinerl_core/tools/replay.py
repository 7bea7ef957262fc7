"""`pipelinerl replay`: train recorded batches again and compare the results with the commits.

With overrides of loss or learner, a replay is an offline study of another objective on the recorded batches, with the
recorded advantages and loss weights.
"""

import argparse
import json
import logging
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace

from pipelinerl_core.config.load import override_config
from pipelinerl_core.config.losses import LossConfig
from pipelinerl_core.config.training import LearnerConfig
from pipelinerl_core.errors import ConfigError
from pipelinerl_core.roles.runtime.process import RUN, Arguments, limit_threads, run_main
from pipelinerl_core.roles.trainer.learners import open_learners
from pipelinerl_core.roles.trainer.retrain import (
    ReplayedStep,
    inexact_steps,
    replay_steps,
    restore,
)
from pipelinerl_core.run.context import open_run
from pipelinerl_core.run.history import counted_commit_keys
from pipelinerl_core.telemetry.metrics import short_key

logger = logging.getLogger(__name__)

# Sections that the overrides of a replay may change.
_STUDIED = ("loss", "learner")


def replay_run(
    url: str, first: int | None, last: int | None, overrides: Sequence[str] = ()
) -> Iterator[ReplayedStep]:
    """Replay steps first..last of a run (default: all), with overrides of loss and learner. Raises ConfigError."""
    context = open_run(url)
    for override in overrides:
        if override.partition(".")[0] not in _STUDIED:
            raise ConfigError(f"{override}: a replay can only change keys of {' and '.join(_STUDIED)}")
    commits = counted_commit_keys(context.store)
    if not commits or max(commits) < 1:
        raise ConfigError(f"{url}: no step is committed, so a replay has no batches")
    end = min(last if last is not None else max(commits), max(commits))
    begin = max(1, first if first is not None else 1)
    if begin > end:
        raise ConfigError(f"--from-step {begin} is beyond the last step to replay, {end}")
    studied = override_config(context.config, overrides)
    _check_adapters(context.config.learner, studied.learner)
    _check_advantages(context.config.loss, studied.loss)
    with open_learners(url, context.config.trainer.ranks) as learners:
        learner = learners.build(context.config)
        restore(context.store, learner, commits, begin - 1)
        start = learner.version
        if overrides:  # up to the first step, replay with the recorded settings
            for _ in replay_steps(context.store, learner, commits, begin - 1):
                pass
            state = learner.state()
            learner = learners.build(studied)
            learner.load_state(*state)
        foreign = [step for step in inexact_steps(context.store, commits, context.config) if step > start]
        for replayed in replay_steps(context.store, learner, commits, end):
            if replayed.step >= begin:
                yield replace(replayed, is_exact=replayed.step < min(foreign, default=end + 1))


def _check_advantages(recorded: LossConfig, studied: LossConfig) -> None:
    """Raise ConfigError if the studied loss needs other advantages than the recorded advantages."""
    if (recorded.advantage == "value") != (studied.advantage == "value"):
        raise ConfigError(
            f"loss.advantage={studied.advantage}: the run recorded advantages of {recorded.advantage}. "
            "Start a new run to add or remove a value head"
        )
    if studied.kind == "gspo" and (recorded.advantage == "turn") != (studied.advantage == "turn"):
        raise ConfigError(
            f"loss.advantage={studied.advantage}: the run recorded advantages of {recorded.advantage}, and the "
            f"gradient of loss.kind=gspo differs for turns. Set loss.advantage={recorded.advantage} too"
        )


def _check_adapters(recorded: LearnerConfig, studied: LearnerConfig) -> None:
    """Raise ConfigError if the study would train other tensors than the recorded checkpoint has."""
    for key in ("lora_rank", "lora_targets"):
        if getattr(recorded, key) != getattr(studied, key):
            raise ConfigError(
                f"learner.{key}: a replay starts from a recorded checkpoint and must train the same tensors. "
                f"Remove learner.{key}, or start a new run"
            )


_ARGUMENTS: Arguments = {
    **RUN,
    "--from-step": {"type": int},
    "--to-step": {"type": int},
    "--json": {"action": "store_true"},
    "overrides": {"nargs": "*", "metavar": "KEY=VALUE"},
}


def main() -> int:
    """Command line of the replay."""
    return run_main(__doc__, _ARGUMENTS, _replay)


def _replay(arguments: argparse.Namespace) -> int:
    steps = []
    limit_threads(open_run(arguments.run).config.placement.threads)
    for replayed in replay_run(arguments.run, arguments.from_step, arguments.to_step, arguments.overrides):
        verdict = "studied" if arguments.overrides else replayed.verdict
        steps.append({**_figures(replayed), "recorded_loss": replayed.recorded_loss, "verdict": verdict})
        if not arguments.json:
            print(_line(replayed, verdict), flush=True)  # noqa: T201
    all_equal = all(step["verdict"] == "equal" for step in steps)
    if arguments.json:
        print(json.dumps({"steps": steps, "all_equal": all_equal, "overrides": arguments.overrides}))  # noqa: T201
    differs = any(step["verdict"] == "DIFFERS" for step in steps)
    return 1 if differs else 0


def _line(replayed: ReplayedStep, verdict: str) -> str:
    figures = _figures(replayed)
    if verdict != "studied":
        return f"step {replayed.step}: loss {figures['loss']!r} {verdict}"
    head = f"step {replayed.step}: loss {figures['loss']:.6f} (recorded {replayed.recorded_loss:.6f})"
    return head + "  ess {ess:.4f}  kl {kl:.5f}  grad norm {grad_norm:.4f}".format(**figures)


def _figures(replayed: ReplayedStep) -> dict[str, float]:
    return {"step": replayed.step, **{short_key(name): value for name, value in replayed.metrics.items()}}


if __name__ == "__main__":
    sys.exit(main())
