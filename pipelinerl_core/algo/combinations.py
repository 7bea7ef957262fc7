"""Which settings of the objective go together; `python -m pipelinerl_core.algo.combinations` prints
docs/combinations.md.

The page is computed: every combination is built as a configuration, and a refused combination has the message that
`pipelinerl train` prints.
"""

import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache
from itertools import combinations, product
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


def as_markdown() -> str:
    """The page docs/combinations.md."""
    num_all = num_refused = 0
    accepted: dict[tuple[str, str], list[tuple[Any, ...]]] = {}
    reasons: dict[str, int] = {}
    for settings in all_combinations():
        num_all += 1
        kind, advantage, *others = settings.values()
        cell = accepted.setdefault((kind, advantage), [])
        if message := refusal(settings):
            num_refused += 1
            reasons[message] = reasons.get(message, 0) + 1
        else:
            cell.append(tuple(others))
    advantages = AXES["loss.advantage"]
    losses: dict[tuple[str, ...], list[str]] = {}
    for kind in AXES["loss.kind"]:
        losses.setdefault(tuple(_cell(accepted[kind, advantage]) for advantage in advantages), []).append(f"`{kind}`")
    rows = [[", ".join(kinds), *cells] for cells, kinds in losses.items()]
    return "\n".join(
        [
            "# Which settings of the objective go together",
            "",
            "`python -m pipelinerl_core.algo.combinations > docs/combinations.md` writes this page.",
            "",
            f"Of {num_all} combinations of {_listed(AXES)}, {num_refused} are refused.",
            "`tests/unit/algo/test_combinations.py` compares the gradient of every accepted combination, also with",
            "the options below, with the formulas in [algorithms](algorithms.md), to 5e-6 of the gradient's norm.",
            "",
            "## Loss and advantage",
            "",
            f"*any*: with every value of {_listed(list(AXES)[2:])}. Else the cell has the values that are accepted.",
            "",
            *_table(["loss.kind", *(f"`{advantage}`" for advantage in advantages)], rows),
            "",
            *(f"{num} combinations are refused with: {message}." for message, num in reasons.items()),
            "",
            "## Options",
            "",
            "What is refused of each option with one value of the settings above, and of two options; all other",
            "settings have their defaults. The message shows the first option and the first value. A key that a",
            "loss does not read is refused, too ([algorithms](algorithms.md#loss-algolosses-one-file-per-function)).",
            "",
            *_table(["option", "with", "refused with"], _grouped(_option_rows())),
            "",
        ]
    )


def _grouped(refusals: Iterable[tuple[str, str, str]]) -> Iterator[list[str]]:
    """Rows of (option, setting, message): messages that differ in these two alone share a row."""
    rows: dict[str, tuple[dict[str, None], dict[str, None], str]] = {}
    for option, setting, message in refusals:
        pattern = re.sub(r"loss\.\w+=\S+", "...", message)
        options, settings, _ = rows.setdefault(pattern, ({}, {}, message))
        options[f"`{option}`"] = settings[f"`{setting}`"] = None
    for options, settings, message in rows.values():
        assert 1 in (len(options), len(settings)), "a row must not name pairs that are accepted"
        yield [", ".join(options), ", ".join(settings), message]


def _option_rows() -> Iterator[tuple[str, str, str]]:
    """(option, the setting or the other option, message) of each refused pair."""
    for key, value in OPTIONS.items():
        base = base_of(key)
        for axis, axis_values in AXES.items():
            for other in axis_values:
                settings = {**base, key: value, axis: other}
                if accepts_key(settings, key) and (message := refusal(settings)):
                    yield _text(key, value), _text(axis, other), message
    for (key, value), (other_key, other) in combinations(OPTIONS.items(), 2):
        base = {**base_of(key), **base_of(other_key)}
        is_alone = any(refusal({**base, option: OPTIONS[option]}) for option in (key, other_key))
        if not is_alone and (message := refusal({**base, key: value, other_key: other})):
            yield _text(key, value), _text(other_key, other), message


@cache
def base_of(key: str) -> dict[str, Any]:
    """The first setting with which an option is accepted; empty if the defaults accept the option."""
    alone = ({axis: value} for axis, values in AXES.items() for value in values)
    others = ({other: value} for other, value in OPTIONS.items())
    return next(base for base in ({}, *alone, *others) if not refusal({**base, key: OPTIONS[key]}))


def _cell(accepted: Sequence[tuple[Any, ...]]) -> str:
    axes = list(AXES.items())[2:]
    kept = [[value for value in values if any(combination[place] == value for combination in accepted)]
            for place, (_, values) in enumerate(axes)]  # fmt: skip
    if not accepted:
        return "refused"
    assert len(accepted) == len(list(product(*kept))), "refusals that depend on two settings need another page"
    limits = [
        ", ".join(f"`{_text(key, value)}`" for value in chosen)
        for (key, values), chosen in zip(axes, kept, strict=True)
        if len(chosen) < len(values)
    ]
    return "; ".join(limits) or "any"


def _text(key: str, value: Any) -> str:
    if isinstance(value, Mapping):
        return f"{key}.{'|'.join(value)}"
    return f"{key}={str(value).lower() if isinstance(value, bool) else value}"


def _listed(keys: Iterable[str]) -> str:
    *others, last = (f"`{key}`" for key in keys)
    return f"{', '.join(others)} and {last}"


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> Iterator[str]:
    yield f"| {' | '.join(head)} |"
    yield "|---" * len(head) + "|"
    yield from (f"| {' | '.join(row)} |" for row in rows)


if __name__ == "__main__":
    sys.stdout.write(as_markdown())
