"""The objectives: one section per `loss.kind`, with the options that this loss reads and its paper's defaults.

A section accepts the options of its own loss only. docs/algorithms.md has the formulas.
"""

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from pipelinerl_core.config.section import Section, default_kind

Normalization = Literal["token", "sequence", "prompt", "constant"]
AdvantageKind = Literal[
    "leave_one_out", "group_mean", "standardized", "turn", "value", "max_likelihood", "decoupled", "custom"
]


class _Loss(Section):
    """Options that all losses share."""

    normalization: Normalization = "token"
    """Divisor of a token's weight. token: tokens of the step; sequence: rollouts * tokens of the rollout; prompt:
    groups * tokens of the group; constant: rollouts * rollouts.max_tokens. The default depends on loss.kind."""
    advantage: AdvantageKind = "leave_one_out"
    """Advantage of a rollout: its reward minus a baseline. leave_one_out: mean reward of the other rollouts of the
    group; group_mean: mean of the group; standardized: group_mean, divided by the group's standard deviation;
    max_likelihood: group_mean, divided by the group's mean (MaxRL); turn: per turn, mean of the other rollouts that
    reached the turn; value: per token, the estimate of a value head; decoupled: each component of reward.weights is
    standardized in its group before the sum, which is standardized over the step (GDPO); custom:
    loss.advantage_function. The default depends on loss.kind."""
    advantage_function: str = ""
    """loss.advantage=custom: FILE.py:FUNCTION or package.module:FUNCTION, a function of the rollouts of a group that
    returns an advantage, or one per turn, for each rollout (docs/algorithms.md). The run stores a copy of
    the file."""
    advantage_options: dict[str, Any] = Field({})
    """Keyword arguments of loss.advantage_function. Example: loss.advantage_options.floor=0.1."""
    value_coefficient: float = Field(0.1, gt=0)
    """loss.advantage=value: weight of the value head's squared error in the loss."""
    entropy_bonus: float = Field(0.0, ge=0)
    """Weight of the mean token entropy, which is added to the objective; 0: none. Raise if the entropy collapses."""
    sequence_ratio_max: float = Field(0.0, ge=0)
    """Leave out rollouts whose importance ratio (geometric mean over the tokens) is above this value or below its
    inverse; 0: keep all rollouts. Set (slightly above 1) if the engine's and the trainer's probabilities differ."""
    negative_kl_max: float = Field(0.0, ge=0)
    """Leave out tokens with a negative advantage in rollouts whose log-probability has fallen by more than this value
    per token since they were sampled (nats; DeepSeek-V3.2's off-policy sequence mask); 0: keep them. Set (about 0.1)
    if a high lag makes the training unstable."""
    overlong_filtering: bool = False
    """Train no token of a truncated completion (finish reason length), whose reward says little about its tokens
    (DAPO). The reward still counts in the baseline of the group. Set if many completions are truncated."""
    kl_coefficient: float = Field(0.0, ge=0)
    """Weight of the mean KL divergence from a reference model, which is subtracted from the objective; 0: no
    reference model. Raise if the policy drifts too far from the starting model."""
    kl_weighted: bool = False
    """Multiply the KL term of each token by its importance ratio, which makes the gradient of the term unbiased on
    stale rollouts (DeepSeek-V3.2). Set with a KL term and a high lag."""
    ref_model: str = ""
    """The reference model, as model.path takes it, with the vocabulary of the trained model; empty: the starting
    weights of the run."""
    teacher: str = ""
    """On-policy distillation: a teacher model, as model.path takes it, with the vocabulary of the trained model;
    empty: none. A token's advantage gets teacher_coefficient * (teacher log-probability - trainer log-probability).
    """
    teacher_coefficient: float = Field(1.0, gt=0)
    """loss.teacher: weight of the teacher in the advantage of a token."""
    reward_coefficient: float = Field(1.0, ge=0)
    """loss.teacher: weight of the reward's advantage beside the teacher; 0: the teacher alone."""

    @property
    def own_functions(self) -> dict[str, str]:
        """Key -> location of each function of the user."""
        named = {"loss.function": getattr(self, "function", ""), "loss.advantage_function": self.advantage_function}
        return {key: location for key, location in named.items() if location}

    @property
    def has_own_advantages(self) -> bool:
        """loss.advantage_function computes the advantages."""
        return self.advantage == "custom"

    @property
    def divides_by_mean(self) -> bool:
        """Advantages are relative to the mean reward of the group, which must not be negative."""
        return self.advantage == "max_likelihood"

    @property
    def decouples_components(self) -> bool:
        """Components of the reward are standardized one by one."""
        return self.advantage == "decoupled"

    @property
    def has_value_head(self) -> bool:
        """A value head estimates the advantage of each token."""
        return self.advantage == "value"

    @property
    def credits_turns(self) -> bool:
        """The turns of a rollout have advantages of their own."""
        return self.advantage == "turn"


class ReinforceLoss(_Loss):
    """REINFORCE with a truncated importance ratio."""

    kind: Literal["reinforce"] = "reinforce"
    """Objective: reinforce, cispo, ppo, grpo, dr_grpo, dapo, gspo, icepop, decoupled_ppo, dppo, sapo,
    sequence_product, or custom."""
    ratio_max: float = Field(5.0, gt=0)
    """Upper limit of a token's importance ratio (larger ratios are truncated; kind=icepop: leaves the token out).
    Lower to reduce variance, raise to reduce bias."""


