"""Reads reasoning and tool calls from the text of a model's turn. The text is untrusted and never evaluated."""

import json
import math
import re
from itertools import islice

from pipelinerl_core.types import FinishReason, Reply, ToolCall

MAX_LEVELS = 32
"""Nested lists and objects in the arguments of a call."""
MAX_CALLS = 64
"""Beginnings of calls that are read in one turn; a failed attempt takes time linear in the text."""
_CALL_START = re.compile(r"<tool_call>\s*")
_CALL_END = re.compile(r"\s*</tool_call>")
_SURROGATE = re.compile("[\ud800-\udfff]")
_DECODER = json.JSONDecoder()


def read_reply(
    text: str, finish_reason: FinishReason, num_tokens: int, *, begins_in_reasoning: bool = False
) -> Reply:
    """The parts of a turn.

    text: without the end token. begins_in_reasoning: the prompt already ended with <think>. Tool calls are
    `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, or a content that is {"name": ..., "parameters":
    {...}} as a whole. A call that cannot be read, or follows MAX_CALLS others, stays in the content.
    """
    reasoning, content = split_reasoning(text, begins_in_reasoning=begins_in_reasoning)
    calls, content = _split_calls(content)
    return Reply(
        text=text,
        content=content,
        reasoning=reasoning,
        tool_calls=calls,
        finish_reason=finish_reason,
        num_tokens=num_tokens,
    )


def split_reasoning(text: str, *, begins_in_reasoning: bool = False) -> tuple[str, str]:
    """Reasoning and content. Without </think> a begun block has no end: the whole text is reasoning."""
    block, end, content = text.partition("</think>")
    start = block.lstrip()
    if start.startswith("<think>"):
        block = start.removeprefix("<think>")
    elif not begins_in_reasoning and (not end or "<think>" in block):
        return "", text
    return block.strip(), content.lstrip()


def _split_calls(content: str) -> tuple[tuple[ToolCall, ...], str]:
    """The calls, and the content without them."""
    whole = content.strip()
    parsed = _read_call(whole, 0, "parameters")
    if parsed and parsed[1] == len(whole):
        return (parsed[0],), ""
    calls, kept, position = [], [], 0
    for start in islice(_CALL_START.finditer(content), MAX_CALLS):
        if start.start() < position:
            continue  # inside an argument of the call before
        parsed = _read_call(content, start.end(), "arguments")
        end = parsed and _CALL_END.match(content, parsed[1])
        if parsed and end:
            calls.append(parsed[0])
            kept.append(content[position : start.start()])
            position = end.end()
    if not calls:
        return (), content
    return tuple(calls), "".join([*kept, content[position:]]).strip()


def _read_call(text: str, start: int, key: str) -> tuple[ToolCall, int] | None:
    """The call whose JSON object begins at start, with its arguments under key, and the end of the object."""
    try:
        value, end = _DECODER.raw_decode(text, start)
    except (ValueError, RecursionError):  # ValueError: also an integer of thousands of digits
        return None
    if not isinstance(value, dict) or not _is_plain(value, MAX_LEVELS):
        return None
    name, arguments = value.get("name"), value.get(key, {} if key == "arguments" else None)
    if not isinstance(name, str) or not name or not isinstance(arguments, dict):
        return None
    return ToolCall(name, arguments), end


def _is_plain(value: object, levels: int) -> bool:
    """Whether any reader of JSON accepts the value: finite numbers, no half of a surrogate pair, few levels."""
    if isinstance(value, dict | list):
        inner = [*value, *value.values()] if isinstance(value, dict) else value
        return levels >= 0 and all(_is_plain(item, levels - 1) for item in inner)
    if isinstance(value, str):
        return not _SURROGATE.search(value)
    return not isinstance(value, float) or math.isfinite(value)
