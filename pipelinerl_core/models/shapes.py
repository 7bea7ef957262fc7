"""Shapes of models: from a config.json, and of well-known models that may not be on this host."""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any


def _qwen2(hidden: int, inner: int, layers: int, heads: int, groups: int, vocabulary: int, *, tied: bool) -> Any:
    return _shape("qwen2", "Qwen2ForCausalLM", hidden, inner, layers, heads, groups, vocabulary, tied=tied)


def _qwen3(hidden: int, inner: int, layers: int, heads: int, *, tied: bool) -> Any:
    made = _shape("qwen3", "Qwen3ForCausalLM", hidden, inner, layers, heads, 8, 151936, tied=tied)
    return made | {"head_dim": 128}


def _shape(
    kind: str,
    name: str,
    hidden: int,
    inner: int,
    layers: int,
    heads: int,
    groups: int,
    vocabulary: int,
    *,
    tied: bool,
) -> dict[str, Any]:
    return {
        "model_type": kind, "architectures": [name], "hidden_size": hidden, "intermediate_size": inner,
        "num_hidden_layers": layers, "num_attention_heads": heads, "num_key_value_heads": groups,
        "vocab_size": vocabulary, "tie_word_embeddings": tied, "max_position_embeddings": 32768,
        "rms_norm_eps": 1e-6, "hidden_act": "silu", "rope_theta": 1e6,
    }  # fmt: skip


_SHAPES = {
    "Qwen/Qwen2.5-0.5B": _qwen2(896, 4864, 24, 14, 2, 151936, tied=True),
    "Qwen/Qwen2.5-1.5B": _qwen2(1536, 8960, 28, 12, 2, 151936, tied=True),
    "Qwen/Qwen2.5-3B": _qwen2(2048, 11008, 36, 16, 2, 151936, tied=True),
    "Qwen/Qwen2.5-7B": _qwen2(3584, 18944, 28, 28, 4, 152064, tied=False),
    "Qwen/Qwen2.5-14B": _qwen2(5120, 13824, 48, 40, 8, 152064, tied=False),
    "Qwen/Qwen2.5-32B": _qwen2(5120, 27648, 64, 40, 8, 152064, tied=False),
    "Qwen/Qwen3-0.6B": _qwen3(1024, 3072, 28, 16, tied=True),
    "Qwen/Qwen3-1.7B": _qwen3(2048, 6144, 28, 16, tied=True),
    "Qwen/Qwen3-4B": _qwen3(2560, 9728, 36, 32, tied=True),
    "Qwen/Qwen3-8B": _qwen3(4096, 12288, 36, 32, tied=False),
    "builtin:sums": _qwen2(128, 384, 4, 4, 2, 17, tied=True),
    "builtin:smollm2": _shape("llama", "LlamaForCausalLM", 576, 1536, 30, 9, 3, 49152, tied=True),
}
KNOWN_MODELS: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    _SHAPES | {f"{name}-Instruct": shape for name, shape in _SHAPES.items() if "Qwen2.5" in name}
)
"""Name on the hub, or of a built-in model, -> entries of the config.json of the model."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """The sizes of a decoder that decide its memory."""

    hidden: int
    inner: int
    """Width of the feed-forward layer."""
    layers: int
    heads: int
    groups: int
    """Key-value heads."""
    head_dim: int
    vocabulary: int
    is_tied: bool
    """Embedding and head are one matrix."""
    experts: float = 1
    """Feed-forward layers of which each token uses some, shared ones included, in units of `inner`."""
    dense_layers: int = 0
    """Layers that have one feed-forward layer of width dense_inner instead of experts."""
    dense_inner: int = 0
    matrices: int = 3
    """Of a feed-forward layer: 3 with a gate, else 2."""

    @property
    def num_parameters(self) -> int:
        """All weights: embedding, head, and per layer attention, feed-forward and norms; biases are left out."""
        attention = 2 * self.hidden * self.head_dim * (self.heads + self.groups)
        widths = (self.layers - self.dense_layers) * self.inner * self.experts + self.dense_layers * self.dense_inner
        layers = self.layers * (attention + 2 * self.hidden) + int(self.matrices * self.hidden * widths)
        return self.vocabulary * self.hidden * (1 if self.is_tied else 2) + layers + self.hidden

    @property
    def cache_bytes(self) -> int:
        """Keys and values of one token in bfloat16."""
        return 2 * 2 * self.layers * self.groups * self.head_dim


OTHER_NAMES: Mapping[str, tuple[str, ...]] = MappingProxyType({
    "hidden_size": ("n_embd", "d_model"),
    "num_hidden_layers": ("n_layer", "n_layers", "num_layers"),
    "num_attention_heads": ("n_head", "n_heads", "num_heads"),
    "intermediate_size": ("n_inner", "ffn_dim", "ffn_hidden_size"),
    "max_position_embeddings": ("n_positions",),
})  # fmt: skip
"""Entry of config.json -> what GPT-2, OPT, Bloom, Falcon and others call it."""


def name_in(config: Mapping[str, Any], entry: str) -> str:
    """The name under which a config.json has an entry; `entry` itself if it has none."""
    return next((name for name in (entry, *OTHER_NAMES[entry]) if config.get(name) is not None), entry)


def context_of(config: Mapping[str, Any]) -> int | None:
    """Tokens of the model's context, prompt included, in a config.json; None: the entry is missing."""
    text = config.get("text_config", config)
    context = text.get(name_in(text, "max_position_embeddings"))
    return context if isinstance(context, int) else None


_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
_WITHOUT_GATE = ("bloom", "falcon", "gpt2", "gpt_neo", "gpt_neox", "gptj", "nemotron", "opt", "phi", "starcoder2")


def shape_of(config: Mapping[str, Any]) -> ModelShape | None:
    """The shape in a config.json; None if entries of a decoder are missing."""
    text = config.get("text_config", config)  # models with images keep the decoder's entries there
    try:
        heads, hidden = (int(text[name_in(text, name)]) for name in ("num_attention_heads", "hidden_size"))
        experts = int(next((text[name] for name in _EXPERTS if text.get(name)), 1))
        inner = int(text["moe_intermediate_size"] if experts > 1 and text.get("moe_intermediate_size") else
                    text.get(name_in(text, "intermediate_size")) or 4 * hidden)  # fmt: skip
        shared, dense = 0.0, 0
        if experts > 1:
            shared = text.get("n_shared_experts") or text.get("moe_num_shared_experts") or 0
            shared += (text.get("shared_expert_intermediate_size") or 0) / inner
            dense = text.get("first_k_dense_replace") or text.get("moe_layer_start_index") or 0
            dense += len(text.get("mlp_only_layers") or ())
        return ModelShape(
            hidden=hidden,
            inner=inner,
            layers=int(text[name_in(text, "num_hidden_layers")]),
            heads=heads,
            groups=int(text.get("num_key_value_heads") or heads),
            head_dim=int(text.get("head_dim") or hidden // heads),
            vocabulary=int(text["vocab_size"]),
            is_tied=bool(text.get("tie_word_embeddings", config.get("tie_word_embeddings", False))),
            experts=experts + shared,
            dense_layers=dense,
            dense_inner=int(text.get(name_in(text, "intermediate_size")) or 4 * hidden),
            matrices=2 if text.get("model_type") in _WITHOUT_GATE else 3,
        )
    except (KeyError, TypeError, ValueError):
        return None
