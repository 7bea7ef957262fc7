"""TOML preset or file + dotted overrides -> RunConfig. Every mistake is one line: what, why, what to set."""

import codecs
import difflib
import math
import tomllib
import typing
from importlib import resources
from pathlib import Path
from types import NoneType, UnionType
from typing import Any

import tomli_w
from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from pipelinerl_core.config.run import RunConfig
from pipelinerl_core.errors import ConfigError

RESUMABLE = (
    "trainer.steps",
    "trainer.equal_reward_steps",
    "trainer.ranks",
    "trainer.threads",
    "trainer.pack_tokens",
    "trainer.share_prompts",
    "trainer.collective_seconds",
    "trainer.rescore_",
    "learner.decay_steps",  # only by a resume with another trainer.steps
    "learner.kind",
    "learner.zero_stage",
    "learner.offload",
    "learner.activation_checkpointing",
    "learner.attention",
    "model.device",
    "placement.",
)
"""Prefixes of the keys that a resume may change: they choose the length and the hardware of a run, not its steps."""
_SET_BY_RESUME = "learner.decay_steps"
"""Not by the user: a resume with more steps sets it (run/jobs.py)."""
_SYNONYMS = {
    "prompts.data": "prompts.path",
    "prompts.dataset": "prompts.path",
    "prompts.file": "prompts.path",
    "prompts.name": "prompts.path",
    "model.name": "model.path",
    "learner.learning_rate": "learner.lr",
    "trainer.learning_rate": "learner.lr",
    "trainer.batch_size": "trainer.groups_per_step",
    "rollouts.num_generations": "rollouts.group_size",
    "loss.beta": "loss.kl_coefficient",
    "loss.epsilon": "loss.clip_low",
}
"""A key as other libraries name it -> the key of this project, for keys whose spelling differs too much."""
_AUTO, _NUMBER = "literal['auto']", "constrained-float"
"""pydantic's names for the alternatives of a key that is auto or a number: a mistake is told for the number."""
PRESETS = resources.files("pipelinerl_core.config") / "presets"


def preset_names() -> list[str]:
    """Names of the shipped presets."""
    return sorted(entry.name.removesuffix(".toml") for entry in PRESETS.iterdir() if entry.name.endswith(".toml"))


def read_values(source: str, overrides: typing.Sequence[str] = ()) -> dict[str, Any]:
    """The values of a preset name or TOML file, with `section.key=value` overrides; raises ConfigError."""
    return _overridden(_read(source), overrides)


def with_overrides(config: RunConfig, overrides: typing.Sequence[str]) -> dict[str, Any]:
    """The values of a configuration with `section.key=value` overrides; raises ConfigError."""
    return _overridden(config.model_dump(mode="json"), overrides)


def _overridden(values: dict[str, Any], overrides: typing.Sequence[str]) -> dict[str, Any]:
    """Kinds first, because a new kind clears the keys of the old kind."""
    for override in sorted(overrides, key=lambda override: not override.partition("=")[0].endswith(".kind")):
        _apply(values, override)
    return values


def resume_values(config: RunConfig, overrides: typing.Sequence[str]) -> dict[str, Any]:
    """The values of a resumed run, with overrides of RESUMABLE keys; ConfigError for any other key."""
    for override in overrides:
        key = override.partition("=")[0]
        if not key.startswith(RESUMABLE):
            keys = ", ".join(f"{key}*" if key.endswith(".") else key for key in RESUMABLE if key != _SET_BY_RESUME)
            raise ConfigError(f"{override}: a resume can change only {keys}. Start a new run to change other keys")
    return with_overrides(config, overrides)


def validate(values: typing.Mapping[str, Any]) -> RunConfig:
    """The configuration of a nested mapping, in which keys may be `auto`; raises ConfigError with one line."""
    values = dict(values)
    _refuse_not_finite(values)
    try:
        return RunConfig.model_validate(values)
    except ValidationError as error:
        details = [detail for detail in error.errors() if detail["loc"][-1:] != (_AUTO,)]
        raise ConfigError("; ".join(_explain(detail, values) for detail in details)) from None


