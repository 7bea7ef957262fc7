"""Encodes a prompt as the input tokens of the model; renders conversations with the chat template."""

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import date
from functools import lru_cache
from itertools import takewhile
from typing import Any

import numpy as np
from jinja2 import TemplateError

from pipelinerl_core.errors import ConfigError
from pipelinerl_core.types import Int32Array, Message, Prompt

Messages = Sequence[Message]

_MARK = "<the-system-message>"
"""Stands for the system message while the system turn of a chat template is located."""
_PROBE = "probe0question"
"""Stands for the text of a message."""
_TODAY = date(2024, 7, 26)
"""The date of chat templates that write one: the same prompt has the same tokens on each day and host. Llama's
templates take this date where there is no clock."""
_DIVIDER = "\ufdd0\ufdd1"
"""Divides text that must not become a special token. Unicode reserves both code points for uses like this one."""


class SpecialTokens:
    """Keeps text of messages that looks like a special token ("<|im_end|>") apart from the tokens of a chat template.

    Added tokens that are not special, such as <think> and <tool_call> of Qwen3, remain tokens in every text. Some
    tokenizers (Metaspace with prepend_scheme first or always) put a space where such a text was divided.
    """

    def __init__(self, tokenizer: Any, *, are_allowed: bool = False) -> None:
        """are_allowed: text of a special token in a message is the token (prompts.control_tokens=allow)."""
        self._tokenizer = tokenizer
        special = {number: str(token) for number, token in tokenizer.added_tokens_decoder.items() if token.special}
        self.ids = frozenset(special)
        texts = [_DIVIDER, *([] if are_allowed else filter(None, special.values()))]
        beginnings = "".join(sorted({re.escape(text[0]) for text in texts}))  # most characters need no comparison
        self._first_letter = re.compile(f"(?=[{beginnings}])(?={'|'.join(map(re.escape, texts))}).", re.DOTALL)

    def as_text(self, value: Any) -> Any:
        """A copy of a JSON value, in which a divider is within each text of a special token, and of the divider."""
        if isinstance(value, str):
            return self._first_letter.sub(lambda letter: letter[0] + _DIVIDER, value)
        if isinstance(value, Mapping):
            return {self.as_text(key): self.as_text(inner) for key, inner in value.items()}
        return [self.as_text(inner) for inner in value] if isinstance(value, list | tuple) else value

    def encode(self, rendered: str) -> list[int]:
        """Tokens of a rendering, in which the template has written the special tokens."""
        parts = (self._tokenizer(part, add_special_tokens=False)["input_ids"] for part in rendered.split(_DIVIDER))
        return [token for ids in parts for token in ids]


special_tokens = lru_cache(maxsize=8)(SpecialTokens)
"""SpecialTokens of a tokenizer, made once."""


def encode_prompt(
    prompt: Prompt, tokenizer: Any, chat_template: bool, system: str = "default", control_tokens: str = "text"
) -> Int32Array:
    """[P] token ids of a prompt, at least one.

    Without a chat template the text is tokenised with the tokenizer's default special tokens. With a chat template
    the text is a message of the user, or the prompt has messages, followed by the beginning of the assistant's
    answer. `tokenizer` is a tokenizer
    of transformers; `system` and `control_tokens` are the keys of prompts. Raises ConfigError if the tokenizer lacks
    a chat template or cannot encode the prompt, or if the chat template fails or does not support `system`.
    """
    with _one_line(prompt):
        ids = _token_ids(prompt, tokenizer, chat_template, system, control_tokens)
    if not ids:
        raise ConfigError(f"{prompt.source}: prompt {prompt.prompt_id} has no tokens. Remove empty prompts")
    return np.asarray(ids, dtype=np.int32)


