"""The objectives: one section per `loss.kind`, with the options that this loss reads and its paper's defaults.

An option of another loss is no key of the section, and so refused. docs/algorithms.md has the formulas.
"""

from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag

from pipelinerl_core.config.section import Section

Normalization = Literal["token", "sequence", "prompt", "constant"]
AdvantageKind = Literal["leave_one_out", "group_mean", "standardized", "turn", "value"]


class _Loss(Section):
    """What all losses have."""

    normalization: Normalization = "token"
    """What a token's weight is divided by: tokens of the step, of its rollout, of its group, or a constant. Default
    by loss.kind."""
    advantage: AdvantageKind = "leave_one_out"
    """Baseline of a reward: the mean of its siblings' rewards; the mean of its group; the same, divided by the
    group's standard deviation; turn: at each turn the mean of the siblings that got that far; value: what a value
    head expects at each token. Default by loss.kind."""
    value_coefficient: float = Field(0.1, gt=0)
    """loss.advantage=value: weight of the value head's squared error."""
    entropy_bonus: float = Field(0.0, ge=0)
    """Weight of the mean entropy of the trainer's distribution, which is added to the objective."""
    sequence_ratio_max: float = Field(0.0, ge=0)
    """Leave out rollouts whose ratio, the geometric mean over their tokens, is above this or below its inverse; 0:
    none."""
    kl_coefficient: float = Field(0.0, ge=0)
    """Weight of the mean divergence from a reference model, which is taken from the objective; 0: there is none."""
    ref_model: str = ""
    """Directory of the reference model, with the vocabulary of the one that learns; empty: what that began with."""


class ReinforceLoss(_Loss):
    """REINFORCE with a truncated importance ratio."""

    kind: Literal["reinforce"] = "reinforce"
    """Objective: reinforce, cispo, ppo, grpo, dr_grpo, dapo, gspo, icepop or decoupled_ppo."""
    ratio_max: float = Field(5.0, gt=0)
    """Ceiling of the importance ratio."""


class CispoLoss(_Loss):
    """REINFORCE with a ratio that is clipped on both sides and carries no gradient (MiniMax-M1)."""

    kind: Literal["cispo"] = "cispo"
    advantage: AdvantageKind = "standardized"
    clip_low: float = Field(1.0, gt=0, le=1)
    """The ratio is at least 1 - clip_low; 1 sets no floor. Default by loss.kind."""
    clip_high: float = Field(4.0, gt=0)
    """The ratio is at most 1 + clip_high. Default by loss.kind."""


class _ClippedLoss(_Loss):
    """PPO's clipped surrogate; the recipes differ in advantage, normalisation and bounds."""

    clip_low: float = Field(0.2, gt=0, le=1)
    clip_high: float = Field(0.2, gt=0)


class PpoLoss(_ClippedLoss):
    """PPO clip with a leave-one-out baseline."""

    kind: Literal["ppo"] = "ppo"


class GrpoLoss(_ClippedLoss):
    """GRPO: standardised advantages, every rollout weighs the same."""

    kind: Literal["grpo"] = "grpo"
    normalization: Normalization = "sequence"
    advantage: AdvantageKind = "standardized"


class DrGrpoLoss(_ClippedLoss):
    """Dr. GRPO: neither the standard deviation nor the length divides."""

    kind: Literal["dr_grpo"] = "dr_grpo"
    normalization: Normalization = "constant"
    advantage: AdvantageKind = "group_mean"


class DapoLoss(_ClippedLoss):
    """DAPO: more room above than below, every token weighs the same."""

    kind: Literal["dapo"] = "dapo"
    advantage: AdvantageKind = "standardized"
    clip_high: float = Field(0.28, gt=0)


class GspoLoss(_ClippedLoss):
    """GSPO: the ratio of a whole rollout, the geometric mean over its tokens."""

    kind: Literal["gspo"] = "gspo"
    normalization: Normalization = "sequence"
    advantage: AdvantageKind = "standardized"
    clip_low: float = Field(3e-4, gt=0, le=1)
    clip_high: float = Field(4e-4, gt=0)


class IcepopLoss(_Loss):
    """REINFORCE without the tokens whose ratio is outside of bounds (IcePop)."""

    kind: Literal["icepop"] = "icepop"
    ratio_min: float = Field(0.5, gt=0, le=1)
    """Tokens of a smaller ratio are left out."""
    ratio_max: float = Field(5.0, ge=1)


class DecoupledPpoLoss(_ClippedLoss):
    """PPO clip around a proximal policy between the weights that sampled and those being trained (AReaL, A-3PO)."""

    kind: Literal["decoupled_ppo"] = "decoupled_ppo"
    ratio_max: float = Field(5.0, ge=1)
    """Ceiling of the ratio of proximal to rollout probability, which weighs a token."""


def _kind(value: Any) -> Any:
    return value.get("kind", "reinforce") if isinstance(value, dict) else getattr(value, "kind", None)


LossConfig = Annotated[
    Annotated[ReinforceLoss, Tag("reinforce")]
    | Annotated[CispoLoss, Tag("cispo")]
    | Annotated[PpoLoss, Tag("ppo")]
    | Annotated[GrpoLoss, Tag("grpo")]
    | Annotated[DrGrpoLoss, Tag("dr_grpo")]
    | Annotated[DapoLoss, Tag("dapo")]
    | Annotated[GspoLoss, Tag("gspo")]
    | Annotated[IcepopLoss, Tag("icepop")]
    | Annotated[DecoupledPpoLoss, Tag("decoupled_ppo")],
    Discriminator(
        _kind,
        custom_error_type="loss_kind",
        custom_error_message="no such loss.kind: there are reinforce, cispo, ppo, grpo, dr_grpo, dapo, gspo, icepop, "
        "decoupled_ppo",
    ),
]
