"""Verifiers: pure functions from a completion's text and its prompt's task to a reward.

A verifier raises where the task itself is unusable; a bad completion is worth 0.
"""

import re
from collections.abc import Callable, Mapping
from typing import Any

Verifier = Callable[[str, Mapping[str, Any]], float]

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
    """What the last whole \\boxed{...} holds, braces inside it balanced; None without one."""
    end = len(text)
    while (start := text.rfind("\\boxed{", 0, end)) >= 0:
        first = start + len("\\boxed{")
        depth = 1
        for position in range(first, len(text)):
            depth += {"{": 1, "}": -1}.get(text[position], 0)
            if depth == 0:
                return text[first:position]
        end = start  # never closed, as when max_tokens cut it off: look at the one before
    return None


def _normalised(answer: str) -> str:
    """Without space around it, dollar signs, a final point and separators of thousands; runs of space become one."""
    text = " ".join(answer.split())
    return _THOUSANDS.sub("", text.strip("$").rstrip(".").strip())