def prompt_as_text(prompt: Prompt, tokenizer: Any, chat_template: bool, system: str = "default") -> str:
    """The text of a prompt as the model sees it, with what the chat template adds. Raises as `encode_prompt`."""
    if not chat_template:
        return prompt.text
    with _one_line(prompt):
        require_chat_template(tokenizer)
        return conversation_text(tokenizer, _messages(prompt), system=system)


def _messages(prompt: Prompt) -> Messages:
    return prompt.messages or [{"role": "user", "content": prompt.text}]


@contextmanager
def _one_line(prompt: Prompt) -> Iterator[None]:
    """Raises the errors of templates and tokenizers as ConfigError."""
    try:
        yield
    except ConfigError:
        raise
    except TemplateError as error:
        reason = " ".join(str(error).split())[:200]
        raise ConfigError(
            f"model.chat_template=true, but the chat template of model.path fails ({reason}). Correct the template, "
            "or set model.chat_template=false"
        ) from None
    except Exception as error:  # noqa: BLE001  (templates raise any error, tokenizers bare Exception)
        raise ConfigError(
            f"{prompt.source}: the tokenizer of model.path cannot encode prompt {prompt.text[:60]!r} ({error}). "
            "Choose prompts that the tokenizer can encode, or another model"
        ) from None


def require_chat_template(tokenizer: Any) -> None:
    """Raises ConfigError if the tokenizer has no chat template that writes the text of a message."""
    if not tokenizer.chat_template:
        raise ConfigError(
            "model.chat_template=true, but the tokenizer of model.path has no chat template. "
            "Set model.chat_template=false or use a chat model"
        )
    _wants_parts(tokenizer, repr(tokenizer.chat_template), "user")


@lru_cache(maxsize=32)
def _wants_parts(tokenizer: Any, template: str, role: str) -> bool:
    """Whether a chat template writes the content of a role's messages only if the content is a list of parts.

    template: identifies the chat template, because a tokenizer may get another one. False if the template fails in
    both forms: what it needs besides, for example a system message, is unknown here. Raises ConfigError if the
    template leaves out the content in both forms.
    """
    has_failed = False
    for is_in_parts in (False, True):
        messages = [{"role": role, "content": _in_parts(_PROBE) if is_in_parts else _PROBE}]
        if role != "user":
            question = {
                "role": "user",
                "content": _in_parts("0") if _wants_parts(tokenizer, template, "user") else "0",
            }
            messages = [*messages, question] if role == "system" else [question, *messages]
        try:
            rendered = _apply(tokenizer, messages)
        except Exception:  # noqa: BLE001  (a template may raise any error)
            has_failed = True
            continue
        if _PROBE in rendered.casefold() and f"'{_PROBE}'" not in rendered:  # not the parts as Python writes them
            return is_in_parts
    if has_failed or role != "user":
        return False
    raise ConfigError(
        "model.chat_template=true, but the chat template of model.path leaves out the text of a message. "
        "Correct the template, or set model.chat_template=false"
    )


def _in_parts(text: str) -> list[dict[str, str]]:
    return [{"type": "text", "text": text}]


def conversation_text(tokenizer: Any, messages: Messages, tools: Messages = (), system: str = "default") -> str:
    """The messages as the chat template writes them, then the beginning of the assistant's next turn.

    `system` is prompts.system; without effect if the first message is a system message. With tools, `none` keeps the
    system turn, which may describe the tools, without the text that the template inserts by itself. Raises
    ConfigError if the chat template does not support `system`, and the errors of the template.
    """
    if system == "default" or messages[0].get("role") == "system":
        return render(tokenizer, messages, tools)
    if system == "none":
        return _without_system(tokenizer, messages, tools)
    return _with_system(tokenizer, messages, tools, system)


def render(tokenizer: Any, messages: Messages, tools: Messages = (), *, is_prompt: bool = True) -> str:
    """The messages as text; if is_prompt, the beginning of the assistant's next turn follows."""
    template = repr(tokenizer.chat_template)
    if _wants_parts(tokenizer, template, "user"):
        messages = [
            {**message, "content": _in_parts(message["content"])}
            if isinstance(message.get("content"), str) and _wants_parts(tokenizer, template, str(message["role"]))
            else message
            for message in messages
        ]
    return _apply(tokenizer, messages, tools, is_prompt=is_prompt)


