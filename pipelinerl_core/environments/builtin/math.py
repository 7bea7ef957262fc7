"""One-turn mathematics, compared as mathematics by the library math-verify: 1/2 equals 0.5 and \\frac{2}{4}."""

import logging
from typing import Any


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
        """Components of 0 or 1. correct: the reply equals the answer; parsed: the reply has an expression."""
        # The library's own time limits use SIGALRM, which this process uses for environment.call_seconds.
        gold = self._math_verify.parse(str(task["answer"]), parsing_timeout=None)
        parsed = self._math_verify.parse(transcript, parsing_timeout=None)
        is_correct = bool(gold and parsed) and self._math_verify.verify(gold, parsed, timeout_seconds=None)
        return {"correct": float(is_correct), "parsed": float(bool(parsed))}
