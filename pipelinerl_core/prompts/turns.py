"""Tokens of a conversation, turn by turn."""

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from itertools import takewhile
from typing import Any

import numpy as np

from pipelinerl_core.config import RunConfig
from pipelinerl_core.errors import EnvironmentFailed, PipelineRLError
from pipelinerl_core.prompts.chat import Messages, SpecialTokens, conversation_text, render, require_chat_template
from pipelinerl_core.prompts.reply import read_reply, split_reasoning
from pipelinerl_core.types import FinishReason, Int32Array, Message, Reply

_QUESTION, _ANSWER = "Question", "Answer"
"""Contents of messages that stand for a conversation. Chat templates trim contents, so they have no space."""
_CALL_ID = "call00000"
"""Some templates require nine letters and digits."""
_RESULT: Message = {"role": "tool", "name": "tool", "tool_call_id": _CALL_ID, "content": _ANSWER}
_PROBED_TURNS = 4
_OPEN_REASONING = re.compile(r"<think>\s*(</think>\s*)?\Z")
_ADVICE = (
    "Use a model with another chat template, or set model.chat_template=false and write the turns' format yourself"
)


class ChatTurns:
    """Implements interfaces.ChatCodec with the chat template of a tokenizer of transformers.

    chat_template: model.chat_template. If false, contents are concatenated as they are, and the text of a special
    token in a content is the token. system: prompts.system; for conversations without a system message at their
    beginning.

    With a chat template only the template writes special tokens, unless prompts.control_tokens=allow. If the text of
    a message or a tool looks like a special token ("<|im_end|>"), the text is tokenised as ordinary text, so that no
    content can end a turn (see SpecialTokens).

    `following` renders a dummy exchange with and without the new messages; the text that the new messages add is
    the result. The work is linear in the new messages and the tools; the history is not needed. The first call
    checks the method with a dummy conversation: the concatenation must be the template's own rendering,
    apart from reasoning. Templates may remove the reasoning of earlier turns; sampled tokens stay.

    Raises ConfigError if the tokenizer has no chat template or the template does not support `system`.
    """

    def __init__(
        self, tokenizer: Any, *, chat_template: bool, system: str = "default", control_tokens: str = "text"
    ) -> None:
        if chat_template:
            require_chat_template(tokenizer)
        self._tokenizer = tokenizer
        self._chat_template = chat_template
        self._special = SpecialTokens(tokenizer, are_allowed=control_tokens == "allow")
        self._system = self._special.as_text(system)
        self._writes_tools = False
        self._has_system = system not in ("default", "none")
        self._checked: set[tuple[bool, bool, int]] = set()

    def first(self, messages: Messages, tools: Sequence[Mapping[str, Any]] = ()) -> Int32Array:
        """[P] tokens of the first messages, up to where the model's turn begins; at least one.

        tools: JSON-schema functions, bare or in OpenAI's form. Raises EnvironmentFailed if the template refuses the
        messages or ignores the tools.
        """
        with _one_line():
            _require_texts(messages)
            if self._chat_template:
                plain = self._special.as_text([_without_written_calls(message) for message in messages])
                rendered = conversation_text(self._tokenizer, plain, self._plain_tools(tools), self._system)
                ids = self._special.encode(rendered)
                self._has_system |= plain[0].get("role") == "system"
            else:
                ids = self._tokenizer(_contents(messages, tools))["input_ids"]
        if not ids:
            shown = "".join(str(message["content"]) for message in messages)[:40]
            raise EnvironmentFailed(f"the tokenizer of model.path has no token for the first messages, {shown!r}")
        return np.asarray(ids, dtype=np.int32)

    def following(self, messages: Messages, tools: Sequence[Mapping[str, Any]], last_token: int) -> Int32Array:
        """Tokens between a turn of the model, which ended with last_token, and its next turn.

        messages: the new messages only. If last_token is not the template's end token (the turn was cut off, or
        ended with another end token), the template's end token comes first. Raises EnvironmentFailed as `first`
        does, and if the chat template cannot extend a conversation without changing earlier turns.
        """
        with _one_line():
            _require_texts(messages)
            if self._chat_template:
                plain_tools = self._plain_tools(tools)
                self._check(plain_tools, _num_results(messages))
                ids = self._special.encode(self._bridge(self._special.as_text(messages), plain_tools))
                if last_token == ids[0]:
                    del ids[0]
            else:
                ids = self._tokenizer(_contents(messages, tools), add_special_tokens=False)["input_ids"]
        return np.asarray(ids, dtype=np.int32)

    def reply(self, token_ids: Int32Array, finish_reason: FinishReason) -> Reply:
        """The text of a turn, with reasoning and tool calls separated; tokens_left is 0."""
        with _one_line():
            text = str(self._tokenizer.decode(np.asarray(token_ids).tolist(), skip_special_tokens=True))
            return read_reply(text, finish_reason, len(token_ids), begins_in_reasoning=self._begins_in_reasoning)

    def _plain_tools(self, tools: Sequence[Mapping[str, Any]]) -> list[Any]:
        """The tools in OpenAI's form. Raises EnvironmentFailed if the chat template ignores tools."""
        openai = [tool if "function" in tool else {"type": "function", "function": tool} for tool in tools]
        plain: list[Any] = self._special.as_text(openai)
        if plain and not self._writes_tools:
            question = [_user(_QUESTION)]
            if render(self._tokenizer, question, plain) == render(self._tokenizer, question):
                raise EnvironmentFailed(
                    "the chat template of model.path ignores tools; describe the tools in a message"
                )
            self._writes_tools = True
        return plain

    @cached_property
    def turn_end(self) -> str:
        """The special token with which the chat template ends a turn of the model."""
        rendered = render(self._tokenizer, [_user(_QUESTION), _answer_before([])], is_prompt=False)
        _, answer, after = rendered.rpartition(_ANSWER)
        end = next((token for token in self._special.encode(after) if token in self._special.ids), None)
        if not answer or end is None:
            raise EnvironmentFailed(
                "the chat template of model.path ends a turn of the model without a special token, so turns cannot "
                f"be appended. {_ADVICE}"
            )
        return str(self._tokenizer.convert_ids_to_tokens(end))

    @cached_property
    def _begins_in_reasoning(self) -> bool:
        """Whether the chat template begins the model's turn with <think>."""
        if not self._chat_template:
            return False
        start = render(self._tokenizer, [_user(_QUESTION)]).rpartition(_QUESTION)[2]
        return start.rfind("<think>") > start.rfind("</think>")

    def _bridge(self, messages: Messages, tools: Messages) -> str:
        """Text from the end token of a turn of the model to the beginning of its next turn.

        Templates may write the dummy answer differently once messages follow, but its end token remains.
        """
        exchange = [_user(_QUESTION), _answer_before(messages)]
        num_ends = render(self._tokenizer, exchange, tools, is_prompt=False).count(self.turn_end)
        parts = render(self._tokenizer, [*exchange, *messages], tools).split(self.turn_end, num_ends)
        if num_ends == 0 or len(parts) <= num_ends:
            raise _cannot_be_extended()
        return self.turn_end + parts[-1]

    def _check(self, tools: Messages, num_calls: int) -> None:
        """Raise EnvironmentFailed if bridges are not the tokens that the chat template writes between turns.

        Done once for each kind of conversation: with or without a system message, with or without tools, with
        0, 1 or several results of tools.
        """
        kind = (self._has_system, bool(tools), min(num_calls, 2))
        if kind in self._checked:
            return
        start: list[Message] = [{"role": "system", "content": _QUESTION}] if self._has_system else []
        messages: list[Message] = [*start, _user(_QUESTION)]
        pieces = [render(self._tokenizer, messages, tools)]
        contents: list[str | None] = []
        for turn in range(_PROBED_TURNS):
            new = [_RESULT] * kind[2] if kind[2] and turn % 2 == 0 else [_user(_QUESTION)]
            answer = _answer_before(new)
            contents.append(None if "tool_calls" in answer else _ANSWER)
            pieces.append(self._bridge(new, tools))
            messages += [answer, *new]
        if not self._is_concatenation(render(self._tokenizer, messages, tools), pieces, contents):
            raise _cannot_be_extended()
        self._checked.add(kind)

    def _is_concatenation(self, whole: str, pieces: list[str], contents: list[str | None]) -> bool:
        """Whether a rendered conversation consists of the pieces, with a turn of the model between two pieces.

        contents: of the turns; None: not compared, because each template writes calls of tools in its own form.
        Each piece but the first begins with a special token, where tokenizers divide a text: equal texts have equal
        tokens.
        """
        position = 0
        for piece, content in zip(pieces, contents, strict=False):
            variants = (piece, _OPEN_REASONING.sub("", piece))
            written = next((text for text in variants if whole.startswith(text, position)), None)
            if written is None:
                return False
            turn, end, _ = whole[position + len(written) :].partition(self.turn_end)
            position += len(written) + len(turn)
            if not end or content not in (None, split_reasoning(turn)[1].strip()):
                return False
        return whole[position:] == pieces[-1]


