"""Architectures of transformers for tests: each with the default sizes of its configuration class."""

from typing import Any

from transformers import AutoConfig

_RUNS = """llama qwen2 qwen3 qwen2_moe qwen3_moe mistral mixtral gemma gemma3_text phi3 olmo olmo2 olmoe glm glm4
smollm3 starcoder2 deepseek_v3 granite gpt2 gpt_neox opt ernie4_5 exaone4 seed_oss"""
FAMILIES: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(_RUNS.split(), ()),
    "gemma2": ("sampled",),
    "phi": ("trained",),
    "gpt_neo": ("sampled",),
    "gptj": ("trained", "sampled"),
    "cohere2": ("trained", "sampled"),
    "bloom": ("trained", "sampled"),
    "falcon": ("trained", "sampled"),
    "gpt_oss": ("trained", "sampled"),
    "nemotron": ("trained",),
    "stablelm": ("trained",),
    "qwen3_next": ("trained", "sampled"),
    "mamba": ("loaded",),
    "gemma3": ("loaded",),
    "llama4": ("loaded",),
}
"""model_type -> what cannot be done with the model: "loaded", "trained" by the learner, "sampled" by the embedded
engine."""


def entries_of(family: str) -> dict[str, Any]:
    """The config.json of a family."""
    entries: dict[str, Any] = AutoConfig.for_model(family).to_dict()
    return entries
