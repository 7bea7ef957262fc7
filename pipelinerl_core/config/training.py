"""The section of the optimizer steps; the text below a field is its help."""

from typing import Literal

from pydantic import Field

from pipelinerl_core.config.section import Section


class TrainerConfig(Section):
    """The optimizer steps."""

    steps: int = Field(100, ge=1)
    """Optimizer steps in the run. Raise for a longer training."""
    equal_reward_steps: int = Field(0, ge=0)
    """Drain the run after this many first steps (at least 3) if all of their rewards are equal and only rewards train
    the model. 0: never. `pipelinerl try` sets it. Raise if the first correct completion may come late."""
    ranks: int = Field(1, ge=1)
    """Trainer processes (data parallel): each computes a share of the packs; on GPUs each has its own GPU. Raise to
    the number of GPUs for training."""
    collective_seconds: float = Field(600.0, gt=0)
    """Seconds that a rank waits for the other ranks, in a step or while a model loads; then the supervisor restarts
    the trainer. Raise if one step or one model load takes longer."""
    groups_per_step: int = Field(16, ge=1)
    """Groups in one optimizer step (batch size in prompts). Raise for less noisy gradients, lower for more frequent
    steps."""
    pack_tokens: int = Field(2048, ge=16)
    """Token budget of one forward pass. Lower if the trainer runs out of memory, raise for throughput on GPUs."""
    packing: Literal["sorted", "filled"] = "sorted"
    """How sequences share forward passes. sorted: by similar length, least padding; filled: remaining space in a pass
    takes shorter sequences, fewer passes but more padding. Set filled if attention has no padding (varlen, flex)."""
    share_prompts: bool = True
    """Compute the prompt of a group once for all its rollouts in a forward and backward pass: equal losses and
    gradients but for rounding, in less time (the longer the prompts, the more). Unset to compute every rollout by
    itself."""
    skip_zero_advantage: bool = True
    """Compute rollouts whose advantage is 0 without a backward pass: equal gradients but for rounding, because such
    rollouts have none. learner.kind=torch, without a KL term or value head. Unset to compute every rollout in the
    same way."""
    score_zero_advantage: bool = False
    """With skip_zero_advantage: compute these rollouts forward, so that the metrics of a step (ratios, entropy,
    divergence) are means over all its rollouts; else they are not computed, and the metrics are means over the
    rollouts that have an advantage. Set to compare such metrics with other runs."""
    rescore_share: float = Field(0.005, ge=0, le=1)
    """Share of a step's rollouts that the trainer scores again under the versions that sampled their tokens, to check
    that the engines sample from these versions (docs/off-policy.md); 0: none. Raise for more certain figures and an
    earlier alarm."""
    rescore_bytes: int = Field(0, ge=0)
    """Bytes of earlier versions that the trainer keeps in memory for that (weights.transport=shm: in shared memory);
    0: two versions. Raise if many tokens are of versions that are gone (rescored/gone_tokens)."""
    rescore_alarm: Literal["tell", "expel"] = "tell"
    """An actor whose engine does not sample from the version that it names. tell: log, event and report name the
    actor; expel: the hub takes the actor's groups for other actors, and the actor ends for good. Set expel for runs
    that nobody watches."""
    threads: int = Field(0, ge=0)
    """Packs computed at once on a CPU, one core each. 0: placement.threads, plus the engines' threads if the schedule
    stops the engines during a step. Set to limit the trainer's cores."""