def _refuse_not_finite(values: typing.Mapping[str, Any], prefix: str = "") -> None:
    """Raise ConfigError for a number that is not finite, also among options of a user's code: JSON has none."""
    for name, value in values.items():
        if isinstance(value, dict):
            _refuse_not_finite(value, f"{prefix}{name}.")
        numbers = value if isinstance(value, list | tuple) else [value]
        if any(isinstance(number, float) and not math.isfinite(number) for number in numbers):
            raise ConfigError(f"{_printable(prefix + name)}={value}: input should be a finite number")


def _read(source: str) -> dict[str, Any]:
    if source.endswith(".toml"):
        path = Path(source)
        if not path.is_file():
            raise ConfigError(f"{source}: no such file. Give a TOML file or a preset: {', '.join(preset_names())}")
        try:
            text = _decoded(path.read_bytes())
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"{source}: cannot be read: {error}. Write the file in UTF-8") from None
    elif source in preset_names():
        text = (PRESETS / f"{source}.toml").read_text(encoding="utf-8")
    else:
        raise ConfigError(
            f"{source}: no such preset{_nearest(source, preset_names())} "
            f"Presets: {', '.join(preset_names())}; or give a file that ends in .toml"
        )
    try:
        return _with_named_parts(tomllib.loads(text))
    except (ValueError, RecursionError) as error:  # TOMLDecodeError, or an integer of thousands of digits
        raise ConfigError(f"{source}: not valid TOML: {error}") from None


def _decoded(data: bytes) -> str:
    """Text in UTF-8, or in UTF-16 as PowerShell writes it; either may begin with a byte order mark."""
    is_utf16 = data.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE))
    return data.decode("utf-16" if is_utf16 else "utf-8-sig")


def _with_named_parts(values: dict[str, Any]) -> dict[str, Any]:
    """[[mixture]] tables with a key `name` as [mixture.NAME] tables, so that overrides can name them."""
    if not isinstance(parts := values.get("mixture"), list):
        return values
    named: dict[str, Any] = {}
    for number, part in enumerate(parts, 1):
        name = part.get("name") if isinstance(part, dict) else None
        if not isinstance(name, str) or name in named:
            raise ConfigError(f'mixture: table {number} needs a `name` of its own, for example name = "math"')
        named[name] = {key: value for key, value in part.items() if key != "name"}
    return {**values, "mixture": named}


def _apply(values: dict[str, Any], override: str) -> None:
    """Set one dotted key in place; the value is read as TOML, and as a plain string when it is not TOML.

    The value of a key that holds text is text (`tracking.experiment=7`), and a list may be written as `A,B`.
    """
    key, separator, text = override.partition("=")
    if not separator or not key:
        raise ConfigError(f"{override}: not an override. Write section.key=value, for example trainer.steps=20")
    value = _toml_value(text)
    annotation = _annotation(key)
    types = _plain_types(annotation)
    if types and types <= {str, NoneType} and not isinstance(value, str):
        value = text
    elif types == {tuple} and not isinstance(value, list) and not text.startswith("["):
        value = _entries(text, is_text=str in typing.get_args(annotation))
    set_value(values, key, value)


def _toml_value(text: str) -> Any:
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except (ValueError, RecursionError):  # TOMLDecodeError, or an integer of thousands of digits
        return text


def _entries(text: str, *, is_text: bool) -> Any:
    """The entries of a list that is written without brackets: `A,B` as texts, `2,3` and `"A","B"` as in TOML."""
    if is_text and '"' not in text and "'" not in text:
        return [part.strip() for part in text.split(",")] if text else []
    return _toml_value(f"[{text}]")


