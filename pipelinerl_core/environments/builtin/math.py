"""One-turn mathematics, compared as mathematics by the library math-verify: 1/2 equals 0.5 and \\frac{2}{4}."""

import logging
from typing import Any


class Math:
    """The rows of prompts.*: the prompt is asked, the reply is compared with the row's `answer`.

    The library may compute for long on a hostile reply; environment.call_seconds interrupts the comparison, and the
    episode is an error. Requires the package math-verify on every host that runs actors.
    """

    weights = {"correct": 1.0}  # noqa: RUF012  (the form that users write)

    def __init__(self) -> None:
        try:
            import math_verify  # noqa: PLC0415  (optional)
        except ModuleNotFoundError as error:
            raise RuntimeError(f"environment.path=builtin:math needs math-verify ({error}); pip install it") from None
        logging.getLogger("math_verify").setLevel(logging.ERROR)  # each call without a time limit warns
        self._library = math_verify

    async def play(self, task: dict[str, Any], ask: Any, seed: int) -> str:
        """The reply."""
        reply = await ask([{"role": "user", "content": task["prompt"]}])
        return str(reply.content)

    def score(self, task: dict[str, Any], transcript: str) -> dict[str, float]:
        """correct: the reply is the answer; parsed: the reply has a mathematical expression."""
        # The library's own time limits use SIGALRM, which this process uses for environment.call_seconds.
        gold = self._library.parse(str(task["answer"]), parsing_timeout=None)
        parsed = self._library.parse(transcript, parsing_timeout=None)
        is_correct = bool(gold and parsed) and self._library.verify(gold, parsed, timeout_seconds=None)
        return {"correct": float(is_correct), "parsed": float(bool(parsed))}
