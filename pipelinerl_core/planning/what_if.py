"""What `pipelinerl simulate` prints for a configuration: inputs and their sources, prediction, memory."""

import json
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from pipelinerl_core.config import RunConfig
from pipelinerl_core.config.gpu_counts import gpus_of
from pipelinerl_core.errors import ConfigError
from pipelinerl_core.models.resolve import override_config
from pipelinerl_core.planning.cache import cached_calibration
from pipelinerl_core.planning.calibration import Calibration
from pipelinerl_core.planning.lengths import Lengths
from pipelinerl_core.planning.prediction import Source, inputs, predict
from pipelinerl_core.planning.roofline import Table
from pipelinerl_core.planning.simulated_engine import Speeds
from pipelinerl_core.planning.simulator import Work
from pipelinerl_core.supervision.fit import check_fit, fit_of

ROWS = {
    "steps_per_second": ("steps per second", ".3g"),
    "mean_lag": ("mean lag", ".2f"),
    "trainer_idle": ("trainer waits", ".0%"),
    "busy_slots": ("slots in use", ".0%"),
}
"""Figure -> its title and format."""


@dataclass(frozen=True, slots=True)
class Changed:
    """A source with completions `factor` times as long, other lengths or turns, or unequal actors."""

    source: Source
    factor: float = 1.0
    lengths: Lengths | None = None
    turns: int = 1
    tool_seconds: float = 0.0
    actor_speeds: tuple[float, ...] = ()
    """Speed of the decode steps of each actor, relative to the source; empty: 1 for all."""

    def speeds_of(self, config: RunConfig) -> Speeds:
        # In the table, the time of a decode step depends on the tokens that it reads from the KV cache.
        source = Table(self.work_of(config).lengths) if isinstance(self.source, Table) else self.source
        return source.speeds_of(config)

    def work_of(self, config: RunConfig) -> Work:
        work, actors = self.source.work_of(config), config.placement.actors
        if self.actor_speeds and len(self.actor_speeds) != actors:
            raise ConfigError(
                f"--actor-speeds names {len(self.actor_speeds)} actors, and placement.actors={actors}. "
                "Give one speed per actor"
            )
        lengths = (self.lengths or work.lengths).scaled(self.factor, config.rollouts.max_tokens)
        return replace(
            work,
            lengths=lengths,
            turns=self.turns,
            tool_seconds=self.tool_seconds,
            actor_speeds=self.actor_speeds,
        )

    def sources_of(self, config: RunConfig) -> Mapping[str, str]:
        sources = dict(self.source.sources_of(config))
        if self.lengths is None and self.factor == 1:
            return sources
        origin = "given: --lengths" if self.lengths else sources["completions"]
        times = f", times {self.factor:g}" if self.factor != 1 else ""
        return sources | {"completions": f"{origin}{times}, at most rollouts.max_tokens"}

    def warnings_of(self, config: RunConfig) -> list[str]:
        return self.source.warnings_of(config)


def source_of(config: RunConfig) -> Source:
    """The cached calibration of this machine, else the table of accelerators, which raises ConfigError if it lacks
    the accelerator or the model."""
    calibration = None if config.emulation.accelerators else cached_calibration(config)
    return calibration or Table()


def read_lengths(text: str, longest: int) -> Lengths:
    """Lengths of completions from `--lengths`: a mean, or a JSON file with a list of lengths or {length: count}.

    Raises ConfigError for an empty or invalid list.
    """
    try:
        mean = float(text)
    except ValueError:
        return _lengths_of_file(text)
    if not 1 <= mean <= longest:
        raise ConfigError(f"--lengths {text}: the mean must be from 1 to rollouts.max_tokens={longest}")
    return Lengths.around(mean, longest)


def _lengths_of_file(path: str) -> Lengths:
    try:
        content = json.loads(Path(path).read_text(encoding="utf-8"))
        pairs = content.items() if isinstance(content, dict) else ((length, 1) for length in content)
        counts = [(int(length), int(count)) for length, count in pairs]
        return Lengths.of([length for length, count in counts for _ in range(count)])
    except OSError as error:
        raise ConfigError(f"--lengths {path}: {error.strerror}. Give a mean or a JSON file of lengths") from None
    except ConfigError as error:
        raise ConfigError(f"--lengths {path}: {error}") from None
    except (ValueError, TypeError):
        raise ConfigError(f"--lengths {path}: not a JSON list of lengths or an object {{length: count}}") from None


def parse_speeds(text: str) -> tuple[float, ...]:
    """Speeds of actors from `--actor-speeds`, for example 1,1,0.5. Raises ConfigError."""
    try:
        speeds = tuple(float(speed) for speed in text.split(",")) if text else ()
    except ValueError:
        speeds = (0.0,)
    if not all(0 < speed < math.inf for speed in speeds):
        raise ConfigError(f"--actor-speeds {text}: give a number above 0 per actor, for example 1,1,0.5")
    return speeds