@contextmanager
def _one_line() -> Iterator[None]:
    """Raises the errors of templates and tokenizers as EnvironmentFailed."""
    try:
        yield
    except PipelineRLError:
        raise
    except Exception as error:  # noqa: BLE001  (templates raise any error, tokenizers bare Exception)
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:200]
        raise EnvironmentFailed(
            f"the chat template or the tokenizer of model.path refuses the messages ({reason}). "
            "Send messages with roles and contents that the template supports"
        ) from None


def chat_turns(config: RunConfig, tokenizer: Any) -> ChatTurns:
    """The turns of a run's model."""
    prompts = config.prompts
    return ChatTurns(
        tokenizer, chat_template=config.model.chat_template, system=prompts.system,
        control_tokens=prompts.control_tokens,
    )  # fmt: skip


def _cannot_be_extended() -> EnvironmentFailed:
    return EnvironmentFailed(
        "the chat template of model.path writes turns differently when more turns follow, so turns cannot be "
        f"appended. {_ADVICE}"
    )


def _contents(messages: Messages, tools: Sequence[Mapping[str, Any]]) -> str:
    """The input of a model without a chat template."""
    if tools:
        raise EnvironmentFailed("model.chat_template=false ignores tools; describe the tools in a message")
    return "".join(message["content"] for message in messages)


