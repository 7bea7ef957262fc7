"""The base of every section of the configuration."""

from collections.abc import Callable
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

Dtype = Literal["float32", "bfloat16"]
Auto = Literal["auto"]
"""The default of a number that follows from other keys."""


class Section(BaseModel):
    """A frozen section: unknown keys are errors, the text under a field is its help."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True, allow_inf_nan=False)


def default_kind(kind: str) -> Callable[[Any], Any]:
    """A validator that gives a section without a `kind` this one."""
    return lambda value: {"kind": kind, **value} if isinstance(value, dict) else value
