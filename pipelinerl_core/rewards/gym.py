"""The verifiers of the reasoning-gym library. Importing it takes seconds, so only its workers do."""

import re
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from reasoning_gym.factory import create_dataset

_ANSWER = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)


def reasoning_gym(text: str, task: Mapping[str, Any]) -> float:
    """What the library's own `score_answer` gives for what the last <answer> tag holds, or for the whole text."""
    tagged = _ANSWER.findall(text)
    answer = (tagged[-1] if tagged else text).strip()
    entry = {"answer": task["answer"], "metadata": _with_tuples(task["metadata"])}
    return float(_dataset(task["task"]).score_answer(answer, entry))


@lru_cache(maxsize=128)
def _dataset(name: str) -> Any:
    """The library's data set, for its scoring only: the entry comes with the prompt."""
    return create_dataset(name, seed=0)


def _with_tuples(value: Any) -> Any:
    """Undo the tagging of tuples that brought the entry through JSON: {"__tuple__": [1, 2]} -> (1, 2)."""
    if isinstance(value, list):
        return [_with_tuples(item) for item in value]
    if isinstance(value, dict):
        if value.keys() == {"__tuple__"}:
            return tuple(_with_tuples(item) for item in value["__tuple__"])
        return {key: _with_tuples(item) for key, item in value.items()}
    return value
