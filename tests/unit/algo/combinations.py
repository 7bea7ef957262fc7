"""The settings of the objective and their combinations, for test_combinations.py."""

from collections.abc import Iterator, Mapping
from functools import cache
from itertools import product
from types import MappingProxyType
from typing import Any, get_args

from pipelinerl_core.config.load import kinds_of, variants
from pipelinerl_core.config.losses import AdvantageKind, Normalization
from pipelinerl_core.config.schedules import ScheduleSection
from pipelinerl_core.errors import ConfigError
from pipelinerl_core.models.resolve import build_config

AXES: Mapping[str, tuple[Any, ...]] = MappingProxyType(
    {
        "loss.kind": tuple(kind for kind in variants("loss") if kind != "custom"),
        "loss.advantage": tuple(kind for kind in get_args(AdvantageKind) if kind not in ("decoupled", "custom")),
        "loss.normalization": get_args(Normalization),
        "schedule.stale": get_args(ScheduleSection.model_fields["stale"].annotation),
        "rollouts.filter_zero_variance": (False, True),
    }
)
"""Key -> all values."""

OPTIONS: Mapping[str, Any] = MappingProxyType(
    {
        "loss.entropy_bonus": 0.03,
        "loss.kl_coefficient": 0.2,
        "loss.sequence_ratio_max": 1.35,
        "loss.negative_kl_max": 0.1,
        "loss.kl_weighted": True,
        "loss.overlong_filtering": True,
        "loss.dual_clip": 1.3,
        "loss.value_coefficient": 0.7,
        "reward.overlong_tokens": 3,
        "trainer.skip_zero_advantage": False,
        "schedule.kind": "april",
        "schedule.steps_per_phase": 2,
        "learner.ess_scaling": True,
        "loss.teacher": "/models/teacher",
        "loss.teacher_coefficient": 0.7,
        "loss.reward_coefficient": 0.3,
        "rollouts.temperature": 0.7,
        "schedule.max_lag": 1,
        "trainer.ranks": 3,
        "trainer.packing": "filled",
        "trainer.pack_tokens": 16,
        "mixture": {
            "short": {"max_tokens": 4, "reward": {"overlong_tokens": 2}},
            "long": {"weight": 2.0, "reward": {"overlong_tokens": 3}},
        },
    }
)
"""Key -> a value that is not the default."""

Settings = Mapping[str, Any]
"""Dotted key, or a whole section -> value."""


def values_of(settings: Settings) -> dict[str, Any]:
    """The nested mapping for `build_config`, in float32 so that the data type is not looked up."""
    values: dict[str, Any] = {"model": {"dtype": "float32"}}
    for key, value in settings.items():
        section, _, name = key.partition(".")
        values.setdefault(section, {}).update({name: value} if name else value)
    if "steps_per_phase" in values.get("schedule", {}):
        values["schedule"].setdefault("kind", "conventional")
    return values


def refusal(settings: Settings) -> str:
    """The message with which a configuration of these settings is refused; empty if it is accepted."""
    try:
        build_config(values_of(settings))
    except ConfigError as error:
        return str(error)
    return ""


def accepts_key(settings: Settings, key: str) -> bool:
    """Whether the kind of loss in the settings has the key."""
    kinds = kinds_of(key) if key.startswith("loss.") else []
    return not kinds or settings.get("loss.kind", AXES["loss.kind"][0]) in kinds


def all_combinations() -> Iterator[dict[str, Any]]:
    """Every combination of the values of AXES."""
    for chosen in product(*AXES.values()):
        yield dict(zip(AXES, chosen, strict=True))


@cache
def base_of(key: str) -> dict[str, Any]:
    """The first setting with which an option is accepted; empty if the defaults accept the option."""
    alone = ({axis: value} for axis, values in AXES.items() for value in values)
    others = ({other: value} for other, value in OPTIONS.items())
    return next(base for base in ({}, *alone, *others) if not refusal({**base, key: OPTIONS[key]}))
