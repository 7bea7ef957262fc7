"""Small exercises for the environment of programs, for prompts.kind=environment: a first task for a small model."""

import random
from collections.abc import Callable
from typing import Any

from pipelinerl_core.environments.builtin.code import Code

WORDS = "Write a Python function f(x) that returns {}."
ARGUMENTS = (0, 3, 10, -7)
"""The function of each exercise is called with these."""
_OPERATIONS: tuple[tuple[str, Callable[[int, int], int]], ...] = (
    ("x plus {number}", lambda x, number: x + number),
    ("x minus {number}", lambda x, number: x - number),
    ("x times {number}", lambda x, number: x * number),
    ("{number} minus x", lambda x, number: number - x),
    ("the square of x plus {number}", lambda x, number: x * x + number),
)


class CodeExercises(Code):
    """One-line functions of one number, such as "x times 7". A number divisible by five is held out."""

    def task(self, index: int) -> dict[str, Any]:
        """An exercise with a number from 2 to 99 that five does not divide."""
        draw = random.Random(f"code/{index}")
        return _exercise(draw, draw.choice([number for number in range(2, 100) if number % 5]))

    def held_out(self, count: int) -> list[dict[str, Any]]:
        """Exercises with a number from 5 to 95 that five divides."""
        draw = random.Random("code/held-out")
        return [_exercise(draw, 5 * draw.randint(1, 19)) for _ in range(count)]


def _exercise(draw: random.Random, number: int) -> dict[str, Any]:
    words, compute = draw.choice(_OPERATIONS)
    return {
        "prompt": f"{WORDS.format(words.format(number=number))} Answer with the code alone.",
        "tests": [{"call": "f", "arguments": [x], "result": compute(x, number)} for x in ARGUMENTS],
    }
