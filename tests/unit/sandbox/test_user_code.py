"""Failures of a user's code as one line."""

import asyncio

import pytest

from pipelinerl_core.sandbox.child_process import without_secrets
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


def test_a_secret_that_was_cut_or_has_several_lines_is_removed_from_errors(monkeypatch):
    monkeypatch.setenv("KEY", "Zx9QwErTyUiOpAsDfGhJkL")
    monkeypatch.setenv("PEM", "-----BEGIN-----\nabcdefghijklmnop\nqrstuvwxyz012345\n-----END-----\n")
    assert without_secrets("auth=Zx9QwErTyUiOp (j.py:5)", ["KEY"]) == "auth=$KEY (j.py:5)"
    assert without_secrets("...OpAsDfGhJkL refused", ["KEY"]) == "...$KEY refused"
    assert without_secrets("a -----BEGIN-----abcdefghijklmnopqrstuvwxyz012345-----END-----", ["PEM"]) == "a $PEM"
    assert without_secrets("a -----BEGIN----- abcdefghijklmnop qrstuvwxyz012345", ["PEM"]) == "a $PEM $PEM $PEM"
