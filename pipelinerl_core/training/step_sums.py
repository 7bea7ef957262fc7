"""What the packs of an optimizer step add up to, on one rank and over all of them.

Shapes: N = sampled tokens of a pack.
"""

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor

from pipelinerl_core.algo.importance import EssTerms, ess_terms, sequence_log_ratios, total_ess
from pipelinerl_core.algo.losses import LossSums
from pipelinerl_core.algo.packed import PackedBatch
from pipelinerl_core.errors import TrainingDiverged
from pipelinerl_core.training.ranks import Ranks
from pipelinerl_core.types import StepStats

_SUMS = (
    "loss", "num_sampled", "num_trained", "ratio", "clipped", "kl", "kl_ref", "entropy", "num_tokens",
    "budget_tokens", "num_packs",
)  # fmt: skip


@dataclass(slots=True)
class StepSums:
    """Sums over packs; packs that hold no row, which only keep ranks in step, count nothing."""

    pack_tokens: int
    """Token budget of a pack."""
    loss: float = 0.0
    num_sampled: float = 0
    num_trained: float = 0
    ratio: float = 0.0
    clipped: float = 0
    kl: float = 0.0
    kl_ref: float = 0.0
    entropy: float = 0.0
    num_tokens: float = 0
    budget_tokens: float = 0
    num_packs: float = 0
    log_ratios: list[Tensor] = field(default_factory=list)
    sequence_log_ratios: list[Tensor] = field(default_factory=list)

    def add(self, batch: PackedBatch, sums: LossSums, trainer_logprobs_N: Tensor, entropy_N: Tensor) -> None:
        """Count one pack."""
        if batch.is_empty:
            return
        self.loss += sums.loss.item()
        self.num_sampled += len(entropy_N)
        self.num_trained += int(sums.num_tokens.item())
        self.ratio += sums.ratio.item()
        self.clipped += int(sums.clipped.item())
        self.kl += sums.kl.item()
        if sums.kl_ref is not None:
            self.kl_ref += sums.kl_ref.item()
        self.entropy += entropy_N.detach().sum().item()
        self.num_tokens += batch.num_tokens
        self.budget_tokens += max(batch.num_tokens, self.pack_tokens)
        self.num_packs += 1
        # Neither truncated nor masked: ess tells what the lag did to the data, before the rules against it.
        log_ratios_N = trainer_logprobs_N.detach() - batch.rollout_logprobs_N
        self.log_ratios.append(log_ratios_N)
        self.sequence_log_ratios.append(
            sequence_log_ratios(log_ratios_N, batch.sequence_N, batch.layout.num_sequences)
        )

    def over_ranks(self, ranks: Ranks, device: torch.device) -> "StepTotals":
        """The same over all ranks; every rank gets it, and must ask for it."""
        terms = (*ess_terms(self.log_ratios), *ess_terms(self.sequence_log_ratios))
        found = ranks.gather([*(float(getattr(self, name)) for name in _SUMS), *terms], device)
        sums = dict(zip(_SUMS, (sum(column) for column in zip(*found, strict=True)), strict=False))
        ess = total_ess([EssTerms(*row[len(_SUMS) : len(_SUMS) + 3]) for row in found])
        ess_sequence = total_ess([EssTerms(*row[len(_SUMS) + 3 :]) for row in found])
        return StepTotals(sums=sums, ess=ess, ess_sequence=ess_sequence)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTotals:
    """An optimizer step, all ranks together."""

    sums: dict[str, float]
    ess: float
    ess_sequence: float

    def check_finite(self, step: int, grad_norm: float) -> None:
        """Raises TrainingDiverged, naming everything, when one of the figures is not finite."""
        numbers = {
            "loss": self.sums["loss"],
            "grad_norm": grad_norm,
            "kl": self.sums["kl"],
            "ess": self.ess,
            "ess_sequence": self.ess_sequence,
        }
        if all(math.isfinite(number) for number in numbers.values()):
            return
        found = ", ".join(f"{name}={number:g}" for name, number in numbers.items())
        raise TrainingDiverged(
            f"step {step}: {found}; all of them must be finite. The last good weights are version {step - 1}. Lower "
            "learner.lr or learner.clip_norm, or lengthen learner.warmup_steps; if only kl or ess is not finite, an "
            "engine recorded bad log-probabilities"
        )

    def stats(
        self, step: int, *, grad_norm: float, learning_rate: float, has_reference: bool, compute_seconds: float
    ) -> StepStats:
        """As the learner reports it."""
        sums = self.sums
        num_trained, num_sampled = max(1.0, sums["num_trained"]), max(1.0, sums["num_sampled"])
        return StepStats(
            step=step,
            loss=sums["loss"],
            grad_norm=grad_norm,
            learning_rate=learning_rate,
            ess=self.ess,
            ess_sequence=self.ess_sequence,
            ratio_mean=sums["ratio"] / num_trained,
            ratio_clipped_fraction=sums["clipped"] / num_trained,
            kl=sums["kl"] / num_trained,
            kl_ref=sums["kl_ref"] / num_trained if has_reference else None,
            entropy=sums["entropy"] / num_sampled,
            num_tokens=int(sums["num_tokens"]),
            num_trained_tokens=int(sums["num_trained"]),
            num_packs=int(sums["num_packs"]),
            pack_fill=sums["num_tokens"] / max(1.0, sums["budget_tokens"]),
            compute_seconds=compute_seconds,
        )
