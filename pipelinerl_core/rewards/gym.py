"""The verifiers of the reasoning-gym library. Importing it takes seconds, so only its workers do."""

from collections.abc import Callable, Iterable, Mapping
from functools import lru_cache
from typing import Any

import sympy
from reasoning_gym.factory import create_dataset
from reasoning_gym.games import countdown, puzzle24
from sympy.parsing.sympy_parser import parse_expr

from pipelinerl_core.config.gym_tasks import COMPOSITE, EVALUATING, GATES, evaluating
from pipelinerl_core.rewards.gate import CONSTANTS, FUNCTIONS, UNSOLVED, passes
from pipelinerl_core.rewards.verifiers import Evaluation

_OPENING, _CLOSING = "<answer>", "</answer>"

NUM_WARM_UP = 10

_PARSERS_OWN = {"Symbol", "Function", "Integer", "Float", "Rational"}
_NAMES = {name: getattr(sympy, name) for name in _PARSERS_OWN | FUNCTIONS | CONSTANTS | UNSOLVED} | {
    "__builtins__": {}
}


def prepare(tasks: Iterable[str]) -> Callable[[], object]:
    """Build what the scorers of these tasks need; returns what every evaluation begins with.

    Those that evaluate score some answers of the library itself: sympy fills caches at its first use, which would be
    lost with each fork.
    """
    for module in (sympy, countdown, puzzle24):
        module.parse_expr = parse_formula
    for task in tasks:
        dataset = _dataset(task)
        if evaluating([task]):
            for entry in map(dataset.__getitem__, range(NUM_WARM_UP)):
                dataset.score_answer(entry["answer"], entry)
    return lambda: parse_formula("1 + 1")


def parse_formula(text: str, local_dict: Mapping[str, Any] | None = None) -> Any:
    """Sympy's parser with the few names that the gate knows, in place of all of sympy and Python's builtins.

    Collecting those anew for every text takes two thirds of the parser's time, and more in a fork, which copies every
    page that it touches.
    """
    return parse_expr(text, local_dict=None if local_dict is None else dict(local_dict), global_dict=dict(_NAMES))


def reasoning_gym(text: str, task: Mapping[str, Any]) -> float | Evaluation:
    """What the library's own `score_answer` gives for what the last <answer> tag holds, or for the whole text.

    What the gate of the task refuses is 0. What a scorer evaluates is an Evaluation.
    """
    answer = tagged_answer(text)
    entry = {"answer": task["answer"], "metadata": _with_tuples(task["metadata"])}
    name = task["task"]
    gate = GATES[entry["metadata"]["source_dataset"] if name == COMPOSITE else name]
    if gate == "list" and _is_known(answer, entry):
        return _score(name, answer, entry)  # the scorer compares before it evaluates
    if not passes(gate, answer, entry):
        return 0.0
    if gate in EVALUATING:
        return Evaluation(score=lambda: _score(name, answer, entry))
    return _score(name, answer, entry)


def tagged_answer(text: str) -> str:
    """What the last <answer> tag that is closed holds, without space around it; without a tag, the text.

    >>> tagged_answer("<answer>1</answer> or <answer> 2 </answer> <answer>3")
    '2'
    """
    answer, position = text, 0
    while (start := text.find(_OPENING, position)) >= 0:
        start += len(_OPENING)
        if (end := text.find(_CLOSING, start)) < 0:
            break
        answer, position = text[start:end], end + len(_CLOSING)
    return answer.strip()


def _is_known(answer: str, entry: Mapping[str, Any]) -> bool:
    return answer == entry["answer"] or answer in entry["metadata"].get("valid_answers", ())


def _score(name: str, answer: str, entry: dict[str, Any]) -> float:
    """The library's score. An answer at which its scorer raises is wrong, unless the reference raises as well."""
    dataset = _dataset(name)
    try:
        return float(dataset.score_answer(answer, entry))
    except Exception:  # noqa: BLE001  (scorers raise anything at an answer that they did not expect)
        dataset.score_answer(entry["answer"], entry)
        return 0.0


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