def _apply(tokenizer: Any, messages: Messages, tools: Messages = (), *, is_prompt: bool = True) -> str:
    try:
        rendered = tokenizer.apply_chat_template(
            list(messages), tools=list(tools) or None, add_generation_prompt=is_prompt, tokenize=False,
            strftime_now=_TODAY.strftime,
        )  # fmt: skip
    except (TemplateError, ConfigError):
        raise
    except Exception as error:  # a template may raise any error
        raise TemplateError(f"{type(error).__name__}: {error}") from error
    return str(rendered)


def _token_ids(prompt: Prompt, tokenizer: Any, chat_template: bool, system: str, control_tokens: str) -> list[int]:
    if not chat_template:
        ids: list[int] = tokenizer(prompt.text)["input_ids"]
        return ids
    require_chat_template(tokenizer)
    special = special_tokens(tokenizer, are_allowed=control_tokens == "allow")
    messages = special.as_text(_messages(prompt))
    return special.encode(conversation_text(tokenizer, messages, system=special.as_text(system)))


def _with_system(tokenizer: Any, messages: Messages, tools: Messages, system: str) -> str:
    advice = "Set prompts.system=none, or write the text into prompts.template"
    try:
        rendered = render(tokenizer, [{"role": "system", "content": system}, *messages], tools)
    except TemplateError as error:
        render(tokenizer, messages, tools)  # raises if the messages are the cause
        raise ConfigError(
            f"prompts.system={system[:40]!r}: the chat template of model.path refuses a system message ({error}). "
            + advice
        ) from None
    if system.strip() not in rendered:
        raise ConfigError(
            f"prompts.system={system[:40]!r}: the chat template of model.path leaves a system message out. {advice}"
        )
    return rendered


def _without_system(tokenizer: Any, messages: Messages, tools: Messages) -> str:
    """The messages without the system turn that a chat template may insert by itself.

    A template that is given a system message shows where its system turn ends and the next turn begins. Only a
    leading turn with the same beginning and end is removed; the text after the turn stays as rendered. With tools
    only the text inside the system turn is removed. Raises ConfigError if the turns cannot be told apart.
    """
    plain = render(tokenizer, messages, tools)
    marked_message = {"role": "system", "content": _MARK}
    try:
        marked = render(tokenizer, [marked_message, *messages], tools)
    except TemplateError:  # a template that refuses system messages inserts none
        return plain
    try:
        turn = "" if tools else render(tokenizer, [marked_message], is_prompt=False)
    except (TemplateError, TypeError):  # the template requires a message of the user
        turn = ""
    before, mark, after = turn.partition(_MARK)
    if mark and marked.startswith(turn):
        rest = marked.removeprefix(turn)
        bos = str(tokenizer.bos_token or "")
        start = bos if turn.startswith(bos) and not rest.startswith(bos) else ""  # ChatML: every turn begins with it
        if plain == start + rest or (plain.startswith(before) and plain.endswith(after + rest)):
            return start + rest
    elif _is_part(plain, marked):  # a template that writes a given system message into another turn
        return plain
    elif tools:
        before, mark, after = marked.partition(_MARK)
        if mark and plain.startswith(before) and plain.endswith(after):
            return before + after
    raise ConfigError(
        "prompts.system=none: the chat template of model.path may insert a system message that cannot be told from "
        "the prompt. Set prompts.system=default, or a text"
    )


def _is_part(plain: str, marked: str) -> bool:
    """Whether `marked` without one contiguous part, which contains the mark, is `plain`."""
    before, mark, after = marked.partition(_MARK)
    num_shared = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(plain, before, strict=False)))
    return bool(mark) and after.endswith(plain[num_shared:])
