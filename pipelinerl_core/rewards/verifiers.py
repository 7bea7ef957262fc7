"""Verifiers: pure functions from a completion's text and its prompt's task to a reward.

The text is hostile: a model that is rewarded for finding holes finds them. A verifier takes time linear in the text,
runs nothing that the text says, raises where the task itself is unusable, and gives a bad completion 0. One that must
hand text to something that evaluates returns an Evaluation, which the worker runs in a process of its own.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """A scoring that evaluates text, to be called where it can change nothing."""

    score: Callable[[], float]
    lowest: float = 0.0
    """What a wrong answer is worth; also when the evaluation does not end, or ends its process."""
    highest: float = 1.0
    """A reward outside of the range is not the scorer's: the text made it up."""


Verifier = Callable[[str, Mapping[str, Any]], float | Evaluation]

_BOX_OR_BRACE = re.compile(r"\\boxed\{|[{}]")
_THOUSANDS = re.compile(r"(?<=\d),(?=\d{3}(?!\d))")


def sums(text: str, task: Mapping[str, Any]) -> float:
    """1 when what follows the last point is exactly the sum.

    >>> sums("7,15.15", {"answer": "15"}), sums("15", {"answer": "15"})
    (1.0, 0.0)
    """
    _, point, number = text.rpartition(".")
    return float(bool(point) and number == task["answer"])


def exact_match(text: str, task: Mapping[str, Any]) -> float:
    r"""1 when the final answer of the completion equals that of the reference, both normalised.

    The final answer is what the last \boxed{...} holds; without one, what follows the last "####"; without that, the
    whole text. The reference is read in the same way, so that worked solutions (GSM8K) can serve as references.

    >>> exact_match("6 * 7 = 42, so \\boxed{42}", {"answer": "42"})
    1.0
    """
    return float(_normalised(_final_answer(text)) == _normalised(_final_answer(task["answer"])))


def _final_answer(text: str) -> str:
    boxed = _last_boxed(text)
    if boxed is not None:
        return boxed
    return text.rpartition("####")[2]


def _last_boxed(text: str) -> str | None:
    """What the last whole \\boxed{...} holds, braces inside it balanced; None without one. One pass."""
    last: tuple[int, int] | None = None
    opened: list[int | None] = []  # where what a box holds begins; None for another brace
    for token in _BOX_OR_BRACE.finditer(text):
        if token[0] != "}":
            opened.append(token.end() if len(token[0]) > 1 else None)
        elif opened and (start := opened.pop()) is not None and (last is None or start > last[0]):
            last = start, token.start()
    return None if last is None else text[slice(*last)]


def _normalised(answer: str) -> str:
    """Without space around it, dollar signs, a final point and separators of thousands; runs of space become one."""
    text = " ".join(answer.split())
    return _THOUSANDS.sub("", text.strip("$").rstrip(".").strip())
