"""Sections of the optimizer steps; the text below a field is its help."""

from typing import Literal

from pydantic import Field

from pipelinerl_core.config.section import Section


class TrainerConfig(Section):
    """The optimizer steps."""

    steps: int = Field(100, ge=1)
    """Optimizer steps of the run."""
    ranks: int = Field(1, ge=1)
    """Trainer processes, each with a share of the packs, and a GPU of its own where there are some."""
    collective_seconds: float = Field(600.0, gt=0)
    """Longest time that ranks wait for one another, in a step or for a model to be loaded; beyond it the trainer is
    started again."""
    groups_per_step: int = Field(16, ge=1)
    """Groups of one optimizer step."""
    pack_tokens: int = Field(2048, ge=16)
    """Token budget of one forward pass."""
    packing: Literal["sorted", "filled"] = "sorted"
    """sorted: sequences of similar length share a pass, least padding in attention; filled: passes are then filled up
    with shorter ones, fewer passes for more padding. Runs from before this setting were sorted."""
    threads: int = Field(0, ge=0)
    """Packs computed at once on a CPU, one per core; 0: placement.threads, and those of engines that stand still."""


class LearnerConfig(Section):
    """Optimizer and its schedule."""

    kind: Literal["torch", "deepspeed"] = "torch"
    """torch: plain PyTorch, all weights on every rank; deepspeed: ZeRO."""
    zero_stage: Literal[0, 1, 2, 3] = 0
    """deepspeed: what is shared out among ranks: 1 moments and masters, 2 gradients too, 3 weights too."""
    offload: Literal["none", "optimizer", "parameters"] = "none"
    """deepspeed: what is kept in the memory of the host: moments and masters (from stage 1 on), weights too (3)."""
    activation_checkpointing: bool = False
    """Compute the activations of each layer a second time in the backward pass instead of keeping them."""
    attention: Literal["auto", "padded", "varlen", "flex"] = "auto"
    """Attention over packed sequences. padded: a row for each, as long as the longest of the pack; varlen: torch's
    flash attention (GPU, bfloat16); flex: torch's flex attention (GPU). auto: padded on a CPU; on a GPU varlen in
    bfloat16, flex in float32, padded where these do not work. Runs from before this setting were padded."""
    lora_rank: int = Field(0, ge=0)
    """Train low-rank adapters of this rank beside frozen weights (LoRA); 0: all weights."""
    lora_alpha: float = Field(0.0, ge=0)
    """Adapters count lora_alpha / lora_rank times; 0: 2 * lora_rank, so twice."""
    lora_targets: tuple[str, ...] = ()
    """Linear layers of the decoder blocks that have adapters, by name, as q_proj; none named: all of them."""
    lr: float = Field(1e-4, gt=0)
    """Peak learning rate (AdamW)."""
    warmup_steps: int = Field(10, ge=0)
    """Steps of linear warm-up."""
    final_lr_share: float = Field(1.0, ge=0, le=1)
    """Learning rate of the last step as a share of the peak; the decay is linear, 1 keeps it constant."""
    beta2: float = Field(0.95, gt=0, lt=1)
    """AdamW's second-moment decay."""
    weight_decay: float = Field(0.0, ge=0)
    """Decoupled weight decay."""
    clip_norm: float = Field(0.3, gt=0)
    """Largest global gradient norm."""

    @property
    def lora_scale(self) -> float:
        """s of W + s * B @ A; 0 without adapters."""
        return (self.lora_alpha or 2.0 * self.lora_rank) / self.lora_rank if self.lora_rank else 0.0
