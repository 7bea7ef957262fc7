"""Sections of the optimizer steps; the text below a field is its help."""

from typing import Annotated, Literal

from pydantic import Field

from pipelinerl_core.config.kinds import LEARNER_TRAITS, LearnerKind, LearnerTraits
from pipelinerl_core.config.section import Auto, Section


class TrainerConfig(Section):
    """The optimizer steps."""

    steps: int = Field(100, ge=1)
    """Optimizer steps in the run. Raise for a longer training."""
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
    skip_zero_advantage: bool = True
    """Compute rollouts whose advantage is 0 without a backward pass: equal metrics, and equal gradients but for
    rounding, because such rollouts have none. learner.kind=torch, without a KL term or value head. Unset to compute
    every rollout in the same way."""
    rescore_share: float = Field(0.005, ge=0, le=1)
    """Share of a step's rollouts that the trainer scores again under the versions that sampled their tokens, to check
    that the engines sample from these versions (docs/off-policy.md); 0: none. Raise for more certain figures and an
    earlier alarm."""
    rescore_bytes: int = Field(0, ge=0)
    """Bytes of earlier versions that the trainer keeps in host memory for that; 0: two versions. Raise if many tokens
    are of versions that are gone (rescored/gone_tokens)."""
    rescore_alarm: Literal["tell", "expel"] = "tell"
    """An actor whose engine does not sample from the version that it names. tell: log, event and report name the
    actor; expel: the hub takes the actor's groups for other actors, and the actor ends for good. Set expel for runs
    that nobody watches."""
    threads: int = Field(0, ge=0)
    """Packs computed at once on a CPU, one core each. 0: placement.threads, plus the engines' threads if the schedule
    stops the engines during a step. Set to limit the trainer's cores."""


class LearnerConfig(Section):
    """Optimizer and its schedule."""

    kind: LearnerKind = "torch"
    """torch: plain PyTorch, all weights on every rank; deepspeed: DeepSpeed ZeRO, for models too large for that."""
    zero_stage: Literal[0, 1, 2, 3] = 0
    """deepspeed: state sharded over the ranks. 1: optimizer moments and float32 master weights; 2: gradients too; 3:
    weights too. Raise if a rank runs out of memory."""
    offload: Literal["none", "optimizer", "parameters"] = "none"
    """deepspeed: state kept in host memory. optimizer: moments and master weights (zero_stage of at least 1);
    parameters: weights too (zero_stage 3). Set if GPU memory does not suffice; steps become slower."""
    activation_checkpointing: Literal["auto", True, False] = "auto"
    """Recompute the activations of each layer in the backward pass instead of storing them: less memory, slower
    steps. auto: on a GPU if a pack may have 8192 tokens or more. Set false if they fit into the GPU's memory, true if
    shorter packs do not."""
    attention: Literal["auto", "padded", "varlen", "flex"] = "auto"
    """Attention over packed sequences. padded: one row per sequence, padded to the longest of the pack; varlen:
    torch's flash attention (GPU, bfloat16); flex: torch's flex attention (GPU); auto: padded on a CPU, computed in
    float32 also if the model has bfloat16 weights; on a GPU varlen for bfloat16 and flex for float32, padded if
    neither works. Change only to compare kernels."""
    lora_rank: int = Field(0, ge=0)
    """Rank of LoRA adapters, which are trained instead of the weights; 0: train all weights. Set (8 to 64) to save
    optimizer memory."""
    lora_alpha: float = Field(0.0, ge=0)
    """LoRA scale: adapters are multiplied by lora_alpha / lora_rank; 0: 2 * lora_rank, a factor of 2."""
    lora_targets: tuple[str, ...] = ()
    """Names of the decoder's linear layers that get LoRA adapters, such as q_proj; empty: all linear layers."""
    lr: Auto | Annotated[float, Field(gt=0)] = "auto"
    """Peak learning rate of AdamW, above 0; auto: 1e-6, or 1e-4 for a model of fewer than 0.1 billion parameters; ten
    times as much with LoRA. Chosen when the configuration is read, and stored with the run. Lower if the loss or the
    KL divergence grows."""
    warmup_steps: int = Field(10, ge=0)
    """Steps over which the learning rate rises linearly to its peak."""
    final_lr_share: float = Field(1.0, ge=0, le=1)
    """Learning rate of the last step as a share of the peak, reached by linear decay; 1: constant learning rate; 0:
    the last step changes nothing, so set at least 0.01 for a decay to about 0."""
    ess_scaling: bool = False
    """Multiply the learning rate of each step by min(1, sqrt(ess_sequence / reference)): smaller steps on data that
    few rollouts dominate (VCPO). Set if a high lag makes the training unstable."""
    ess_reference: float = Field(0.0, ge=0, le=1)
    """ess_scaling: importance/ess_sequence of data on policy; 0: measured in step 1, which is always on policy, and
    scaled to the length of the rollouts of each step. Set to repeat the reference of another run."""
    beta2: float = Field(0.95, gt=0, lt=1)
    """Decay rate of AdamW's second moment. Lower to adapt faster to changing gradients."""
    weight_decay: float = Field(0.0, ge=0)
    """Decoupled weight decay of AdamW, a factor of the learning rate; 0: none."""
    clip_norm: float = Field(0.3, gt=0)
    """Global L2 norm to which larger gradients are scaled down. Lower if single steps disturb the training."""

    @property
    def peak_lr(self) -> float:
        """lr; `build_config` has replaced auto."""
        assert self.lr != "auto"
        return self.lr

    @property
    def lora_scale(self) -> float:
        """s of W + s * B @ A; 0 without adapters."""
        return (self.lora_alpha or 2.0 * self.lora_rank) / self.lora_rank if self.lora_rank else 0.0

    @property
    def traits(self) -> LearnerTraits:
        """Of the kind."""
        return LEARNER_TRAITS[self.kind]
