"""Builds the model of `pipelinerl train --tiny`: any architecture of transformers, small, with random weights."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast
from transformers.utils import logging as transformers_logging

from pipelinerl_core.models.recipes import TinyModel

END_TOKEN = "<|im_end|>"
_PAD_TOKEN = "<|endoftext|>"
CHAT_TEMPLATE = """\
{%- if tools %}{{- '<|im_start|>system\\n' }}{{- tools | tojson }}{{- '<|im_end|>\\n' }}{%- endif %}
{%- for message in messages %}
{{- '<|im_start|>' + message.role + '\\n' + (message.content or '') }}
{%- if message.tool_calls %}{{- message.tool_calls | tojson }}{%- endif %}
{{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"""


def build_tiny_model(recipe: TinyModel, directory: Path) -> None:
    """Write model and tokenizer into `directory`; the same recipe results in the same weights."""
    tokenizer = AutoTokenizer.from_pretrained(recipe.tokenizer) if recipe.tokenizer else byte_tokenizer()
    tokens = {
        "vocab_size": len(tokenizer),
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
    model = random_model({**recipe.settings, **tokens}, recipe.seed)
    transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)


def random_model(entries: Mapping[str, Any], seed: int = 0) -> Any:
    """A model with the entries of a config.json and random weights in float32."""
    config = AutoConfig.for_model(**entries)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return AutoModelForCausalLM.from_config(config)  # type: ignore[no-untyped-call]


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """One token per byte, and the tokens of a chat template like those of Qwen and SmolLM2."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: number for number, letter in enumerate(letters)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=tokenizer,
        eos_token=END_TOKEN,
        pad_token=_PAD_TOKEN,
        additional_special_tokens=["<|im_start|>"],
        clean_up_tokenization_spaces=False,
    )
    fast.chat_template = CHAT_TEMPLATE
    return fast
