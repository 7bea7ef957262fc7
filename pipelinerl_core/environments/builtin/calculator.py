"""A calculator as a tool: the model writes a sum, the environment answers, the model says the result."""

import random
import re
from typing import Any

_CALL = re.compile(r"(\d{1,12})\s*\+\s*(\d{1,12})\s*=")
_NUMBER = re.compile(r"\d+")
_THOUSANDS = re.compile(r"(?<=\d),(?=\d{3}(?!\d))")


class Calculator:
    """Two numbers of `digits` digits are added. The tool is described in the message: any chat template will do."""

    weights = {"correct": 1.0}  # noqa: RUF012  (the form that users write)

    def __init__(self, digits: int = 3) -> None:
        self._low, self._high = 10 ** (digits - 1), 10**digits - 1

    def task(self, index: int) -> dict[str, int]:
        """Two numbers whose sum is not divisible by ten."""
        return self._draw(random.Random(f"calculator/{index}"), held_out=False)

    def held_out(self, count: int) -> list[dict[str, int]]:
        """Two numbers whose sum is divisible by ten."""
        draw = random.Random("calculator/held-out")
        return [self._draw(draw, held_out=True) for _ in range(count)]

    async def play(self, task: dict[str, int], ask: Any, seed: int) -> dict[str, Any]:
        """Whether the calculator was used, and the model's last words."""
        question = f"What is {task['first']} + {task['second']}?"
        tool = f"You have a calculator: write {task['first']}+{task['second']}= and the calculator answers."
        messages = [{"role": "user", "content": f"{question} {tool}"}]
        reply = await ask(messages)
        call = _CALL.search(reply.content)
        if call is None:
            return {"called": False, "answer": reply.content}
        answer = f"The calculator answers {int(call[1]) + int(call[2])}. {question}"
        reply = await ask([*messages, reply.message, {"role": "user", "content": answer}])
        return {"called": True, "answer": reply.content}

    def score(self, task: dict[str, int], transcript: dict[str, Any]) -> dict[str, float]:
        """correct: the last number of the last turn is the sum; called: whether the calculator was used."""
        numbers = _NUMBER.findall(_THOUSANDS.sub("", transcript["answer"]))
        is_correct = bool(numbers) and numbers[-1].lstrip("0") == str(task["first"] + task["second"])
        return {"correct": float(is_correct), "called": float(transcript["called"])}

    def _draw(self, draw: random.Random, *, held_out: bool) -> dict[str, int]:
        while True:
            first, second = (draw.randint(self._low, self._high) for _ in range(2))
            if ((first + second) % 10 == 0) is held_out:
                return {"first": first, "second": second}
