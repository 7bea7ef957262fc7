"""Encodes a prompt as the input tokens of the model."""

from itertools import takewhile
from typing import Any

import numpy as np
from jinja2 import TemplateError

from pipelinerl_core.errors import ConfigError
from pipelinerl_core.types import Int32Array, Prompt

_MARK = "<the-system-message>"
"""Stands for the system message while the system turn of a chat template is located."""


def encode_prompt(prompt: Prompt, tokenizer: Any, chat_template: bool, system: str = "default") -> Int32Array:
    """[P] token ids of a prompt, at least one.

    Without a chat template the text is tokenised with the tokenizer's default special tokens. With a chat template
    the text is a message of the user, followed by the beginning of the assistant's answer. `tokenizer` is a tokenizer
    of transformers; `system` is prompts.system. Raises ConfigError if the tokenizer lacks a chat template or cannot
    encode the prompt, or if the chat template does not support `system`.
    """
    if chat_template and not tokenizer.chat_template:
        raise ConfigError(
            "model.chat_template=true, but the tokenizer of model.path has no chat template. "
            "Set model.chat_template=false or use a chat model"
        )
    try:
        ids = _token_ids(prompt.text, tokenizer, chat_template, system)
    except ConfigError:
        raise
    except Exception as error:  # noqa: BLE001  (tokenizers raises bare Exception)
        raise ConfigError(
            f"{prompt.source}: the tokenizer of model.path cannot encode prompt {prompt.text[:60]!r} ({error}). "
            "Choose prompts that the tokenizer can encode, or another model"
        ) from None
    if not ids:
        raise ConfigError(f"{prompt.source}: prompt {prompt.prompt_id} has no tokens. Remove empty prompts")
    return np.asarray(ids, dtype=np.int32)


def _token_ids(text: str, tokenizer: Any, chat_template: bool, system: str) -> list[int]:
    if not chat_template:
        ids: list[int] = tokenizer(text)["input_ids"]
        return ids
    if system == "default":
        rendered = _render(tokenizer, text)
    elif system == "none":
        rendered = _without_system(tokenizer, text)
    else:
        rendered = _with_system(tokenizer, text, system)
    ids = tokenizer(rendered, add_special_tokens=False)["input_ids"]  # the template writes the special tokens
    return ids


def _render(tokenizer: Any, user: str | None, system: str | None = None) -> str:
    """The messages as text; with a message of the user, the beginning of the assistant's answer follows."""
    given = {"system": system, "user": user}
    messages = [{"role": role, "content": content} for role, content in given.items() if content is not None]
    return str(tokenizer.apply_chat_template(messages, add_generation_prompt=user is not None, tokenize=False))


def _with_system(tokenizer: Any, user: str, system: str) -> str:
    advice = "Set prompts.system=none, or write the text into prompts.template"
    try:
        rendered = _render(tokenizer, user, system)
    except TemplateError as error:
        raise ConfigError(
            f"prompts.system={system[:40]!r}: the chat template of model.path refuses a system message ({error}). "
            + advice
        ) from None
    if system.strip() not in rendered:
        raise ConfigError(
            f"prompts.system={system[:40]!r}: the chat template of model.path leaves a system message out. {advice}"
        )
    return rendered


def _without_system(tokenizer: Any, user: str) -> str:
    """The messages without the system turn that a chat template may insert by itself.

    A template that is given a system message shows where its system turn ends and the user's turn begins. Only a
    leading turn with the same beginning and end is removed; the text after the turn stays as rendered. Raises
    ConfigError if the turns cannot be told apart.
    """
    plain = _render(tokenizer, user)
    try:
        marked = _render(tokenizer, user, _MARK)
    except TemplateError:  # a template that refuses system messages inserts none
        return plain
    try:
        turn = _render(tokenizer, None, _MARK)
    except (TemplateError, TypeError):  # the template requires a message of the user
        turn = ""
    before, mark, after = turn.partition(_MARK)
    if mark and marked.startswith(turn):
        rest = marked.removeprefix(turn)
        bos = str(tokenizer.bos_token or "")
        start = bos if turn.startswith(bos) and not rest.startswith(bos) else ""  # ChatML: every turn begins with it
        if plain == start + rest or (plain.startswith(before) and plain.endswith(after + rest)):
            return start + rest
    elif _is_part(plain, marked):  # a template that writes a given system message into the user's turn
        return plain
    raise ConfigError(
        "prompts.system=none: the chat template of model.path may insert a system message that cannot be told from "
        "the prompt. Set prompts.system=default, or a text"
    )


def _is_part(plain: str, marked: str) -> bool:
    """Whether `marked` without one contiguous part, which contains the mark, is `plain`."""
    before, mark, after = marked.partition(_MARK)
    num_shared = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(plain, before, strict=False)))
    return bool(mark) and after.endswith(plain[num_shared:])
