"""A prediction: the figures of a simulated run without its first steps, and its bottleneck."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from types import MappingProxyType
from typing import Any, Protocol

from pipelinerl_core.config import RunConfig
from pipelinerl_core.planning.simulated_engine import Speeds
from pipelinerl_core.planning.simulator import Work, simulate
from pipelinerl_core.report.advice import Evidence, bottleneck

MIN_STEPS = 6
"""Steps that a recorded run must have."""
START_SHARE = 0.2
"""Share of the first steps that is left out: engines fill their slots, and libraries warm up."""


FEWEST_STEPS, MOST_STEPS = 40, 200
"""Length of a simulation."""
ROLLOUTS = 40_000
"""Rollouts to simulate within these limits; they take about a second."""

SYNC_SECONDS = 0.05
"""Shortest interval between two syncs of an actor (roles/hub/service.py)."""
INPUTS: Mapping[str, str] = MappingProxyType(
    {
        "decode": "decode step", "train": "optimizer step", "completions": "completions", "prompts": "prompts",
        "weights": "new weights", "trainer": "between steps", "messages": "messages",
    }
)  # fmt: skip
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
    """Mean lag of the trained tokens, in optimizer steps."""
    trainer_idle: float
    """Share of the time in which the trainer waited for groups."""
    busy_slots: float
    """Share of the slots that were in use."""
    bottleneck: str
    """generation, training, accelerators' memory, staleness limit, or none."""

    def document(self, steps: int) -> dict[str, Any]:
        """The figures, and the seconds that this many steps take."""
        return {**asdict(self), "seconds": steps / self.steps_per_second}


class Source(Protocol):
    """Where the inputs of a prediction come from: a recorded run, a cached calibration, or a table."""

    def speeds_of(self, config: RunConfig) -> Speeds:
        """Times of decode and optimizer steps. Raises ConfigError for accelerators without speeds."""

    def work_of(self, config: RunConfig) -> Work:
        """Lengths and the other times. Raises ConfigError as `speeds_of`."""

    def sources_of(self, config: RunConfig) -> Mapping[str, str]:
        """Key of INPUTS -> "measured: ...", "looked up: ...", "configured: ..." or "assumed: ..."."""

    def warnings_of(self, config: RunConfig) -> list[str]:
        """What the prediction leaves out or extrapolates."""


def predict(source: Source, config: RunConfig) -> Prediction:
    """Simulate a configuration. Raises ConfigError as `simulate`."""
    run = simulate(shortened(config), source.speeds_of(config), source.work_of(config))
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
    enough = ROLLOUTS // (config.trainer.groups_per_step * config.rollouts.group_size)
    steps = max(MIN_STEPS, min(config.trainer.steps, MOST_STEPS, max(FEWEST_STEPS, enough)))
    return config.model_copy(update={"trainer": config.trainer.model_copy(update={"steps": steps})})


def named_bottleneck(
    config: RunConfig, *, trainer_idle: float, busy_slots: float, delay_seconds: float, waited_for_cache: float = 0.0
) -> str:
    """The bottleneck by the table of report/advice.py, in the words of the planning."""
    evidence = Evidence(trainer_idle=trainer_idle, actor_idle=1 - busy_slots, delay_seconds=delay_seconds)
    kind = bottleneck(evidence, takes_turns=config.takes_turns or config.gpu_turns)
    if kind == "turns":
        return f"{'generation' if trainer_idle > 1 / 2 else 'training'}, in turns"
    if waited_for_cache > 1 / 2 and kind in ("engine", "window"):
        return "accelerators' memory"
    return _NAMES[kind]


def inputs(source: Source, config: RunConfig) -> list[dict[str, str]]:
    """{"input", "value", "source"} of each input of a prediction, for output."""
    speeds, work = source.speeds_of(config), source.work_of(config)
    slots, rollouts = config.engine.concurrency, config.trainer.groups_per_step * config.rollouts.group_size
    tokens = round(rollouts * (work.prompt_tokens + work.lengths.mean))
    values = {
        "decode": f"{_time(speeds.decode_seconds(slots))} with {slots} sequences, "
        f"{_time(speeds.decode_seconds(1))} with 1",
        "train": f"{_time(speeds.train_seconds(tokens))} for {tokens:,} tokens",
        "completions": f"mean {work.lengths.mean:.0f}, longest {work.lengths.longest} tokens",
        "prompts": f"{work.prompt_tokens} tokens",
        "weights": f"{_time(work.commit_seconds + work.publish_seconds)} from a step to the swap, which takes "
        f"{_time(work.swap_seconds)}",
        "trainer": f"rows {_time(work.fetch_seconds)}, snapshot {_time(work.snapshot_seconds)}",
        "messages": f"a sync every {_time(work.sync_seconds)}",
    }
    sources = source.sources_of(config)
    rows = [{"input": name, "value": values[key], "source": sources[key]} for key, name in INPUTS.items()]
    if config.gpu_turns:
        text = f"{_time(work.turn_seconds)} to move state, and a prefill of all running sequences"
        rows.append({"input": "a turn", "value": text, "source": "assumed: 25 GB/s between GPU and host"})
    if work.turns > 1:
        text = f"{work.turns} of equal length, {_time(work.tool_seconds)} between two"
        rows.append({"input": "turns", "value": text, "source": "given: --turns, --tool-seconds"})
    if work.actor_speeds:
        text = ", ".join(f"{speed:g}" for speed in work.actor_speeds)
        rows.append({"input": "actors", "value": f"speeds {text}", "source": "given: --actor-speeds"})
    return rows


def _time(seconds: float) -> str:
    """Example: 12.3 ms."""
    return f"{seconds:.3g} s" if seconds >= 1 or not seconds else f"{1e3 * seconds:.3g} ms"
