"""Programs: the model writes Python, a sandbox runs the code, the results are compared outside (docs/code.md)."""

import json
import math
import os
import re
import sys
from collections.abc import Mapping, Sequence
from textwrap import dedent
from typing import Any

from pipelinerl_core.environments.api import BudgetSpent
from pipelinerl_core.environments.builtin.code_tests import Call, StdinTest, Tests, parse_tests
from pipelinerl_core.sandbox.program_server import Limits
from pipelinerl_core.sandbox.programs import Choice, Execution, ProgramSandbox, SandboxEnded
from pipelinerl_core.sandbox.user_code import finite_or_none

MAX_PROGRAM = 100_000
"""Characters of a program; a longer one fails all tests."""
SHOWN_CHARACTERS = 500
"""Characters of an input, an output or an error in a message to the model."""
WALL_FACTOR = 5
"""Wall time of an execution over its CPU time: the cores are shared with engine and trainer."""
_EXIT_SANDBOX = 71
_FENCE = re.compile(r"^[ \t]*```[^\n`]*$", re.MULTILINE)
_PYTHON = re.compile(r"[ \t]*```[ \t]*py(thon)?3?\b", re.IGNORECASE)


class Code:
    """Rows of prompts.* with tests: the program in the last code block of the reply must pass the tests.

    tests_column: column with the tests (code_tests.py has the forms). turns: turns of the model; after a failed turn
    the model sees the input, the output and the error of the first failed test, not the expected output. seconds,
    memory: CPU seconds and MiB of one execution. output: bytes. sandbox: auto, bubblewrap, landlock.
    """

    weights = {"solved": 1.0, "passed": 0.0}  # noqa: RUF012  (the form that users write)

    def __init__(
        self, tests_column: str = "tests", turns: int = 1, seconds: int = 1, memory: int = 512,
        output: int = 1 << 16, sandbox: Choice = "auto",
    ) -> None:  # fmt: skip
        if sandbox not in ("auto", "bubblewrap", "landlock"):
            raise ValueError(f"environment.options.sandbox={sandbox}: set auto, bubblewrap or landlock")
        for name, value in (("turns", turns), ("seconds", seconds), ("memory", memory), ("output", output)):
            if not isinstance(value, int) or value < 1:
                raise ValueError(f"environment.options.{name}={value}: set a whole number of at least 1")
        self._column = tests_column
        self._turns = turns
        limits = Limits(
            cpu_seconds=seconds, wall_seconds=WALL_FACTOR * seconds, memory_bytes=memory << 20, output_bytes=output
        )
        self._sandbox = ProgramSandbox(limits, sandbox)
        self.note = f"programs run with {self._sandbox.isolation}"
        if self._sandbox.reason:
            self.note += f", because {self._sandbox.reason}. Programs then share the host's file names and users"

    async def play(self, task: dict[str, Any], ask: Any, seed: int) -> dict[str, Any]:
        """Which tests passed, and whether the last program ran to its end."""
        tests = self._tests(task)
        messages = list(task.get("prompt_messages") or [{"role": "user", "content": task["prompt"]}])
        results: dict[str, Any] = {}
        for turn in range(1, self._turns + 1):
            try:
                reply = await ask(messages)
            except BudgetSpent:
                if not results:
                    raise
                break
            program = last_program(reply.content)

            async def execute(program: str = program) -> dict[str, Any]:
                return await self._results(program, tests, ask)

            results = await ask.once(f"program {turn}", execute)
            if all(results["passed"]):
                break
            messages += [reply.message, {"role": "user", "content": results["feedback"]}]
        return {"passed": results["passed"], "ran": results["ran"], "turns": ask.num_turns}

    def score(self, task: dict[str, Any], transcript: dict[str, Any]) -> dict[str, float]:
        """solved: all tests passed; passed: share of the tests; ran: no test ended with an error; turns."""
        passed = transcript["passed"]
        return {
            "solved": float(all(passed)),
            "passed": sum(passed) / len(passed),
            "ran": float(transcript["ran"]),
            "turns": float(transcript["turns"]),
        }

    def _tests(self, task: Mapping[str, Any]) -> Tests:
        if self._column not in task:
            raise ValueError(
                f"the row has no column {self._column!r}. Set environment.options.tests_column "
                f"(columns: {', '.join(sorted(task))})"
            )
        return parse_tests(task[self._column])

    async def _results(self, program: str, tests: Tests, ask: Any) -> dict[str, Any]:
        """passed: for each test; ran; feedback: a message about the first failed test."""
        if not program.strip() or len(program) > MAX_PROGRAM:
            feedback = "The reply has no program." if not program.strip() else "The program is too long."
            return {"passed": [False] * len(tests.all), "ran": False, "feedback": feedback}
        try:
            if tests.function:
                return await self._called(program, tests.function, tests.calls, ask)
            return await self._fed(program, tests.stdin, ask)
        except SandboxEnded as error:
            # A sealed process cannot start another sandbox; the parent starts another process and plays again.
            sys.stderr.write(f"environment code: {error}; this process ends\n")
            os._exit(_EXIT_SANDBOX)

    async def _fed(self, program: str, tests: Sequence[StdinTest], ask: Any) -> dict[str, Any]:
        passed, ran, feedback = list[bool](), True, ""
        for test in tests:
            done = await self._sandbox.run(program, stdin=test.stdin, waiting=ask.waiting)
            is_passed = done.exit_code == 0 and same_text(done.output, test.stdout)
            passed.append(is_passed)
            ran = ran and done.exit_code == 0
            if not is_passed and not feedback:
                feedback = _feedback(f"Input:\n{_short(test.stdin)}", f"Output:\n{_short(done.output)}", done)
            if done.is_killed:  # the other tests would use up their time, too
                break
        passed += [False] * (len(tests) - len(passed))
        return {"passed": passed, "ran": ran, "feedback": feedback}

    async def _called(self, program: str, function: str, calls: Sequence[Call], ask: Any) -> dict[str, Any]:
        arguments = [call.arguments for call in calls]
        done = await self._sandbox.run(program, function=function, calls=arguments, waiting=ask.waiting)
        lines = done.output.split("\n")[:-1]
        results = [_parsed(line) for line in lines[: len(calls)]]
        passed = [index < len(results) and _is_result(results[index], call) for index, call in enumerate(calls)]
        ran = done.exit_code == 0 and len(lines) == len(calls)
        if len(lines) > len(calls):  # the program wrote lines among the results
            passed = [False] * len(calls)
        first = passed.index(False) if False in passed else 0
        shown = ", ".join(map(repr, calls[first].arguments))
        result = f"Result: {_short(lines[first])}" if first < len(lines) else "No result."
        return {
            "passed": passed,
            "ran": ran,
            "feedback": _feedback(f"Call: {function}({_short(shown)})", result, done),
        }