def _annotation(key: str) -> Any:
    """The type of a key; None for an unknown key. Keys of parts of a mixture and of eval.sets are those of a run."""
    section, _, name = key.partition(".")
    if section == "mixture":
        _, _, name = name.partition(".")
        key = name if "." in name else f"mixture.<name>.{name}"
    elif key.startswith("eval.sets.") and name.count(".") >= 2:  # eval.sets.<name>.<key of prompts>
        key = f"prompts.{name.split('.', 2)[2]}"
    field = dict(fields()).get(key)
    return None if field is None else field.annotation


def _plain_types(annotation: Any) -> set[Any]:
    """The types that an annotation accepts, without their arguments."""
    if annotation is None:
        return set()
    origin = typing.get_origin(annotation)
    if origin is typing.Annotated:
        return _plain_types(typing.get_args(annotation)[0])
    if origin in (typing.Union, UnionType):
        return {plain for member in typing.get_args(annotation) for plain in _plain_types(member)}
    return {origin or annotation}


def set_value(values: dict[str, Any], key: str, value: Any) -> None:
    """Set one dotted key in place; a new kind of a section removes the keys of the old kind."""
    *path, last = key.split(".")
    table = values
    for part in path:
        table = table.setdefault(part, {})
        if not isinstance(table, dict):
            raise ConfigError(f"{key}: {part} is a value, not a section")
    if len(path) == 1 and last == "kind" and (kinds := variants(path[0])):
        old = kinds.get(str(table.get("kind")), next(iter(kinds.values())))
        for name in _replaced(path[0], old, kinds.get(str(value), old), table):
            del table[name]
    table[last] = value


def _replaced(section: str, old: type[BaseModel], new: type[BaseModel], table: dict[str, Any]) -> list[str]:
    """The keys that a change of a section's kind removes: keys that only the old kind has, and the path.

    A loss has its paper's defaults, so another loss keeps nothing."""
    if old is new:
        return []
    kept = set() if section == "loss" and "kind" in table else set(new.model_fields) - {"path"}
    return [name for name in table if name in old.model_fields and name not in kept]


def _explain(detail: ErrorDetails, values: dict[str, Any]) -> str:
    location = [str(part) for part in detail["loc"] if part != _NUMBER]
    dotted = _printable(".".join(_without_tag(location)))
    if detail["type"] == "extra_forbidden":
        return _hint(dotted, values)
    if detail["type"] == "missing":
        return f"{dotted}: not set. Set {dotted}, or another {location[0]}.kind"
    if detail["type"] in ("union_tag_invalid", "union_tag_not_found"):
        given = detail["input"]
        kind = _printable(str(given.get("kind", "") if isinstance(given, dict) else given))
        return f"{dotted}.kind={kind}: must be {_one_of(variants(dotted))}"
    if detail["type"] == "literal_error":
        values_there = detail["ctx"]["expected"].replace("'", "").replace("True or False", "true or false")
        return f"{dotted}={_printable(str(detail['input']))}: must be {values_there}"
    message = detail["msg"].removeprefix("Value error, ")
    if detail["type"] == "value_error" and "." not in dotted:  # of the configuration or a section: names its keys
        return message
    return f"{dotted}={detail['input']!r}: {message[:1].lower()}{message[1:]}"


def _printable(text: str) -> str:
    """A key as one printable line; other characters are escaped."""
    return "".join(character if character.isprintable() else repr(character)[1:-1] for character in text)


def _without_tag(location: list[str]) -> list[str]:
    """Drop the kind that pydantic puts after a section whose keys depend on the kind: prompts.sums.lengths ->
    prompts.lengths. A kind may have the name of one of its keys."""
    return location if not variants(location[0] if location else "") else [location[0], *location[2:]]


