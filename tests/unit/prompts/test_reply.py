"""Reasoning and tool calls are read from the text of a turn; whatever cannot be read stays in the content."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipelinerl_core.prompts.reply import MAX_CALLS, MAX_LEVELS, read_reply
from pipelinerl_core.types import FinishReason, ToolCall


def read(text, **options):
    return read_reply(text, FinishReason.STOP, 7, **options)


def hermes(body):
    return f"<tool_call>\n{body}\n</tool_call>"


def test_a_text_is_the_content_unchanged():
    reply = read_reply(" Hello\n", FinishReason.LENGTH, 7)
    assert (reply.text, reply.content, reply.reasoning, reply.tool_calls) == (" Hello\n", " Hello\n", "", ())
    assert (reply.finish_reason, reply.num_tokens, reply.tokens_left) == (FinishReason.LENGTH, 7, 0)


@pytest.mark.parametrize(
    ("text", "begins_in_reasoning", "reasoning", "content"),
    [
        ("<think>\nSo.\n</think>\n\nHello", False, "So.", "Hello"),
        ("\n<think>So.</think>Hello", False, "So.", "Hello"),
        ("So.\n</think>\n\nHello", False, "So.", "Hello"),
        ("So.\n</think>\n\nHello", True, "So.", "Hello"),
        ("<think>\nSo.\n</think>\n\nHello", True, "So.", "Hello"),
        ("<think>\n\n</think>\n\nHello", False, "", "Hello"),
        ("<think>\nSo, 1", False, "So, 1", ""),
        ("So, 1", True, "So, 1", ""),
        ("So, 1", False, "", "So, 1"),
        ("Write <think> and </think>.", False, "", "Write <think> and </think>."),
        ("<think>a</think>b</think>c", False, "a", "b</think>c"),
    ],
)
def test_a_leading_block_is_the_reasoning(text, begins_in_reasoning, reasoning, content):
    reply = read(text, begins_in_reasoning=begins_in_reasoning)
    assert (reply.reasoning, reply.content, reply.text) == (reasoning, content, text)


@pytest.mark.parametrize(
    ("text", "calls", "content"),
    [
        (hermes('{"name": "f", "arguments": {"a": 1}}'), [("f", {"a": 1})], ""),
        ('<tool_call>{"name":"f","arguments":{}}</tool_call>', [("f", {})], ""),
        (hermes('{"name": "f"}'), [("f", {})], ""),
        (
            "See:\n" + hermes('{"name": "f", "arguments": {"a": "</tool_call>"}}'),
            [("f", {"a": "</tool_call>"})],
            "See:",
        ),
        (hermes('{"name": "f"}') + "\n" + hermes('{"name": "g"}'), [("f", {}), ("g", {})], ""),
        (hermes('{"name": "f"}') + hermes("{") + "x", [("f", {})], hermes("{") + "x"),
        (hermes("<tool_call>") + hermes('{"name": "g"}'), [("g", {})], hermes("<tool_call>")),
        ('\n{"name": "f", "parameters": {"a": [1.5, null]}} ', [("f", {"a": [1.5, None]})], ""),
        ('<think>\n{"name": "f"}\n</think>\n\n{"name": "f", "parameters": {}}', [("f", {})], ""),
    ],
)
def test_calls_are_taken_out_of_the_content(text, calls, content):
    reply = read(text)
    assert reply.tool_calls == tuple(ToolCall(*call) for call in calls)
    assert reply.content == content


NESTED = "[" * MAX_LEVELS + "]" * MAX_LEVELS
BROKEN = [
    "",
    "{",
    "[]",
    "null",
    '"f"',
    '{"name": "f", "arguments": {"a": }}',
    '{"arguments": {}}',
    '{"name": "", "arguments": {}}',
    '{"name": 5, "arguments": {}}',
    '{"name": "f", "arguments": "{}"}',
    '{"name": "f", "arguments": [1]}',
    '{"name": "f", "arguments": {}} trailing',
    '{"name": "f", "arguments": {"a": NaN}}',
    '{"name": "f", "arguments": {"a": -Infinity}}',
    '{"name": "f", "arguments": {"a": 1e999}}',
    '{"name": "f", "arguments": {"a": ' + "9" * 10_000 + "}}",
    '{"name": "f", "arguments": {"a": "\\ud800"}}',
    '{"name": "f", "arguments": {"\\ud800": 1}}',
    '{"name": "f", "arguments": {"a": ' + NESTED + "}}",
    '{"name": "f", "arguments": ' + '{"a":' * 100_000,
]


@pytest.mark.parametrize("body", BROKEN, ids=range(len(BROKEN)))
def test_a_call_that_cannot_be_read_stays_in_the_content(body):
    for text in (hermes(body), body.replace("arguments", "parameters"), "<tool_call>" + body):
        reply = read(text)
        assert (reply.tool_calls, reply.content) == ((), text)


@pytest.mark.parametrize(
    "text",
    [
        '{"name": "f"}',  # data rather than a call
        '{"name": "f", "parameters": {}} and more',
        'Call {"name": "f", "parameters": {}}',
        '<tool_call>{"name": "f", "arguments": {}}',  # cut off
    ],
)
def test_text_that_is_no_call_stays_in_the_content(text):
    reply = read(text)
    assert (reply.tool_calls, reply.content) == ((), text)


def test_a_turn_has_a_limit_of_calls():
    call = hermes('{"name": "f"}')
    reply = read(call * (MAX_CALLS + 2))
    assert len(reply.tool_calls) == MAX_CALLS
    assert reply.content == call * 2


PARTS = st.sampled_from(
    [
        "<tool_call>",
        "</tool_call>",
        '{"name": "f", "arguments": {',
        '"a": 1',
        "}}",
        "[",
        "<think>",
        "</think>",
        " ",
        "\n",
    ]
)


@given(st.lists(PARTS | st.text(max_size=3), max_size=12).map("".join))
def test_any_text_can_be_read_and_calls_are_json(text):
    reply = read(text)
    assert reply.text == text
    for call in reply.tool_calls:
        assert json.loads(json.dumps(call.arguments, allow_nan=False)) == call.arguments
        assert call.name == "f"