def last_program(reply: str) -> str:
    """The content of the last code block of a reply that is named Python, else of the last block, else the reply.

    A block without an end reaches to the end of the reply.

    >>> last_program("Draft:\\n```\\n1\\n```\\nBetter:\\n```python\\nprint(2)\\n```\\nDone.")
    'print(2)\\n'
    """
    fences = [(fence.start(), fence.end()) for fence in _FENCE.finditer(reply)]
    if not fences:
        return reply
    openings = range(0, len(fences), 2)
    named = [at for at in openings if _PYTHON.match(reply, *fences[at])]
    opening = (named or openings)[-1]
    end = fences[opening + 1][0] if opening + 1 < len(fences) else len(reply)
    return dedent(reply[fences[opening][1] + 1 : end])  # a block in a list is indented


def same_text(actual: str, expected: str) -> bool:
    """Whether two outputs are equal, without spaces at the ends of lines and empty lines at the end."""
    return _lines(actual) == _lines(expected)


def same_value(actual: Any, expected: Any) -> bool:
    """Whether two JSON values are equal. Numbers are equal within 1e-9 if one is a decimal; true is no number."""
    if isinstance(expected, bool) or isinstance(actual, bool):
        return actual is expected
    if isinstance(expected, int | float) and isinstance(actual, int | float):
        if isinstance(actual, int) and isinstance(expected, int):
            return actual == expected
        near, exact = finite_or_none(actual), finite_or_none(expected)
        return near is not None and exact is not None and math.isclose(near, exact, rel_tol=1e-9, abs_tol=1e-9)
    if isinstance(expected, list) and isinstance(actual, list):
        return len(actual) == len(expected) and all(map(same_value, actual, expected))
    if isinstance(expected, dict) and isinstance(actual, dict):
        return actual.keys() == expected.keys() and all(same_value(actual[key], expected[key]) for key in expected)
    return type(actual) is type(expected) and bool(actual == expected)


def _is_result(actual: Any, call: Call) -> bool:
    is_list = call.is_wrapped and isinstance(call.result, list) and call.result
    return same_value(actual, call.result) or bool(is_list and same_value(actual, call.result[0]))


class _NoValue:
    """A line that is not JSON; not equal to any value."""


def _parsed(line: str) -> Any:
    try:
        return json.loads(line)
    except (ValueError, RecursionError):
        return _NoValue()


def _lines(text: str) -> list[str]:
    lines = [line.rstrip() for line in text.replace("\r\n", "\n").split("\n")]
    while lines and not lines[-1]:
        lines.pop()
    return lines


def _feedback(asked: str, answered: str, done: Execution) -> str:
    end = "The program was stopped: it took too long." if done.is_killed else ""
    if done.exit_code and not end:
        end = f"Error:\n{_short(done.errors, of_end=True)}"
    parts = ("A test failed.", asked, answered, end, "Write the whole program again.")
    return "\n".join(part for part in parts if part)


def _short(text: str, *, of_end: bool = False) -> str:
    if len(text) <= SHOWN_CHARACTERS:
        return text.rstrip("\n")
    return f"...{text[-SHOWN_CHARACTERS:]}" if of_end else f"{text[:SHOWN_CHARACTERS]}..."
