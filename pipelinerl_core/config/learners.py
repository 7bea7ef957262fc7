"""The kinds of learners: the keys of each `learner.kind`, and what other code asks about it.

The text below a field is its help.

To add a learner: a section here and its line in LearnerConfig, and a builder in roles/trainer/learners.py.
"""

from typing import Annotated, ClassVar, Literal

from pydantic import BeforeValidator, Field

from pipelinerl_core.config.section import Auto, Section, default_kind


class LearnerSection(Section):
    """Optimizer and its schedule: the keys of every kind."""

    package: ClassVar[str] = ""
    """Optional package that the learner needs; empty: none."""
    install: ClassVar[str] = ""
    """The error of a host without the package."""
    splits_state: ClassVar[bool] = False
    """Splits weights, gradients and optimizer over the ranks (zero_stage, offload), with one float32 sum of gradients
    and float32 master weights. Needs a process group also with one rank."""
    plans_packs: ClassVar[bool] = False
    """Chooses a backward pass for each pack, and can score rollouts under earlier versions."""

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
    decay_steps: int = Field(0, ge=0)
    """Steps of the decay to final_lr_share, after which the rate stays; 0: trainer.steps. A resume with more
    trainer.steps sets it to the earlier number."""
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


class TorchConfig(LearnerSection):
    """Plain PyTorch: all weights on every rank."""

    plans_packs: ClassVar = True
    zero_stage: ClassVar[Literal[0]] = 0
    offload: ClassVar[Literal["none"]] = "none"

    kind: Literal["torch"] = "torch"
    """torch: plain PyTorch, all weights on every rank; deepspeed: DeepSpeed ZeRO, for models too large for that."""


class DeepSpeedConfig(LearnerSection):
    """DeepSpeed ZeRO: state is split over the ranks."""

    package: ClassVar = "deepspeed"
    install: ClassVar = (
        "learner.kind=deepspeed: DeepSpeed is not installed. Run `make install LEARNER=deepspeed`, or set "
        "learner.kind=torch (all weights on each rank)"
    )
    splits_state: ClassVar = True

    kind: Literal["deepspeed"] = "deepspeed"
    zero_stage: Literal[0, 1, 2, 3] = 0
    """State sharded over the ranks. 1: optimizer moments and float32 master weights; 2: gradients too; 3:
    weights too. Raise if a rank runs out of memory."""
    offload: Literal["none", "optimizer", "parameters"] = "none"
    """State kept in host memory. optimizer: moments and master weights (zero_stage of at least 1);
    parameters: weights too (zero_stage 3). Set if GPU memory does not suffice; steps become slower."""


LearnerConfig = Annotated[
    TorchConfig | DeepSpeedConfig, Field(discriminator="kind"), BeforeValidator(default_kind("torch"))
]