def on_gpus(config: RunConfig, total: int, given: Collection[str] = ()) -> RunConfig:
    """The configuration on `total` GPUs: trainer.ranks, if not `given`, is the number of GPUs that do not generate.

    Raises ConfigError if there are too few.
    """
    if not total:
        return config
    generating = config.placement.actors * (gpus_of(config, "actor") or 1)
    text = f"placement.actors={config.placement.actors} generate on {generating} of {total} GPUs"
    if generating >= total and not config.placement.share_gpu:
        raise ConfigError(f"{text}, so none trains. Lower placement.actors or engine.tensor_parallel")
    if "trainer.ranks" not in given and not config.placement.share_gpu:
        return override_config(config, [f"trainer.ranks={total - generating}"])
    training = 0 if config.placement.share_gpu else config.trainer.ranks
    if generating + training > total:
        raise ConfigError(f"{text}, and trainer.ranks={config.trainer.ranks} need more. Lower one of them")
    return config


def document(source: Source, config: RunConfig) -> dict[str, Any]:
    """The figures of a configuration for `--json`. Raises ConfigError if the configuration cannot be simulated."""
    warned = check_fit(config)
    if config.environment.path and source.work_of(config).turns == 1:
        warned.append("waits for the environment. Give --turns and --tool-seconds")
    fit = fit_of(config)
    return {
        "inputs": inputs(source, config),
        "predicted": predict(source, config).document(config.trainer.steps),
        "memory": fit.document() if fit else None,
        "memory_lines": fit.lines() if fit else ["unknown: the shape of the model is not known"],
        "not_simulated": [*source.warnings_of(config), *warned],
        "steps": config.trainer.steps,
    }


def recorded_document(calibration: Calibration, source: Source, changed: RunConfig | None) -> dict[str, Any]:
    """The figures of a recorded run: measured, predicted, and predicted with changed settings or lengths."""
    config = changed or calibration.config
    result = document(source, config)
    assert calibration.measured is not None
    steps = result["steps"]
    rows = {"measured": calibration.measured.document(steps)}
    rows["predicted"] = predict(calibration, calibration.config).document(steps)
    if changed is not None or source is not calibration:
        rows["changed"] = result["predicted"]
    return result | rows | {"ess_by_lag": [asdict(at_lag) for at_lag in calibration.ess_by_lag]}


def lines(result: Mapping[str, Any]) -> list[str]:
    """The figures as text."""
    columns = [name for name in ("measured", "predicted", "changed") if name in result]
    text = [f"{'':<18}" + "".join(f"{name:>12}" for name in columns)] if len(columns) > 1 else []
    for key, (title, form) in ROWS.items():
        text.append(f"{title:<18}" + "".join(f"{format(result[name][key], form):>12}" for name in columns))
    times = "".join(f"{_duration(result[name]['seconds']):>12}" for name in columns)
    text.append(f"{'time of the run':<18}{times}   ({result['steps']} steps)")
    text.append(f"bottleneck: {result[columns[-1]]['bottleneck']}")
    if "changed" in result:
        ratio = result["changed"]["steps_per_second"] / result["predicted"]["steps_per_second"]
        text.append(f"with the changed settings {ratio:.2f} times the steps per second of the recorded settings")
    if result.get("ess_by_lag"):
        text += ["", "effective sample size of the recorded steps (other lags and settings: not predicted)"]
        text.append(f"  {'mean lag':<10}{'steps':>6}{'ess':>8}{'ess_sequence':>14}")
        text += [
            f"  {row['lag']:<10}{row['steps']:>6}{row['ess']:>8.3f}{row['ess_sequence']:>14.3f}"
            for row in result["ess_by_lag"]
        ]
    width = max(len(row["value"]) for row in result["inputs"])
    text += ["", "inputs"]
    text += [f"  {row['input']:<15} {row['value']:<{width}}  {row['source']}" for row in result["inputs"]]
    text += ["", "memory", *(f"  {line}" for line in result["memory_lines"])]
    return [*text, "", *(f"not simulated: {warning}" for warning in result["not_simulated"])]


def names(overrides: Sequence[str]) -> set[str]:
    """Keys of overrides."""
    return {override.partition("=")[0] for override in overrides}


def _duration(seconds: float) -> str:
    """Example: 13.0 h."""
    for unit, length in (("d", 86400.0), ("h", 3600.0), ("min", 60.0)):
        if seconds >= 2 * length:
            return f"{seconds / length:.1f} {unit}"
    return f"{seconds:.0f} s"
