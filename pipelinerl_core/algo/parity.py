"""Do engine and trainer compute the same log-probabilities for the same tokens under the same weights?

They run different code (slots and a KV cache here, packs without a cache there). A difference beyond rounding means a
wrong mask, position, temperature or weight, and would be trained as if it were off-policy data; so a run starts with
this gate.
"""

from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import ArrayLike

from pipelinerl_core.errors import ParityError

# (bound of mean, bound of max) of |engine - trainer|, in nats. bfloat16 means: weights in bfloat16, head in float32.
PARITY_BOUNDS: dict[str, tuple[float, float]] = {"float32": (1e-4, 1e-2), "bfloat16": (0.02, 0.5)}


@dataclass(frozen=True, slots=True, kw_only=True)
class ParityReport:
    """Difference of log-probabilities, |engine - trainer| in nats, over all tokens compared."""

    mean: float
    max: float
    bound_mean: float
    bound_max: float
    num_tokens: int
    ok: bool

    def check(self) -> "ParityReport":
        """Return this report, or raise ParityError that names both figures and their bounds."""
        if not self.ok:
            raise ParityError(
                f"engine and trainer disagree on the log-probabilities of {self.num_tokens} tokens: "
                f"mean |difference| {self.mean:.3g} (at most {self.bound_mean:g}), "
                f"max {self.max:.3g} (at most {self.bound_max:g}). "
                "Training on them would be wrong: check that both loaded the same weights, dtype and temperature"
            )
        return self


def logprob_parity(
    engine_logprobs: ArrayLike, trainer_logprobs: ArrayLike, dtype: Literal["float32", "bfloat16"]
) -> ParityReport:
    """Compare log-probabilities of the same tokens, arrays of one shape; dtype: type of the model's weights.

    A report with NaN is not ok. Raises ParityError for empty arrays or different shapes.
    """
    engine, trainer = np.asarray(engine_logprobs, np.float64), np.asarray(trainer_logprobs, np.float64)
    if engine.shape != trainer.shape or engine.size == 0:
        raise ParityError(
            f"log-probabilities of shape {engine.shape} (engine) and {trainer.shape} (trainer) cannot be compared: "
            "both need one value for each of the same tokens, at least one"
        )
    difference = np.abs(engine - trainer)
    bound_mean, bound_max = PARITY_BOUNDS[dtype]
    mean, largest = float(difference.mean()), float(difference.max())
    # Comparisons with NaN are false, so a NaN is not ok.
    is_ok = mean <= bound_mean and largest <= bound_max
    return ParityReport(
        mean=mean, max=largest, bound_mean=bound_mean, bound_max=bound_max, num_tokens=engine.size, ok=is_ok
    )
