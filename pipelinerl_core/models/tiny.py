"""The shape of the model of `pipelinerl train --tiny`: a small model of the same architecture as another model."""

from collections.abc import Mapping
from typing import Any

from pipelinerl_core.models.shapes import name_in, shape_of

BYTES_PER_TOKEN = 4
"""The tokenizer has a token per byte: texts have about this many times the tokens."""
_HEAD_DIM = 32
"""The smallest that vLLM supports on a CPU."""
_NUM_LAYERS = 2
_MAX_GROUPS = 2
_INNER = 128
_SIZES = {
    "moe_intermediate_size": 32,
    "num_experts": 4,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "max_window_layers": _NUM_LAYERS,
    "rotary_dim": 16,
}
"""Entries of config.json, which are set if the model has them."""
_LEFT_OUT = ("quantization_config", "torch_dtype", "dtype", "_name_or_path", "transformers_version")


def shrunk(config: Mapping[str, Any]) -> dict[str, Any]:
    """config.json with small sizes: two layers, heads of 32, at most two key-value heads, which as many query heads
    share as in the original."""
    shape = shape_of(config)
    assert shape is not None
    groups = min(_MAX_GROUPS, shape.groups)
    heads = groups * max(1, shape.heads // shape.groups)
    kept = with_two_layers({name: value for name, value in config.items() if name not in _LEFT_OUT})
    sizes = {name: size for name, size in _SIZES.items() if kept.get(name)}
    positions = name_in(kept, "max_position_embeddings")
    if context := kept.get(positions):
        sizes[positions] = BYTES_PER_TOKEN * context
    head_dim = {"head_dim": _HEAD_DIM} if kept.get("head_dim") and "qk_rope_head_dim" not in kept else {}
    return {
        **kept,
        **sizes,
        **head_dim,
        **({"num_key_value_heads": groups} if "num_key_value_heads" in kept else {}),
        name_in(kept, "intermediate_size"): _INNER,
        name_in(kept, "hidden_size"): heads * _HEAD_DIM,
        name_in(kept, "num_attention_heads"): heads,
    }


def with_two_layers(config: Mapping[str, Any]) -> dict[str, Any]:
    """config.json with two layers, of two kinds if the model has two."""
    layers = name_in(config, "num_hidden_layers")
    count = config[layers]
    first, other = 0, count - 1
    if kinds := config.get("layer_types"):
        other = next((number for number, kind in enumerate(kinds) if kind != kinds[first]), other)
    per_layer = {
        name: [value[first], value[other]]
        for name, value in config.items()
        if isinstance(value, list) and len(value) == count > 1
    }
    return {**config, **per_layer, layers: _NUM_LAYERS}
