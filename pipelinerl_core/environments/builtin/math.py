"""One-turn mathematics, compared as mathematics by the library math-verify: 1/2 equals 0.5 and \\frac{2}{4}."""

import logging
import re
from typing import Any

_MARKED = re.compile(r"\\boxed|\$|\\\(|\\\[|####")
"""Where math-verify finds LaTeX, or a solution of GSM8K has its answer."""
_UNITS = re.compile(r"[A-Za-z]{3,} | [A-Za-z]{3,}|\d\s+[A-Za-z0-9(]|[A-Za-z]/[A-Za-z]|[°€£]|:\s")
"""Of prose and of numbers with a unit, of which the library reads the number."""


class Math:
    """Plays the rows of prompts.*: sends the row's `prompt`, and compares the model's reply with the row's `answer`.

    The library may compute for long on a hostile reply. environment.call_seconds then interrupts the comparison: the
    episode has the reward environment.timeout_reward, or in an evaluation an error. Requires the package math-verify
    on every host that runs actors.
    """

    weights = {"correct": 1.0}  # noqa: RUF012  (the form that users write)

    def __init__(self) -> None:
        """Raises RuntimeError if math-verify is not installed."""
        try:
            import math_verify  # noqa: PLC0415  (optional)
        except ModuleNotFoundError as error:
            raise RuntimeError(f"environment.path=builtin:math needs math-verify ({error}); pip install it") from None
        logging.getLogger("math_verify").setLevel(logging.ERROR)  # each call without a time limit warns
        self._math_verify = math_verify

    async def play(self, task: dict[str, Any], ask: Any, seed: int) -> str:
        """Ask for one turn; returns the reply without its reasoning block."""
        reply = await ask(task.get("prompt_messages") or [{"role": "user", "content": task["prompt"]}])
        return str(reply.content)

    def score(self, task: dict[str, Any], transcript: str) -> dict[str, float]:
        """Components of 0 or 1. correct: the reply equals the answer; parsed: the reply has an expression.

        Raises ValueError if the answer has no expression.
        """
        gold, parsed = self._reference(str(task["answer"])), self._parsed(transcript)
        if not gold:
            raise ValueError(f"the answer {str(task['answer'])[:60]!r} has no expression that math-verify can read")
        is_correct = bool(parsed) and self._math_verify.verify(gold, parsed, timeout_seconds=None)
        return {"correct": float(is_correct), "parsed": float(bool(parsed))}

    def _reference(self, answer: str) -> list[Any]:
        """Without marks, the library would take the 2 of 2\\pi for the answer, and read no \\sqrt{2}."""
        is_bare = not _MARKED.search(answer) and ("\\" in answer or not _UNITS.search(answer))
        forms = [answer, f"\\boxed{{{answer}}}"]
        parsed = (self._parsed(form) for form in (reversed(forms) if is_bare else forms))
        return next(filter(None, parsed), [])

    def _parsed(self, text: str) -> list[Any]:
        # The library's own time limits use SIGALRM, which this process uses for environment.call_seconds.
        return list(self._math_verify.parse(text, parsing_timeout=None))
