"""The ranges of the numbers in messages and records, declared once as annotated types that pydantic checks.

What a peer says ends up in JSON, in int64, int32 and float64 columns of Arrow and Parquet, in MLflow, in Prometheus
and in sums over all actors. Every number in these ranges can be represented in each of them; a message with any other
number is refused by name at the hub's door.

Nothing here imports pydantic: engines and learner need the nouns that have these types, and run without pydantic.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

if TYPE_CHECKING:
    from pydantic import ValidationError

MAX_COUNT = (1 << 53) - 1
"""Exact as float64 and in every JSON reader; a thousand such numbers add up to less than 2^63."""
MAX_STEP = (1 << 31) - 1
"""Versions are int32 where the lag of tokens is computed."""
MAX_ATTEMPT = (1 << 30) - 1
"""The column is int32, and attempts grow: far below its end, far above the attempts of 100,000 hubs."""
MAX_SECONDS = 1e11
"""The year 5138; in microseconds, as timestamps in Parquet, it is below 2^63."""
MAX_NUMBER = 1e18
"""A thousand such numbers are finite, and so are their squares."""
MAX_REWARD = 1e9
"""float32; differences, means and squares of the rewards of a group are finite in float32."""
MAX_LOGPROB = 1e6
"""float32; sums over the tokens of a step are finite in float32. A log-probability is above 0 by rounding only."""


@dataclass(frozen=True, slots=True)
class Range:
    """Bounds of a number, both included; a float is finite."""

    low: float | None = None
    high: float | None = None

    def __get_pydantic_core_schema__(self, source: Any, handler: Callable[[Any], dict[str, Any]]) -> dict[str, Any]:
        """What pydantic asks of an annotation."""
        bounds = {"ge": self.low, "le": self.high, "allow_inf_nan": False if source is float else None}
        return {**handler(source), **{name: bound for name, bound in bounds.items() if bound is not None}}


Count = Annotated[int, Range(0, MAX_COUNT)]
"""A number, size or id."""
Step = Annotated[int, Range(0, MAX_STEP)]
"""An optimizer step, and the weight version that it makes."""
StepOrNone = Annotated[int, Range(-1, MAX_STEP)]
"""The same; -1: none yet."""
Attempt = Annotated[int, Range(0, MAX_ATTEMPT)]
"""Which lease of a group."""
Total = Annotated[int, Range(-(1 << 63), (1 << 63) - 1)]
"""A sum of counts, or a difference of two."""
Seconds = Annotated[float, Range(0, MAX_SECONDS)]
"""A duration, or a Unix time."""
Number = Annotated[float, Range(-MAX_NUMBER, MAX_NUMBER)]
"""Any other quantity that a peer reports."""
Finite = Annotated[float, Range()]
"""A metric: whatever a learner has computed, but JSON has no NaN."""

_MAX_PLACE = 100  # characters; a key that a peer has chosen may be part of the place


def first_error(error: "ValidationError") -> str:
    """One line: where the first value that is wrong stands, and the rule that the value breaks."""
    first = error.errors(include_url=False, include_input=False)[0]
    place = ".".join(str(part) for part in first["loc"])[:_MAX_PLACE]
    return f"{place}: {first['msg']}" if place else str(first["msg"])
