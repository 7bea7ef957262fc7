"""Verifiers: pure functions from a completion's text and its prompt's task to a reward.

The text is untrusted: training rewards a model for exploiting flaws of a verifier. A verifier takes time linear in
the length of the text, executes no part of the text, raises if the task itself is invalid, and returns 0 for an
invalid completion. If scoring must evaluate text, the verifier returns an Evaluation, which runs in a fork.
"""

import re
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """A scoring that evaluates text and must therefore run in an isolated process."""

    score: Callable[[], float]
    lowest: float = 0.0
    """Reward of a wrong answer, also if the evaluation's process dies."""
    highest: float = 1.0
    """Rewards outside of lowest..highest count as forged by the text."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Components:
    """A reward that is the weighted sum of named components."""

    reward: float
    values: dict[str, float]
    """Component -> value, without its weight."""


Verifier = Callable[[str, Mapping[str, Any]], float | Evaluation | Components]

_BOX_OR_BRACE = re.compile(r"\\boxed\{|\\\\(?!boxed\{)|\\[{}]|[{}]")
_THOUSANDS = re.compile(r"(?<=\d),(?=\d{3}(?!\d))")
# A sign counts unless the sign joins two words or numbers, as in "10-20"; a point begins a number unless it follows
# a word, a number or a point, as in "v.2".
_NUMBER = re.compile(
    r"(?:(?<!\w)[-\u2212])?(?:(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)(?:\.[0-9]+)?|(?<![\w.])\.[0-9]+)"
)


def sums(text: str, task: Mapping[str, Any]) -> float:
    """1 if the text after the last point is exactly the sum.

    >>> sums("7,15.15", {"answer": "15"}), sums("15", {"answer": "15"})
    (1.0, 0.0)
    """
    _, point, number = text.rpartition(".")
    return float(bool(point) and number == task["answer"])


def exact_match(text: str, task: Mapping[str, Any]) -> float:
    r"""1 if the final answers of completion and reference are equal after normalization.

    The final answer is the content of the last \boxed{...}; without a box, the text after the last "####"; else the
    whole text. The reference is parsed in the same way, so that worked solutions (GSM8K) can serve as references.

    >>> exact_match("6 * 7 = 42, so \\boxed{42}", {"answer": "42"})
    1.0
    """
    return float(_normalised(_final_answer(text)) == _normalised(_final_answer(task["answer"])))


def last_number(text: str, task: Mapping[str, Any]) -> float:
    """1 if the last number of the text equals the last number of the reference.

    Numbers may have a sign, decimals and thousands separators: -1,234.50 equals -1234.5.

    >>> last_number("The largest number is 59.", {"answer": "59"}), last_number("59, not 56", {"answer": "59"})
    (1.0, 0.0)
    """
    expected = _last_number(task["answer"])
    if expected is None:
        raise ValueError(f"the reference {task['answer'][:60]!r} has no number")
    return float(_last_number(text) == expected)


def _last_number(text: str) -> tuple[bool, str, str] | None:
    """(is negative, digits, decimals) of the last number, without zeros that have no value; None without a number."""
    matches = deque(_NUMBER.finditer(_without_latex(text)), maxlen=1)
    if not matches:
        return None
    number = matches[0][0]
    digits, _, decimals = number.lstrip("-\u2212").replace(",", "").partition(".")
    digits, decimals = digits.lstrip("0"), decimals.rstrip("0")
    return number[0] in "-\u2212" and bool(digits or decimals), digits, decimals


def _final_answer(text: str) -> str:
    boxed = _last_boxed(text)
    if boxed is not None:
        return boxed
    return text.rpartition("####")[2]


def _last_boxed(text: str) -> str | None:
    """Content of the last complete \\boxed{...} with balanced braces; None without a box. One pass over the text."""
    last: tuple[int, int] | None = None
    opened: list[int | None] = []  # for each open brace: start of the box's content; None for another brace
    for token in _BOX_OR_BRACE.finditer(text):
        if len(token[0]) == 2:  # an escaped brace, or the end of a line, which escapes no brace
            continue
        if token[0] != "}":
            opened.append(token.end() if len(token[0]) > 1 else None)
        elif opened and (start := opened.pop()) is not None and (last is None or start > last[0]):
            last = start, token.start()
    return None if last is None else text[slice(*last)]


def _without_latex(number: str) -> str:
    """\\$5, 1{,}234 and 1,\\!234 are $5 and 1,234."""
    return number.replace("\\$", "$").replace("{,}", ",").replace("\\!", "")


def _normalised(answer: str) -> str:
    """Strip outer space, dollar signs, final points and thousands separators; collapse runs of space."""
    text = " ".join(_without_latex(answer).split())
    return _THOUSANDS.sub("", text.rstrip("$. ").lstrip("$ "))
