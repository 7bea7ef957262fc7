"""A prediction: the figures of a simulated run without its first steps, and its bottleneck."""

from dataclasses import asdict, dataclass
from typing import Any

from pipelinerl_core.config import RunConfig
from pipelinerl_core.planning.simulated_engine import Speeds
from pipelinerl_core.planning.simulator import Work, simulate
from pipelinerl_core.report.advice import Evidence, bottleneck

MIN_STEPS = 6
"""Steps that a recorded run must have."""
START_SHARE = 0.2
"""Share of the first steps that is left out: engines fill their slots, and libraries warm up."""
_SIMULATED_STEPS = (40, 200)
"""Fewest and most simulated steps."""
_SIMULATED_ROLLOUTS = 40_000
"""Rollouts to simulate, within the limits above; these take about a second."""

INPUTS = ("decode", "train", "completions", "prompts", "weights", "trainer", "messages")
"""Inputs of a simulation, whose sources are named."""
_NAMES = {
    "trainer": "training",
    "engine": "generation",
    "window": "staleness limit",
    "stale_wait": "staleness limit",
    "balanced": "none: generation and training are both busy",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """Figures of a run without its first steps."""

    steps_per_second: float
    mean_lag: float
    """Of the trained tokens, optimizer steps."""
    trainer_idle: float
    """Share of the time in which the trainer waited for groups."""
    busy_slots: float
    """Share of the slots that were in use."""
    bottleneck: str
    """generation, training, accelerators' memory, staleness limit, or none."""

    def document(self, steps: int) -> dict[str, Any]:
        """The figures, and the seconds that this many steps take."""
        return {**asdict(self), "seconds": steps / self.steps_per_second}


def predict(config: RunConfig, speeds: Speeds, work: Work) -> Prediction:
    """Simulate a configuration. Raises ConfigError as `simulate`."""
    run = simulate(shortened(config), speeds, work)
    skip = max(1, int(START_SHARE * len(run.steps)))
    seconds = run.steps[-1].at - run.steps[skip - 1].at
    trainer_idle = run.waiting(skip)
    return Prediction(
        steps_per_second=(len(run.steps) - skip) / seconds,
        mean_lag=run.mean_lag(skip),
        trainer_idle=trainer_idle,
        busy_slots=run.busy_slots,
        bottleneck=named_bottleneck(
            config,
            trainer_idle=trainer_idle,
            busy_slots=run.busy_slots,
            delay_seconds=run.delay_seconds,
            waited_for_cache=run.waited_for_cache,
        ),
    )


def shortened(config: RunConfig) -> RunConfig:
    """The configuration with as many steps as a simulation needs for stable means."""
    fewest, most = _SIMULATED_STEPS
    enough = _SIMULATED_ROLLOUTS // (config.trainer.groups_per_step * config.rollouts.group_size)
    steps = max(MIN_STEPS, min(config.trainer.steps, most, max(fewest, enough)))
    return config.model_copy(update={"trainer": config.trainer.model_copy(update={"steps": steps})})


def named_bottleneck(
    config: RunConfig, *, trainer_idle: float, busy_slots: float, delay_seconds: float, waited_for_cache: float = 0.0
) -> str:
    """The bottleneck by the table of report/advice.py, in the words of the planning."""
    evidence = Evidence(trainer_idle=trainer_idle, actor_idle=1 - busy_slots, delay_seconds=delay_seconds)
    kind = bottleneck(evidence, takes_turns=config.takes_turns)
    if kind == "turns":
        return f"{'generation' if trainer_idle > 1 / 2 else 'training'}, in turns"
    if waited_for_cache > 1 / 2 and kind in ("engine", "window"):
        return "accelerators' memory"
    return _NAMES[kind]
