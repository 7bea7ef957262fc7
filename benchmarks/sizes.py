"""Shapes of the random models of benchmarks."""

from typing import Any

SIZES: dict[str, dict[str, Any]] = {
    "tiny": {
        "vocab_size": 19,
        "hidden_size": 128,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 384,
        "max_position_embeddings": 512,
    },
    "small": {
        "vocab_size": 4096,
        "hidden_size": 256,
        "num_hidden_layers": 6,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "intermediate_size": 768,
        "max_position_embeddings": 1024,
    },
    "135m": {
        "vocab_size": 49_152,
        "hidden_size": 576,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "intermediate_size": 1536,
        "max_position_embeddings": 8192,
    },
    "0.5b": {
        "vocab_size": 151_936,
        "hidden_size": 896,
        "num_hidden_layers": 24,
        "num_attention_heads": 14,
        "num_key_value_heads": 2,
        "intermediate_size": 4864,
        "max_position_embeddings": 4096,
    },
    "1.5b": {
        "vocab_size": 151_936,
        "hidden_size": 1536,
        "num_hidden_layers": 28,
        "num_attention_heads": 12,
        "num_key_value_heads": 2,
        "intermediate_size": 8960,
        "max_position_embeddings": 4096,
    },
    "7b": {
        "vocab_size": 152_064,
        "hidden_size": 3584,
        "num_hidden_layers": 28,
        "num_attention_heads": 28,
        "num_key_value_heads": 4,
        "intermediate_size": 18_944,
        "max_position_embeddings": 4096,
    },
}
"""Shapes of random Qwen2 models with tied embeddings: the quickstart model (0.8 M parameters), a model of some
millions, one of the size of SmolLM2-135M, Qwen2.5-0.5B, 1.5B and 7B."""
