"""From a prompt to the tokens that the model is shown."""

from typing import Any

import numpy as np

from pipelinerl_core.errors import ConfigError
from pipelinerl_core.types import Int32Array, Prompt


def encode_prompt(prompt: Prompt, tokenizer: Any, chat_template: bool) -> Int32Array:
    """[P] token ids of a prompt, at least one.

    Without a chat template the text is tokenised as it stands, with the special tokens that the tokenizer adds of
    itself; with one it becomes the message of a user, followed by the opening of the assistant's answer.
    `tokenizer` is a tokenizer of transformers. Raises ConfigError where the two do not fit together.
    """
    if chat_template and not tokenizer.chat_template:
        raise ConfigError(
            "model.chat_template=true, but the tokenizer of model.path has no chat template. "
            "Set model.chat_template=false or take a chat model"
        )
    try:
        ids = _token_ids(prompt.text, tokenizer, chat_template)
    except Exception as error:  # noqa: BLE001  (tokenizers raises bare Exception, for example for a letter it lacks)
        raise ConfigError(
            f"{prompt.source}: the tokenizer of model.path cannot encode prompt {prompt.text[:60]!r} ({error}). "
            "Choose prompts and a model that belong together"
        ) from None
    if not ids:
        raise ConfigError(f"{prompt.source}: prompt {prompt.prompt_id} has no tokens. Leave out empty prompts")
    return np.asarray(ids, dtype=np.int32)


def _token_ids(text: str, tokenizer: Any, chat_template: bool) -> list[int]:
    if not chat_template:
        ids: list[int] = tokenizer(text)["input_ids"]
        return ids
    messages = [{"role": "user", "content": text}]
    ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=True, return_dict=False)
    return ids
