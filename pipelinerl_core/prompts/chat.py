"""Encodes a prompt as the input tokens of the model."""

from typing import Any

import numpy as np

from pipelinerl_core.errors import ConfigError
from pipelinerl_core.types import Int32Array, Prompt


def encode_prompt(prompt: Prompt, tokenizer: Any, chat_template: bool) -> Int32Array:
    """[P] token ids of a prompt, at least one.

    Without a chat template the text is tokenised with the tokenizer's default special tokens. With a chat template
    the text is a message of the user, followed by the beginning of the assistant's answer. `tokenizer` is a tokenizer
    of transformers. Raises ConfigError if the tokenizer lacks a chat template or cannot encode the prompt.
    """
    if chat_template and not tokenizer.chat_template:
        raise ConfigError(
            "model.chat_template=true, but the tokenizer of model.path has no chat template. "
            "Set model.chat_template=false or use a chat model"
        )
    try:
        ids = _token_ids(prompt.text, tokenizer, chat_template)
    except Exception as error:  # noqa: BLE001  (tokenizers raises bare Exception)
        raise ConfigError(
            f"{prompt.source}: the tokenizer of model.path cannot encode prompt {prompt.text[:60]!r} ({error}). "
            "Choose prompts that the tokenizer can encode, or another model"
        ) from None
    if not ids:
        raise ConfigError(f"{prompt.source}: prompt {prompt.prompt_id} has no tokens. Remove empty prompts")
    return np.asarray(ids, dtype=np.int32)


def _token_ids(text: str, tokenizer: Any, chat_template: bool) -> list[int]:
    if not chat_template:
        ids: list[int] = tokenizer(text)["input_ids"]
        return ids
    messages = [{"role": "user", "content": text}]
    ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=True, return_dict=False)
    return ids
