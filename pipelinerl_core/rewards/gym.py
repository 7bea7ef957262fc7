"""The verifiers of the reasoning-gym library. Importing the library takes seconds, so only scoring processes do."""

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any

import sympy
from reasoning_gym.factory import create_dataset
from reasoning_gym.games import countdown, puzzle24
from sympy.parsing.sympy_parser import parse_expr

from pipelinerl_core.gym.options import TaskOptions, dataset_options
from pipelinerl_core.gym.tasks import COMPOSITE, EVALUATING, GATES, evaluating
from pipelinerl_core.rewards.gate import CONSTANTS, FUNCTIONS, UNSOLVED, passes
from pipelinerl_core.rewards.verifiers import Evaluation

_OPENING, _CLOSING = "<answer>", "</answer>"

NUM_WARM_UP = 10

_GIVEN: dict[str, TaskOptions] = {}
"""Options of the tasks of the run."""
_PARSER_NAMES = {"Symbol", "Function", "Integer", "Float", "Rational"}
_NAMES = {name: getattr(sympy, name) for name in _PARSER_NAMES | FUNCTIONS | CONSTANTS | UNSOLVED} | {
    "__builtins__": {}
}


def prepare(tasks: Mapping[str, Sequence[Any]]) -> Callable[[], object]:
    """Build the data sets of these tasks, whose scorers are used; returns the warm-up function of a fork.

    tasks: task -> its options and its level, the fields of `TaskOptions`.
    Tasks that evaluate score some reference answers here, to fill sympy's caches before the process forks.
    """
    for module in (sympy, countdown, puzzle24):
        module.parse_expr = parse_formula
    _GIVEN.update({task: TaskOptions(*given) for task, given in tasks.items()})
    for task in tasks:
        dataset = _dataset(task)
        if evaluating([task]):
            for entry in map(dataset.__getitem__, range(NUM_WARM_UP)):
                dataset.score_answer(entry["answer"], entry)
    return lambda: parse_formula("1 + 1")


def parse_formula(text: str, local_dict: Mapping[str, Any] | None = None) -> Any:
    """Sympy's parser with the gate's names only, instead of all names of sympy and of Python's builtins.

    Collecting all names for each text takes two thirds of the parser's time, and more in a fork, which copies every
    page that it writes.
    """
    return parse_expr(text, local_dict=None if local_dict is None else dict(local_dict), global_dict=dict(_NAMES))


def reasoning_gym(text: str, task: Mapping[str, Any]) -> float | Evaluation:
    """The score of the library's `score_answer` for the content of the last <answer> tag, or for the whole text.

    0 if the gate of the task refuses the answer; an Evaluation if the scorer evaluates the answer.
    """
    answer = tagged_answer(text)
    entry = {"answer": task["answer"], "metadata": _with_tuples(task["metadata"])}
    name = task["task"]
    gate = GATES[entry["metadata"]["source_dataset"] if name == COMPOSITE else name]
    if gate == "list" and (answer == entry["answer"] or answer in entry["metadata"].get("valid_answers", ())):
        return _score(name, answer, entry)  # the scorer compares before it evaluates
    if not passes(gate, answer, entry):
        return 0.0
    if gate in EVALUATING:
        return Evaluation(score=lambda: _score(name, answer, entry))
    return _score(name, answer, entry)


def tagged_answer(text: str) -> str:
    """The stripped content of the last closed <answer> tag; without a tag, the stripped text.

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


def _score(name: str, answer: str, entry: dict[str, Any]) -> float:
    """The library's score; 0 if the scorer raises, unless the scorer raises for the reference answer, too."""
    dataset = _dataset(name)
    try:
        return float(dataset.score_answer(answer, entry))
    except Exception:  # noqa: BLE001  (scorers raise arbitrary exceptions for unexpected answers)
        dataset.score_answer(entry["answer"], entry)
        return 0.0


@lru_cache(maxsize=128)
def _dataset(name: str) -> Any:
    """The library's data set, used for its scorer only, because a prompt carries its entry."""
    return create_dataset(name, seed=0, **dataset_options(name, _GIVEN.get(name, TaskOptions({}))))


def _with_tuples(value: Any) -> Any:
    """Restore the tuples of an entry that was stored as JSON: {"__tuple__": [1, 2]} -> (1, 2)."""
    if isinstance(value, list):
        return [_with_tuples(item) for item in value]
    if isinstance(value, dict):
        if value.keys() == {"__tuple__"}:
            return tuple(_with_tuples(item) for item in value["__tuple__"])
        return {key: _with_tuples(item) for key, item in value.items()}
    return value
