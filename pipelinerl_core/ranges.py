"""The ranges of the numbers in messages and records, declared once as annotated types (pydantic).

What a peer says ends up in JSON, in int64, int32 and float64 columns of Arrow and Parquet, in MLflow, in Prometheus
and in sums over all actors. Every number in these ranges can be represented in each of them; a message with any other
number is refused by name at the hub's door.
"""

from typing import Annotated

from pydantic import Field, ValidationError

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

Count = Annotated[int, Field(ge=0, le=MAX_COUNT)]
"""A number, size or id."""
Step = Annotated[int, Field(ge=0, le=MAX_STEP)]
"""An optimizer step, and the weight version that it makes."""
StepOrNone = Annotated[int, Field(ge=-1, le=MAX_STEP)]
"""The same; -1: none yet."""
Attempt = Annotated[int, Field(ge=0, le=MAX_ATTEMPT)]
"""Which lease of a group."""
Total = Annotated[int, Field(ge=-(1 << 63), lt=1 << 63)]
"""A sum of counts, or a difference of two."""
Seconds = Annotated[float, Field(ge=0, le=MAX_SECONDS, allow_inf_nan=False)]
"""A duration, or a Unix time."""
Number = Annotated[float, Field(ge=-MAX_NUMBER, le=MAX_NUMBER, allow_inf_nan=False)]
"""Any other quantity that a peer reports."""
Finite = Annotated[float, Field(allow_inf_nan=False)]
"""A metric: whatever a learner has computed, but JSON has no NaN."""

_MAX_PLACE = 100  # characters; a key that a peer has chosen may be part of the place


def first_error(error: ValidationError) -> str:
    """One line: where the first value that is wrong stands, and the rule that the value breaks."""
    first = error.errors(include_url=False, include_input=False)[0]
    place = ".".join(str(part) for part in first["loc"])[:_MAX_PLACE]
    return f"{place}: {first['msg']}" if place else str(first["msg"])