class CispoLoss(_Loss):
    """REINFORCE with a ratio that is clipped on both sides and carries no gradient (MiniMax-M1)."""

    kind: Literal["cispo"] = "cispo"
    advantage: AdvantageKind = "standardized"
    clip_low: float = Field(1.0, gt=0, le=1)
    """Lower clip bound of the importance ratio is 1 - clip_low; 1: no lower bound. The default depends on
    loss.kind."""
    clip_high: float = Field(4.0, gt=0)
    """Upper clip bound of the importance ratio is 1 + clip_high. The default depends on loss.kind."""


class ClippedLoss(_Loss):
    """PPO's clipped surrogate; the recipes differ in advantage, normalisation and bounds."""

    clip_low: float = Field(0.2, gt=0, le=1)
    clip_high: float = Field(0.2, gt=0)
    dual_clip: float = Field(3.0, ge=0)
    """Upper bound of the importance ratio with a negative advantage (dual clip); 0: no bound. Lower if single stale
    tokens dominate the gradient."""


class PpoLoss(ClippedLoss):
    """PPO clip with a leave-one-out baseline."""

    kind: Literal["ppo"] = "ppo"


class GrpoLoss(ClippedLoss):
    """GRPO: standardized advantages, every rollout has the same weight."""

    kind: Literal["grpo"] = "grpo"
    normalization: Normalization = "sequence"
    advantage: AdvantageKind = "standardized"


class DrGrpoLoss(ClippedLoss):
    """Dr. GRPO: no division by the standard deviation or by the length."""

    kind: Literal["dr_grpo"] = "dr_grpo"
    normalization: Normalization = "constant"
    advantage: AdvantageKind = "group_mean"


class DapoLoss(ClippedLoss):
    """DAPO: a higher upper than lower clip bound, every token has the same weight."""

    kind: Literal["dapo"] = "dapo"
    advantage: AdvantageKind = "standardized"
    clip_high: float = Field(0.28, gt=0)


class GspoLoss(ClippedLoss):
    """GSPO: one importance ratio per rollout, the geometric mean over the tokens."""

    kind: Literal["gspo"] = "gspo"
    normalization: Normalization = "sequence"
    advantage: AdvantageKind = "standardized"
    # Not the 3e-4 and 4e-4 of the paper, which the noise of bfloat16 between engine and trainer fills.
    clip_low: float = Field(0.02, gt=0, le=1)
    clip_high: float = Field(0.02, gt=0)


class IcepopLoss(_Loss):
    """REINFORCE that leaves out tokens whose importance ratio is out of bounds (IcePop)."""

    kind: Literal["icepop"] = "icepop"
    ratio_min: float = Field(0.5, gt=0, le=1)
    """Lower limit of a token's importance ratio: tokens with a smaller ratio are left out."""
    ratio_max: float = Field(5.0, ge=1)


class DecoupledPpoLoss(ClippedLoss):
    """PPO clip around a proximal policy, interpolated between the sampling and the current policy (AReaL, A-3PO)."""

    kind: Literal["decoupled_ppo"] = "decoupled_ppo"
    ratio_max: float = Field(5.0, ge=1)
    """Upper limit of the ratio of proximal to sampling probability, the weight of a token."""


class DppoLoss(_Loss):
    """REINFORCE with a trust region around the sampling policy, measured by total variation (DPPO)."""

    kind: Literal["dppo"] = "dppo"
    advantage: AdvantageKind = "standardized"
    divergence_max: float = Field(0.2, gt=0, lt=1)
    """Largest change of a token's probability since the token was sampled, beyond which the loss does not push it
    further. Lower for smaller steps of the policy."""
    ratio_max: float = Field(20.0, ge=1)


class SapoLoss(_Loss):
    """SAPO: a smooth gate around the sampling policy in place of a clip range (Qwen)."""

    kind: Literal["sapo"] = "sapo"
    normalization: Normalization = "sequence"
    advantage: AdvantageKind = "standardized"
    tau_positive: float = Field(1.0, gt=0)
    """Steepness of the gate for positive advantages: raise to lower the gradient of off-policy tokens more."""
    tau_negative: float = Field(1.05, gt=0)
    """The same for negative advantages, which destabilise more: at least tau_positive in the paper."""


class SequenceProductLoss(_Loss):
    """REINFORCE with the product of the ratios of a whole rollout as its weight (sequence-level TIS and MIS)."""

    kind: Literal["sequence_product"] = "sequence_product"
    ratio_max: float = Field(2.0, ge=1)
    masks: bool = False
    """Leave out rollouts whose product of ratios is above ratio_max (MIS); false: truncate the product (TIS)."""


class CustomLoss(_Loss):
    """A loss of your own: a function in a file or a module."""

    kind: Literal["custom"] = "custom"
    function: str
    """FILE.py:FUNCTION or package.module:FUNCTION, a function of the trained tokens that returns one term per token
    (docs/algorithms.md). The run stores a copy of the file."""
    options: dict[str, Any] = Field({})
    """Keyword arguments of loss.function. Example: loss.options.beta=0.3."""
    skips_zero_advantage: bool = False
    """A token of advantage 0 has no gradient: rollouts of equal rewards need no backward pass and may be filtered.
    Checked before the start."""


LossConfig = Annotated[
    ReinforceLoss
    | CispoLoss
    | PpoLoss
    | GrpoLoss
    | DrGrpoLoss
    | DapoLoss
    | GspoLoss
    | IcepopLoss
    | DecoupledPpoLoss
    | DppoLoss
    | SapoLoss
    | SequenceProductLoss
    | CustomLoss,
    Field(discriminator="kind"),
    BeforeValidator(default_kind("reinforce")),
]
