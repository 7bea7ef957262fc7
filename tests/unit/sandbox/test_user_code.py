"""Failures of a user's code as one line."""

import asyncio

import pytest

from pipelinerl_core.sandbox.user_code import _executed, failure_line

CODE = """
import asyncio

async def fails():
    raise ValueError("no grade")

async def judged():
    async with asyncio.TaskGroup() as group:
        group.create_task(fails())

async def waits():
    async with asyncio.TaskGroup() as group:
        group.create_task(asyncio.wait_for(asyncio.Event().wait(), 0))

async def grouped():
    raise ExceptionGroup("two", [KeyError("a"), KeyError("b")])
"""


@pytest.mark.parametrize(
    ("function", "line"),
    [
        ("judged", "ValueError: no grade (mine.py:5)"),
        ("waits", "TimeoutError (mine.py:12)"),  # the innermost line of the user
        ("grouped", "KeyError: 'a' (mine.py:16)"),  # was never raised by itself
    ],
)
def test_a_group_of_exceptions_is_told_as_its_first(function, line):
    module = _executed("mine.py", CODE)
    with pytest.raises(ExceptionGroup) as raised:
        asyncio.run(getattr(module, function)())
    assert failure_line(raised.value) == line
