"""Guess the number: the model guesses, the environment says how the range of possible numbers shrinks."""

import random
import re
from typing import Any

_NUMBER = re.compile(r"\d+")


class Guess:
    """A number from 0 to `highest` is guessed in at most `turns` turns.

    plain: messages of digits alone, such as "0,9=", for models without a chat template.
    """

    weights = {"solved": 1.0}  # noqa: RUF012  (the form that users write)

    def __init__(self, highest: int = 9, turns: int = 3, plain: bool = False) -> None:
        self._highest = highest
        self._turns = turns
        self._plain = plain

    def task(self, index: int) -> dict[str, int]:
        """A secret number; every number is equally likely."""
        return {"secret": random.Random(f"guess/{index}").randint(0, self._highest)}

    def held_out(self, count: int) -> list[dict[str, int]]:
        """All numbers in turn. Training has the same numbers: the model learns a strategy, not the numbers."""
        return [{"secret": index % (self._highest + 1)} for index in range(count)]

    async def play(self, task: dict[str, int], ask: Any, seed: int) -> list[int]:
        """The guesses, -1 for a reply without a number."""
        low, high, guesses = 0, self._highest, list[int]()
        messages = [{"role": "user", "content": self._question(low, high)}]
        for _ in range(self._turns):
            reply = await ask(messages)
            match = _NUMBER.search(reply.content)
            guesses.append(int(match.group()) if match and len(match.group()) < 10 else -1)
            if guesses[-1] == task["secret"]:
                break
            if low <= guesses[-1] < task["secret"]:
                low = guesses[-1] + 1
            elif task["secret"] < guesses[-1] <= high:
                high = guesses[-1] - 1
            messages += [reply.message, {"role": "user", "content": self._question(low, high)}]
        return guesses

    def score(self, task: dict[str, int], transcript: list[int]) -> dict[str, float]:
        """solved: whether the number was found; guesses: how many guesses; legal: share of replies with a number."""
        return {
            "solved": float(transcript[-1] == task["secret"]),
            "guesses": len(transcript),
            "legal": sum(guess >= 0 for guess in transcript) / len(transcript),
        }

    def _question(self, low: int, high: int) -> str:
        if self._plain:
            return f"{low},{high}="
        return f"I think of a number from {low} to {high}. Guess it. Answer with one number."