def _without_written_calls(message: Message) -> Message:
    """A turn of the model with its calls once: `Reply.message` has them in the text too, and templates write both."""
    if message.get("role") != "assistant" or not message.get("tool_calls"):
        return message
    written = read_reply(str(message.get("content") or ""), FinishReason.STOP, 0)
    if not written.tool_calls:
        return message
    reasoning = {"reasoning_content": written.reasoning} if written.reasoning else {}
    return {**message, "content": written.content, **reasoning}


def _require_texts(messages: Messages) -> None:
    """Raise EnvironmentFailed for messages that templates silently write as "None", as Python or not at all."""
    for message in messages:
        content = message.get("content")
        is_call = content is None and message.get("tool_calls")
        if not isinstance(message.get("role"), str) or not (is_call or isinstance(content, str)):
            raise EnvironmentFailed(
                f"a message needs a role and a text as content; found {str(message)[:80]}. Convert contents to text"
            )


def _user(content: str) -> Message:
    return {"role": "user", "content": content}


def _num_results(messages: Messages) -> int:
    """Messages at the beginning that are results of tools."""
    return sum(1 for _ in takewhile(lambda message: message.get("role") == "tool", messages))


def _answer_before(messages: Messages) -> Message:
    """A turn of the model that these messages may follow: a text, or a call for each result of a tool."""
    num_results = _num_results(messages)
    if num_results == 0:
        return {"role": "assistant", "content": _ANSWER}
    calls = [
        {
            "id": message.get("tool_call_id", _CALL_ID),
            "type": "function",
            "function": {"name": message.get("name", "tool"), "arguments": {}},
        }
        for message in messages[:num_results]
    ]
    return {"role": "assistant", "content": "", "tool_calls": calls}
