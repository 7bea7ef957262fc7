"""Every setting with its default and meaning, for `pipelinerl config --keys`."""

import json
from typing import Any

from pydantic_core import PydanticUndefined, to_jsonable_python

from pipelinerl_core.config.load import fields


def every_key() -> list[dict[str, Any]]:
    """{key, default, meaning} in order of declaration; the default as JSON text, `(required)` without one."""
    listed = []
    for key, field in fields():
        is_required = field.default is PydanticUndefined
        default = "(required)" if is_required else json.dumps(to_jsonable_python(field.default))
        listed.append({"key": key, "default": default, "meaning": " ".join((field.description or "").split())})
    return listed
