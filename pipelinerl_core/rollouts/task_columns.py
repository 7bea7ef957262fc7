"""The task of a rollout as JSON text of bounded size, which stays with the rollout's row."""

import json
from collections.abc import Mapping
from typing import Any

MAX_VALUE_CHARS = 1000
"""Longest value of a column, as JSON; longer values are cut."""
MAX_COLUMNS = 100
MAX_NAME_CHARS = 100


def task_text(task: Any) -> str:
    """The columns of a task as a JSON object; a task that is no mapping is the column `task`.

    A value whose JSON has more than MAX_VALUE_CHARS characters is a string: the first of them, and " ...". Columns
    after the first MAX_COLUMNS are left out.
    """
    columns = task if isinstance(task, Mapping) else {"task": task}
    return _json({str(name)[:MAX_NAME_CHARS]: _bounded(value) for name, value in list(columns.items())[:MAX_COLUMNS]})


def task_columns(text: str) -> dict[str, Any]:
    """The inverse of `task_text`."""
    columns: dict[str, Any] = json.loads(text)
    return columns


def answer_text(task: Mapping[str, Any]) -> str:
    """The column `answer` of a task as text, JSON unless it is a text already; empty without the column."""
    answer = task.get("answer", "")
    return answer if isinstance(answer, str) else _json(answer)


def _bounded(value: Any) -> Any:
    if isinstance(value, str):
        return value if len(value) <= MAX_VALUE_CHARS else f"{value[:MAX_VALUE_CHARS]} ..."
    try:
        text = _json(value)
    except (TypeError, ValueError, RecursionError):  # an object of Python that is no JSON
        return f"{type(value).__name__} that is no JSON"
    return value if len(text) <= MAX_VALUE_CHARS else f"{text[:MAX_VALUE_CHARS]} ..."


def _json(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False, default=str)
    return text.encode(errors="replace").decode()  # without halves of surrogate pairs