def _hint(unknown: str, values: dict[str, Any]) -> str:
    """What is wrong with an unknown key: the kind of its section or its name."""
    if unknown in known_keys():
        remedy = f"Set {unknown.partition('.')[0]}.kind={kinds_of(unknown)[0]}, or remove {unknown}"
        return f"{unknown} {_needs(unknown, values)}. {remedy}"
    section, _, name = unknown.partition(".")
    if section == "mixture":
        name = f"<name>.{name.partition('.')[2]}"
    nearest = _SYNONYMS.get(unknown)
    if nearest is None and section in RunConfig.model_fields:
        near = difflib.get_close_matches(name, [key.partition(".")[2] for key in known_keys(section)], n=1)
        nearest = f"{section}.{near[0]}" if near else None
    elif nearest is None:
        same = [key for key in known_keys() if key.rpartition(".")[2] == unknown]
        if len(same) > 1:
            return f"{unknown}: no such key; did you mean {_one_of(same)}? `pipelinerl config --keys` lists all"
        close = difflib.get_close_matches(unknown, [*RunConfig.model_fields, *known_keys()], n=1)
        nearest = next(iter([*same, *close]), None)
    if nearest is None:
        return f"{unknown}: no such key. `pipelinerl config --keys` lists all"
    needs = f" {nearest} {needs}." if (needs := _needs(nearest, values)) else ""
    return f"{unknown}: no such key; did you mean {nearest}?{needs} `pipelinerl config --keys` lists all"


def _needs(key: str, values: dict[str, Any]) -> str:
    """The kinds of its section that a key needs and that the section does not have; empty if there are none."""
    section, kinds = key.partition(".")[0], kinds_of(key)
    given = values.get(section)
    kind = given.get("kind") if isinstance(given, dict) else None
    kind = kind or next(iter(variants(section)), None)  # without a kind, the section is of its first kind
    return f"needs {section}.kind={_one_of(kinds)} (it is {kind})" if kinds and kind not in kinds else ""


def _one_of(names: typing.Iterable[str]) -> str:
    """Example: file or huggingface."""
    *others, last = names
    return f"{', '.join(others)} or {last}" if others else last


def _nearest(name: str, known: typing.Iterable[str]) -> str:
    close = difflib.get_close_matches(name, list(known), n=1, cutoff=0.5)
    return f"; did you mean {close[0]}?" if close else "."


def variants(section: str) -> dict[str, type[BaseModel]]:
    """Kind -> model of a section whose keys depend on its kind; empty for any other section."""
    field = RunConfig.model_fields.get(section)
    if field is None or field.discriminator is None:
        return {}
    return {model.model_fields["kind"].default: model for model in _models(field.annotation)}


def kinds_of(key: str) -> list[str]:
    """The kinds of its section that accept a key; empty if all kinds do."""
    section, _, name = key.partition(".")
    models = variants(section)
    kinds = [kind for kind, model in models.items() if name in model.model_fields]
    return kinds if len(kinds) < len(models) else []


def known_keys(section: str = "") -> list[str]:
    """Every dotted key that a configuration, or one section, may have, sorted."""
    return sorted(key for key, _ in fields() if not section or key.startswith(f"{section}."))


def fields() -> list[tuple[str, FieldInfo]]:
    """(dotted key, field) of every leaf, in order of declaration; variants of a union share their section's name."""
    leaves: dict[str, FieldInfo] = {}
    for section, info in RunConfig.model_fields.items():
        models = _models(info.annotation)
        prefix = f"{section}.<name>" if section == "mixture" else section
        if not models:
            leaves[section] = info
        for model in models:
            for name, leaf in sorted(model.model_fields.items(), key=lambda pair: pair[0] != "kind"):
                leaves.setdefault(f"{prefix}.{name}", leaf)
    return list(leaves.items())


def _models(annotation: Any) -> list[type[BaseModel]]:
    """The sections of an annotation: itself, or the members of its union."""
    members = typing.get_args(annotation) or (annotation,)
    return [member for member in members if isinstance(member, type) and issubclass(member, BaseModel)]


def as_toml(config: RunConfig) -> str:
    """The resolved configuration as TOML that `load_config` reads back to an equal one."""
    return tomli_w.dumps(config.model_dump(mode="json"))
