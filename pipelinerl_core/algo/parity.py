"""Do engine and trainer compute the same log-probabilities for the same tokens under the same weights?

They run different code (slots and a KV cache here, packs without a cache there). A difference beyond rounding means a
wrong mask, position, temperature or weight, and would be trained as if it were off-policy data; so a run starts with
this gate.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import ArrayLike

from pipelinerl_core.errors import ParityError

# Largest accepted figures per dtype of the weights, in nats. bfloat16 means: weights in bfloat16, head in float32.
# In bfloat16, rounding differs from token to token and the largest difference grows with the number of tokens, hence
# a bound on a percentile. A wrong temperature or head shifts all tokens, hence a bound on the signed mean.
PARITY_BOUNDS: dict[str, dict[str, float]] = {
    "float32": {"mean": 1e-4, "max": 1e-2},
    "bfloat16": {"mean": 0.05, "p999": 0.6, "signed_mean": 0.01},
}
LEAST_HEALTHY_MEAN = {"float32": 1e-5, "bfloat16": 0.002}
"""By dtype: a healthy engine's mean |difference| counts as at least this value (rescoring.py). The rounding of few
tokens, or of nearly certain tokens, can be far smaller than the rounding of later tokens."""
_NAMES = {"mean": "mean", "p999": "99.9th percentile", "max": "max", "signed_mean": "signed mean"}
_STANDARD_ERRORS = 4.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ParityReport:
    """Difference of log-probabilities, |engine - trainer| in nats, over all tokens compared."""

    mean: float
    p999: float
    """The 99.9th percentile; of up to 1,000 tokens the maximum."""
    max: float
    signed_mean: float
    """Mean of engine - trainer."""
    bounds: Mapping[str, float]
    """The largest accepted absolute value of some of these figures."""
    num_tokens: int

    @property
    def ok(self) -> bool:
        """Whether all bounds hold; not a number is not ok."""
        return all(abs(getattr(self, name)) <= bound for name, bound in self.bounds.items())

    def __str__(self) -> str:
        figures = [
            f"{_NAMES[name]} {getattr(self, name):.2g} (at most {bound:.2g})" for name, bound in self.bounds.items()
        ]
        return f"|difference| over {self.num_tokens} tokens: {', '.join(figures)}"

    def check(self) -> "ParityReport":
        """Return this report, or raise ParityError that names the figures and their bounds."""
        if not self.ok:
            raise ParityError(
                f"parity gate: engine and trainer disagree on the log-probabilities of the same tokens: {self}. "
                "Training on them would be wrong: check that both loaded the same weights, model.dtype and "
                "rollouts.temperature"
            )
        return self


def logprob_parity(
    engine_logprobs: ArrayLike, trainer_logprobs: ArrayLike, dtype: Literal["float32", "bfloat16"]
) -> ParityReport:
    """Compare log-probabilities of the same tokens, arrays of one shape; dtype: type of the model's weights.

    A report with NaN is not ok. The signed mean of few tokens is uncertain: its bound is at least four standard
    errors. Raises ParityError for empty arrays or different shapes.
    """
    engine, trainer = np.asarray(engine_logprobs, np.float64), np.asarray(trainer_logprobs, np.float64)
    if engine.shape != trainer.shape or engine.size == 0:
        raise ParityError(
            f"log-probabilities of shape {engine.shape} (engine) and {trainer.shape} (trainer) cannot be compared: "
            "both need one value for each of the same tokens, at least one"
        )
    signed = engine - trainer
    difference = np.abs(signed)
    bounds = dict(PARITY_BOUNDS[dtype])
    if "signed_mean" in bounds:
        uncertainty = _STANDARD_ERRORS * float(signed.std()) / engine.size**0.5
        bounds["signed_mean"] = max(bounds["signed_mean"], uncertainty)
    return ParityReport(
        mean=float(difference.mean()),
        p999=float(np.quantile(difference, 0.999, method="higher")),
        max=float(difference.max()),
        signed_mean=float(signed.mean()),
        bounds=bounds,
        num_tokens=engine.size,
    )
