"""A configuration as commented TOML: settings that differ from their defaults, all other keys as comments."""

import json
import textwrap
from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined, to_jsonable_python

from pipelinerl_core.config.load import kinds_of, variants
from pipelinerl_core.config.run import RunConfig

_WIDTH = 100


def commented_toml(config: RunConfig, title: str = "") -> str:
    """TOML that `load_config` reads back to an equal configuration, with the help of each key above the key.

    A key with its default is a comment: delete the `#` to set the key. title: text of the first comment.
    """
    blocks = [_comment(title)] if title else []
    top, sections = [], []
    for name, field in RunConfig.model_fields.items():
        value = getattr(config, name)
        if isinstance(value, BaseModel):
            sections.append(_section(name, value))
        else:
            top.append(_key(name, name, field, to_jsonable_python(value)))
    blocks += ["\n\n".join(top), *sections]
    return "\n\n\n".join(blocks) + "\n"


def _section(name: str, section: BaseModel) -> str:
    values = section.model_dump(mode="json")
    fields = sorted(type(section).model_fields.items(), key=lambda pair: pair[0] != "kind")
    keys = [_key(f"{name}.{key}", key, field, values[key]) for key, field in fields]
    other = [kind for kind in variants(name) if kind != values.get("kind")]
    heading = [_comment(f"Another {name}.kind ({', '.join(other)}) has other keys.")] if other else []
    return "\n\n".join(["\n".join([*heading, f"[{name}]"]), *keys])


def _key(dotted: str, key: str, field: FieldInfo, value: Any) -> str:
    """The help and the setting of one key; the setting is a comment if the value is the default."""
    default = field.default
    is_default = default is not PydanticUndefined and to_jsonable_python(default) == value
    is_kind = key == "kind" and not kinds_of(dotted) and bool(variants(dotted.partition(".")[0]))
    setting = f"{key} = {_inline(value)}"
    help_text = _comment(" ".join((field.description or "").split()))
    return "\n".join(filter(None, (help_text, setting if is_kind or not is_default else f"# {setting}")))


def _comment(text: str) -> str:
    return "\n".join(f"# {line}" for line in textwrap.wrap(text, _WIDTH - 2, break_on_hyphens=False))


def _inline(value: Any) -> str:
    """A JSON value as TOML on one line."""
    if isinstance(value, Mapping):
        pairs = (f"{json.dumps(str(key))} = {_inline(entry)}" for key, entry in value.items() if entry is not None)
        return "{ " + ", ".join(pairs) + " }" if value else "{}"
    if isinstance(value, list):
        return f"[{', '.join(map(_inline, value))}]"
    return json.dumps(value, ensure_ascii=False)  # strings, numbers and booleans of JSON are those of TOML
