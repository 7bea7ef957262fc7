"""The kinds of engines: the keys of each `engine.kind`, and what other code asks about it.

The text below a field is its help.

To add an engine: a section here and its line in EngineConfig, a builder in engine/load.py, and a trial in
engine/support.py.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field

from pipelinerl_core.config.section import Section, default_kind


class EngineSection(Section):
    """The engine inside each actor: the keys of every kind."""

    package: ClassVar[str] = ""
    """Optional package that the engine needs; empty: none."""
    install: ClassVar[str] = ""
    """The error of a host without the package."""
    has_workers: ClassVar[bool] = False
    """Computes in processes of its own, over several devices, on a GPU unless told otherwise; they receive broadcasts
    and take merged models from shared memory. A second engine takes minutes to start."""
    has_clock: ClassVar[bool] = False
    """Decode steps can be slowed down: for the pace of the trainer and for emulated accelerators."""
    tiny: ClassVar[Mapping[str, Any]] = MappingProxyType({})
    """Values of keys for `train --tiny`, with which the engine starts soon on a CPU."""

    concurrency: int = Field(64, ge=1)
    """Sequences that an actor generates at once (its slots). Raise for throughput; more sequences raise the lag."""
    kv: Literal["keep", "recompute", "drain"] = "keep"
    """KV cache of running sequences when new weights arrive. keep: keep the cache, shortest pause; recompute: compute
    the cache with the new weights; drain: finish the running sequences first."""


class EmbeddedConfig(EngineSection):
    """This project's engine."""

    has_clock: ClassVar = True
    tensor_parallel: ClassVar[int] = 1
    data_parallel: ClassVar[int] = 1
    memory_share: ClassVar[float] = 0.0
    batched_tokens: ClassVar[int] = 0

    kind: Literal["embedded"] = "embedded"
    """embedded: this project's engine, CPU, any transformers decoder with attention; vllm: vLLM, GPUs or CPU."""
    pace: bool = True
    """Slow the engine down while more than groups_per_step finished groups wait for the trainer, which lowers the lag
    at full slots. Unset to measure the engine's full speed."""
    deterministic: bool = False
    """Fix all tensor shapes, so that a sequence's tokens do not depend on the other sequences in the batch. Set for
    reproducible rollouts (slower; float32 only)."""


class VllmConfig(EngineSection):
    """vLLM, on GPUs or on a CPU."""

    package: ClassVar = "vllm"
    install: ClassVar = (
        "engine.kind=vllm: vLLM is not installed. Run `make install ENGINE=vllm` (CPU) or `pip install -e '.[vllm]'` "
        "(GPU), or set engine.kind=embedded"
    )
    has_workers: ClassVar = True
    tiny: ClassVar = MappingProxyType(
        {"tensor_parallel": 1, "data_parallel": 1, "kv_gigabytes": 0.25, "batched_tokens": 0, "compile": "never"}
    )
    pace: ClassVar[bool] = False
    deterministic: ClassVar[bool] = False

    kind: Literal["vllm"] = "vllm"
    tensor_parallel: int = Field(1, ge=1)
    """Accelerators over which one copy of the model is sharded. Raise if the model does not fit one GPU."""
    data_parallel: int = Field(1, ge=1)
    """Copies of the model in one actor. Raise to use more GPUs per actor."""
    kv_gigabytes: float = Field(0, ge=0)
    """Size of the KV cache in GiB; 0: what memory_share leaves on a GPU, 1 GiB on a CPU. Raise if a CPU engine
    preempts sequences."""
    memory_share: float = Field(0, ge=0, lt=1)
    """Share of a GPU's memory for weights, KV cache and working memory of the engine; 0: 0.9, with
    placement.share_gpu=true 0.4, with turns 0.75. Lower if the engine runs out of memory at its start."""
    batched_tokens: int = Field(0, ge=0)
    """Tokens of one engine step at most, prompts included; 0: vLLM chooses. Lower if long prompts delay running
    sequences or use up the working memory, raise for prompt throughput."""
    prefix_cache: bool = True
    """Keep the KV cache of prompts for the other rollouts of a group and for later turns. Unset only to measure."""
    compile: Literal["auto", "always", "never"] = "auto"
    """Compile the model and capture CUDA graphs, faster decoding for minutes of start time; auto: only on GPUs. Set
    never for short tests."""
    stream_interval: int = Field(16, ge=1)
    """Tokens between two outputs of a sequence, which are lost if the engine core crashes. Lower to lose less, raise
    for less overhead."""


EngineConfig = Annotated[
    EmbeddedConfig | VllmConfig, Field(discriminator="kind"), BeforeValidator(default_kind("embedded"))
]
