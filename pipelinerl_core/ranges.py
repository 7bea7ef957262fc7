"""The ranges of the numbers in messages and records, declared once as annotated types that pydantic checks.

Numbers of a peer are stored in JSON, in Arrow and Parquet (int64, int32, float64), in MLflow and Prometheus, and are
summed over all actors. Every number in these ranges can be represented in each of these places. The hub refuses a
message with a number outside its range, and names the field.

This module does not import pydantic: engines and learners use types with these annotations and run without pydantic.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

if TYPE_CHECKING:
    from pydantic import ValidationError

MAX_COUNT = (1 << 53) - 1
"""Exact as float64 and in every JSON reader; the sum of a thousand such numbers is below 2^63."""
MAX_STEP = (1 << 31) - 1
"""The lag of tokens is computed with int32 versions."""
MAX_ATTEMPT = (1 << 30) - 1
"""Within the int32 column, and above the attempts of 100,000 hub epochs."""
MAX_SECONDS = 1e11
"""The year 5138; in microseconds, as timestamps in Parquet, it is below 2^63."""
MAX_NUMBER = 1e18
"""A thousand such numbers are finite, and so are their squares."""
MAX_REWARD = 1e9
"""float32; differences, means and squares of the rewards of a group are finite in float32."""
MAX_COMPONENTS = 16
"""Named components of a reward; each is a metric of its own."""
COMPONENT_NAME = r"[A-Za-z0-9_.-]{1,40}"
"""A part of the metric reward/<name>."""
MAX_LOGPROB = 1e6
"""float32; sums over the tokens of a step are finite in float32. A log-probability is above 0 by rounding only."""


@dataclass(frozen=True, slots=True)
class Range:
    """Bounds of a number, both included; a float is finite."""

    low: float | None = None
    high: float | None = None

    def __get_pydantic_core_schema__(self, source: Any, handler: Callable[[Any], dict[str, Any]]) -> dict[str, Any]:
        bounds = {"ge": self.low, "le": self.high, "allow_inf_nan": False if source is float else None}
        return {**handler(source), **{name: bound for name, bound in bounds.items() if bound is not None}}


Count = Annotated[int, Range(0, MAX_COUNT)]
"""A number, size or id."""
Step = Annotated[int, Range(0, MAX_STEP)]
"""An optimizer step, and the weight version that it makes."""
StepOrNone = Annotated[int, Range(-1, MAX_STEP)]
"""A step; -1 for none yet."""
Attempt = Annotated[int, Range(0, MAX_ATTEMPT)]
"""Number of the lease of a group."""
Total = Annotated[int, Range(-(1 << 63), (1 << 63) - 1)]
"""A sum of counts, or a difference of two."""
Seconds = Annotated[float, Range(0, MAX_SECONDS)]
"""A duration, or a Unix time."""
Number = Annotated[float, Range(-MAX_NUMBER, MAX_NUMBER)]
"""Any other quantity that a peer reports."""
Finite = Annotated[float, Range()]
"""A metric: any finite number, since JSON has no NaN."""

_MAX_PATH = 100  # characters; the path may contain long keys of a peer


def first_error(error: "ValidationError") -> str:
    """One line: the path of the first invalid value, and the rule that the value violates."""
    first = error.errors(include_url=False, include_input=False)[0]
    path = ".".join(str(part) for part in first["loc"])[:_MAX_PATH]
    return f"{path}: {first['msg']}" if path else str(first["msg"])
