"""Sums the metrics of the packs of an optimizer step, on one rank and over all ranks.

Shapes: N = sampled tokens of a pack.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import reduce
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from pipelinerl_core.algo.by_length import NUM_SUMS, length_metrics, length_sums
from pipelinerl_core.algo.importance import EssTerms, ess_terms, sequence_log_ratios, total_ess
from pipelinerl_core.algo.losses import LossSums
from pipelinerl_core.algo.mismatch import NUM_DIFFERENCE_SUMS, difference_metrics, difference_sums
from pipelinerl_core.algo.packed import PackedBatch, moved
from pipelinerl_core.errors import TrainingDiverged
from pipelinerl_core.training.ranks import Ranks

# Sums per pack that are on the device, and counts that are known on the host.
# Fields of LossSums that not every loss has -> metric, the mean over trained tokens.
_OPTIONAL = {
    "kl_ref": "policy/kl_ref",
    "kl_teacher": "policy/kl_teacher",
    "value_error": "policy/value_error",
    "kl_corrected": "control/kl_corrected_fraction",
    "negative_masked": "control/negative_masked_fraction",
}
_OF_PACK = ("loss", "num_trained", "ratio", "clipped", "kl", "entropy", *_OPTIONAL)
_KNOWN = (
    "num_rollouts",
    "num_sampled",
    "num_tokens",
    "packed_tokens",
    "budget_tokens",
    "num_packs",
    *(f"with_{name}" for name in _OPTIONAL),
)
_FINITE = ("train/loss", "train/grad_norm", "importance/kl", "importance/ess", "importance/ess_sequence")


@dataclass(slots=True)
class StepSums:
    """Sums over packs. Empty packs, which equalize the number of packs over ranks, are not counted.

    The sums stay on the device until `over_ranks`, the only place of a step that waits for the device: no other code
    here may read a value of a tensor or create a shape that depends on values.
    """

    version: int
    """The weights being trained."""
    pack_tokens: int
    """Token budget of a pack."""
    known: dict[str, int] = field(default_factory=lambda: dict.fromkeys(_KNOWN, 0))
    of_packs: list[Tensor] = field(default_factory=list)
    log_ratios: list[Tensor] = field(default_factory=list)
    sequence_log_ratios: list[Tensor] = field(default_factory=list)
    differences: list[Tensor] = field(default_factory=list)
    by_length: list[Tensor] = field(default_factory=list)
    keeps_logprobs: bool = False
    """Whether `add` keeps the next two fields."""
    trainer_logprobs: list[Tensor] = field(default_factory=list)
    rows: list[Tensor] = field(default_factory=list)
    """Index of the row of each sequence of each pack."""

    def add(self, batch: PackedBatch, sums: LossSums, trainer_logprobs_N: Tensor, entropy_N: Tensor) -> None:
        if batch.is_empty:
            return
        self.known["num_sampled"] += len(entropy_N)
        self.known["num_rollouts"] += batch.num_sequences
        self.known["num_tokens"] += batch.row_tokens
        self.known["packed_tokens"] += batch.num_tokens
        self.known["budget_tokens"] += max(batch.num_tokens, self.pack_tokens)
        self.known["num_packs"] += 1
        of_pack = [sums.loss, sums.num_tokens, sums.ratio, sums.clipped, sums.kl, entropy_N.sum()]
        for name in _OPTIONAL:
            optional_sum: Tensor | None = getattr(sums, name)
            self.known[f"with_{name}"] += optional_sum is not None
            of_pack.append(torch.zeros_like(sums.kl) if optional_sum is None else optional_sum)
        self.of_packs.append(torch.stack([value.detach().double() for value in of_pack]))
        # Neither truncated nor masked: ess measures the effect of the lag before truncation and masks reduce it.
        log_ratios_N = trainer_logprobs_N.detach() - batch.rollout_logprobs_N
        num_sequences = batch.num_sequences
        self.log_ratios.append(log_ratios_N)
        self.sequence_log_ratios.append(sequence_log_ratios(log_ratios_N, batch.sequence_N, num_sequences))
        lags_N = self.version - batch.versions_N
        self.differences.append(
            difference_sums(log_ratios_N, lags_N, batch.sequence_N, batch.trained_M, num_sequences=num_sequences)
        )
        if self.keeps_logprobs:
            self.trainer_logprobs.append(trainer_logprobs_N.detach())
            self.rows.append(batch.row_S)
        self.by_length.append(
            length_sums(lags_N, batch.sequence_N, batch.trained_M, sums.is_clipped_M, num_sequences=num_sequences)
        )

    def over_ranks(self, ranks: Ranks, device: torch.device, grad_norm: Tensor | None = None) -> dict[str, float]:
        """The metrics of the step over all ranks, by name. A collective: every rank must call it.

        grad_norm: [] norm over all ranks, before clipping; None: the metric is 0.
        """
        parts = [
            _over_packs(self.of_packs, len(_OF_PACK)),
            torch.tensor([self.known[name] for name in _KNOWN], dtype=torch.float64),
            _over_packs(self.differences, NUM_DIFFERENCE_SUMS),
            ess_terms(self.log_ratios),
            ess_terms(self.sequence_log_ratios),
            torch.zeros(1) if grad_norm is None else grad_norm.double().reshape(1),
            _over_packs(self.by_length, NUM_SUMS),
        ]
        flat = ranks.gather(torch.cat([moved(part, device) for part in parts]))
        cuts = list(accumulate(map(len, parts), initial=0))
        per_rank = [[row[start:end] for start, end in pairwise(cuts)] for row in flat]
        sums, known, differences, token_terms, sequence_terms, norms, by_length = zip(*per_rank, strict=True)
        sums = tuple([*rank_sums, *other] for rank_sums, other in zip(sums, known, strict=True))
        total = dict(zip((*_OF_PACK, *_KNOWN), map(sum, zip(*sums, strict=True)), strict=True))
        num_trained, num_sampled = max(1.0, total["num_trained"]), max(1.0, total["num_sampled"])
        num_sequences = max(1.0, sum(EssTerms(*terms).num for terms in sequence_terms))
        metrics = {
            "train/loss": total["loss"],
            # The norms are equal. If one is not finite, every rank must find this, so that all ranks refuse the step.
            "train/grad_norm": max((norm for (norm,) in norms), key=lambda norm: (not math.isfinite(norm), norm)),
            "importance/kl": total["kl"] / num_trained,
            "importance/ess": total_ess([EssTerms(*terms) for terms in token_terms]),
            "importance/ess_sequence": total_ess([EssTerms(*terms) for terms in sequence_terms]),
            "importance/sequence_tokens": num_sampled / num_sequences,
            "importance/ratio_mean": total["ratio"] / num_trained,
            "importance/ratio_clipped_fraction": total["clipped"] / num_trained,
            **difference_metrics([sum(column) for column in zip(*differences, strict=True)]),
            **length_metrics([sum(column) for column in zip(*by_length, strict=True)]),
            "policy/entropy": total["entropy"] / num_sampled,
            "train/tokens": total["num_tokens"],
            "train/trained_tokens": total["num_trained"],
            "train/num_packs": total["num_packs"],
            "train/rollouts": total["num_rollouts"],
            "train/pack_fill": total["packed_tokens"] / max(1.0, total["budget_tokens"]),
        }
        for name, metric in _OPTIONAL.items():
            if total[f"with_{name}"]:
                metrics[metric] = total[name] / num_trained
        return metrics


def is_finite(metrics: Mapping[str, float]) -> bool:
    """Whether a step with these metrics may be taken."""
    return all(math.isfinite(metrics[name]) for name in _FINITE)


def check_finite(step: int, metrics: Mapping[str, float]) -> None:
    """Raises TrainingDiverged, which names all figures, if one figure is not finite."""
    if is_finite(metrics):
        return
    figures = ", ".join(f"{name}={metrics[name]:g}" for name in _FINITE)
    raise TrainingDiverged(
        f"step {step}: {figures}; all values must be finite. The last good weights are version {step - 1}. Lower "
        "learner.lr or learner.clip_norm, or lengthen learner.warmup_steps; if only kl or ess is not finite, an "
        "engine recorded bad log-probabilities; a loss.function of your own may have returned nan or inf"
    )


@contextmanager
def restored_generator_after_refusal() -> Iterator[None]:
    """If the step inside raises TrainingDiverged, set torch's generator back to its state before the step."""
    state = torch.get_rng_state()
    try:
        yield
    except TrainingDiverged:
        torch.set_rng_state(state)
        raise


def _over_packs(sums: Sequence[Tensor], num: int) -> Tensor:
    """[num] their sum, in the order of packs, so that a replay computes the same bits; zeros without a pack."""
    return reduce(torch.add, sums) if sums else torch.zeros(num, dtype=torch.float64)
