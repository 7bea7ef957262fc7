"""A user's reward function, inside a scoring process: called by parameter names, and its result checked."""

import asyncio
import inspect
import json
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from numbers import Real
from typing import Any

import numpy as np

from pipelinerl_core.ranges import MAX_COMPONENTS, MAX_REWARD
from pipelinerl_core.rewards.verifiers import Components
from pipelinerl_core.sandbox.user_code import (
    Invalid,
    checked_components,
    finite_number,
    finite_or_none,
    is_component,
    keywords,
    load,
)

_RUNNER = asyncio.Runner()
"""Of the process: a client that the user's module shares has connections of one event loop."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FunctionSpec:
    """A reward function, as the scorer sends it to its processes."""

    function: str
    """FILE.py:NAME or package.module:NAME; several names with commas."""
    code: str | None
    """Text of FILE.py; None for a module."""
    weights: Mapping[str, float]
    """Component -> weight in the reward; 1 for other components."""
    has_network: bool


class RewardFunctions:
    """The verifier that calls several functions: each is a component of the reward, under its name."""

    def __init__(self, spec: Mapping[str, Any]) -> None:
        """Load the functions of a FunctionSpec; raises as `RewardFunction`."""
        self._weights = FunctionSpec(**spec).weights
        place, _, names = spec["function"].rpartition(":")
        self._functions = {
            name: RewardFunction({**spec, "function": f"{place}:{name}", "weights": {}}) for name in names.split(",")
        }
        self.file = next(iter(self._functions.values())).file

    def __call__(self, text: str, task: Mapping[str, Any]) -> Components:
        """The weighted sum; a function that returns components adds these. Raises as `RewardFunction`."""
        values: dict[str, float] = {}
        for name, function in self._functions.items():
            result = function(text, task)
            if isinstance(result, Components):
                # The other numbers of a function of verl are no part of its reward.
                new = {name: result.reward} if function.has_verl_form else result.values
            else:
                new = {name: result}
            if both := values.keys() & new.keys():
                raise Invalid(f"two reward functions return the component {min(both)}. Give it two names")
            values |= new
        return _weighted(values, self._weights, ", ".join(self._functions))


def _weighted(result: Mapping[Any, Any], weights: Mapping[str, float], name: str) -> Components:
    """The sum of the components, each times its weight. name: what returned them, for messages."""
    values = checked_components(result, name)
    if unknown := [component for component in weights if component not in values]:
        raise Invalid(
            f"reward.weights.{unknown[0]}: {name} returned no such component (returned: {', '.join(values)}). "
            "Correct the name in reward.weights or in the function"
        )
    total = sum(weights.get(component, 1.0) * value for component, value in values.items())
    return Components(reward=finite_number(total, name, " as weighted sum"), values=values)


class RewardFunction:
    """The verifier that calls a user's function."""

    def __init__(self, spec: Mapping[str, Any]) -> None:
        """Load the function of a FunctionSpec; raises Invalid, or any exception of the loaded code."""
        self._spec = FunctionSpec(**spec)
        self._name = self._spec.function.rpartition(":")[2]
        self._function, self.file = load(self._spec.function, self._spec.code, "function")
        if not callable(self._function):
            raise Invalid(
                f"{self._name} is not callable, but has the type {type(self._function).__name__}. Name a function"
            )
        parameters = inspect.signature(self._function).parameters.values()
        if any(parameter.kind is parameter.POSITIONAL_ONLY for parameter in parameters):
            raise Invalid(f"{self._name} has positional-only parameters, but is called by parameter names")
        if inspect.iscoroutinefunction(self._function) and not self._spec.has_network:
            raise Invalid(f"{self._name} is async, which requires reward.network=true. Use `def`, or set the key")
        self._is_required, self._takes_all = keywords(self._function)
        names = self._is_required.keys()
        # A function that names `text` has a column of that name in mind.
        self._form = next((form for mark, form in _FORMS.items() if mark in names and "text" not in names), _own)

    @property
    def has_verl_form(self) -> bool:
        """The function has verl's signature, in which `score` is the reward and other numbers are recorded."""
        return self._form is _verl

    def __call__(self, text: str, task: Mapping[str, Any]) -> float | Components:
        """The reward of a completion. task: the columns of the prompt's row, and the other parameters.

        Raises Invalid if the row lacks a parameter or the result is no reward, and any exception of the function.
        """
        available = self._form(text, task)
        if missing := [name for name, required in self._is_required.items() if required and name not in available]:
            raise Invalid(
                f"{self._name} has the parameter {missing[0]}, but the prompt's row has no such column. "
                f"Available: {', '.join(sorted(available))}. Signatures: (text, prompt, answer, COLUMN, ...), TRL's "
                "(prompts, completions, COLUMN, ...), verl's (data_source, solution_str, ground_truth, extra_info)"
            )
        values = {name: value for name, value in available.items() if self._takes_all or name in self._is_required}
        result = self._function(**values)
        if inspect.iscoroutine(result):
            result = _RUNNER.run(_alone(result))
        if self._form is _trl:
            result = self._only(result)
        return self._checked(result)

    def _only(self, results: Any) -> Any:
        """The reward of the only completion of a batch; 0 for None, which in TRL adds nothing to the sum."""
        if not isinstance(results, Sequence | np.ndarray) or isinstance(results, str) or len(results) != 1:
            raise Invalid(f"{self._name} has TRL's signature, but returned no list with one reward per completion")
        return 0.0 if results[0] is None else results[0]

    def _checked(self, result: Any) -> float | Components:
        weights = self._spec.weights
        if self._form is _verl and isinstance(result, Mapping) and "score" in result and not weights:
            score = finite_number(result["score"], self._name)
            others = {name: value for name, value in result.items() if name != "score" and _is_recorded(name, value)}
            kept = islice(others.items(), MAX_COMPONENTS - 1)
            return Components(reward=score, values=checked_components({"score": score, **dict(kept)}, self._name))
        if not isinstance(result, Mapping):
            if weights:
                raise Invalid(
                    f"{self._name} returned one number, but reward.weights names components "
                    f"({', '.join(weights)}). Return a mapping of these names, or remove reward.weights"
                )
            return finite_number(result, self._name)
        return _weighted(result, weights, self._name)


