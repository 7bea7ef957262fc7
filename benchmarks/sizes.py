"""Shapes of the random models of benchmarks."""

from typing import Any

_NAMES = (
    "vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
    "intermediate_size", "max_position_embeddings",
)  # fmt: skip
_VALUES = {
    "tiny": (19, 128, 4, 4, 2, 384, 512),
    "small": (4096, 256, 6, 8, 4, 768, 1024),
    "135m": (49_152, 576, 30, 9, 3, 1536, 8192),
    "0.5b": (151_936, 896, 24, 14, 2, 4864, 4096),
    "1.5b": (151_936, 1536, 28, 12, 2, 8960, 4096),
    "7b": (152_064, 3584, 28, 28, 4, 18_944, 4096),
}
SIZES: dict[str, dict[str, Any]] = {size: dict(zip(_NAMES, own, strict=True)) for size, own in _VALUES.items()}
"""Shapes of random Qwen2 models with tied embeddings: the quickstart model (0.8 M parameters), a model of some
millions, one of the size of SmolLM2-135M, Qwen2.5-0.5B, 1.5B and 7B."""