def _is_recorded(name: Any, value: Any) -> bool:
    """Whether a value beside verl's `score`, which is no part of the reward, is recorded."""
    if not is_component(name) or not isinstance(value, Real):
        return False
    number = finite_or_none(value)
    return number is not None and abs(number) <= MAX_REWARD


def _own(text: str, task: Mapping[str, Any]) -> dict[str, Any]:
    """The values by parameter, in this project's form: `text` and the columns of the row; the answer is text."""
    if isinstance(answer := task.get("answer"), bool | int | float):
        task = {**task, "answer": json.dumps(answer)}
    return {**task, "text": text}


def _trl(text: str, task: Mapping[str, Any]) -> dict[str, Any]:
    """In TRL's form: a batch of one completion, every value in a list; messages if the row's prompt is messages."""
    messages = task.get(PROMPT_MESSAGES)
    is_chat = messages is not None
    columns = {name: [value] for name, value in task.items() if name not in _NOT_IN_TRL}
    return columns | {
        "prompts": [messages if is_chat else task["prompt"]],
        "completions": [[{"role": "assistant", "content": text}] if is_chat else text],
        "completion_ids": [task["token_ids"]],
    }


def _verl(text: str, task: Mapping[str, Any]) -> dict[str, Any]:
    """In verl's form; the reference is `reward_model.ground_truth` of the row, else its answer."""
    judged = task.get("reward_model")
    truth = judged.get("ground_truth") if isinstance(judged, Mapping) else None
    truth = task.get("answer") if truth is None else truth
    known = {"data_source": task.get("data_source", ""), "extra_info": task.get("extra_info")}
    return {**task, **known, "solution_str": text, "ground_truth": truth}


PROMPT_MESSAGES = "prompt_messages"
"""The column `prompt` of a row if it is a list of messages; the parameter `prompt` is its text."""
_NOT_IN_TRL = ("prompt", "token_ids", "finish_reason", PROMPT_MESSAGES)
_FORMS = {"completions": _trl, "completion_ids": _trl, "solution_str": _verl}
"""Parameter that only one form has -> the form."""


async def _alone(result: Coroutine[Any, Any, Any]) -> Any:
    """The result of a call; the tasks that the call leaves are cancelled, as `asyncio.run` does."""
    before = asyncio.all_tasks()
    try:
        return await result
    finally:
        left = asyncio.all_tasks() - before
        for task in left:
            task.cancel()
        await asyncio.gather(*left, return_exceptions=True)
