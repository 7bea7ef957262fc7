"""A user's reward function, inside a scoring process: called by parameter names, and its result checked."""

import asyncio
import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pipelinerl_core.rewards.verifiers import Components
from pipelinerl_core.sandbox.user_code import Invalid, checked_components, finite_number, load


@dataclass(frozen=True, slots=True, kw_only=True)
class FunctionSpec:
    """A reward function, as the scorer sends it to its processes."""

    function: str
    """FILE.py:NAME or package.module:NAME."""
    code: str | None
    """Text of FILE.py; None for a module."""
    weights: Mapping[str, float]
    """Component -> weight in the reward; 1 for other components."""
    has_network: bool


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
        named = [
            parameter
            for parameter in parameters
            if parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
        ]
        self._takes_all = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)
        self._optional = {parameter.name for parameter in named if parameter.default is not parameter.empty}
        self._required = [parameter.name for parameter in named if parameter.default is parameter.empty]

    def __call__(self, text: str, task: Mapping[str, Any]) -> float | Components:
        """The reward of a completion. task: the columns of the prompt's row, and the other parameters.

        Raises Invalid if the row lacks a parameter or the result is no reward, and any exception of the function.
        """
        available = {**task, "text": text}
        if missing := [name for name in self._required if name not in available]:
            raise Invalid(
                f"{self._name} has the parameter {missing[0]}, but the prompt's row has no such column. "
                f"Available: {', '.join(sorted(available))}"
            )
        known = {*self._required, *self._optional}
        values = {name: value for name, value in available.items() if self._takes_all or name in known}
        result = self._function(**values)
        if inspect.iscoroutine(result):
            result = asyncio.run(result)
        return self._checked(result)

    def _checked(self, result: Any) -> float | Components:
        weights = self._spec.weights
        if not isinstance(result, Mapping):
            if weights:
                raise Invalid(
                    f"{self._name} returned one number, but reward.weights names components "
                    f"({', '.join(weights)}). Return a mapping of these names, or remove reward.weights"
                )
            return finite_number(result, self._name)
        values = checked_components(result, self._name)
        if unknown := [name for name in weights if name not in values]:
            raise Invalid(
                f"reward.weights.{unknown[0]}: {self._name} returned no such component "
                f"(returned: {', '.join(values)}). Correct the name in reward.weights or in the function"
            )
        total = sum(weights.get(name, 1.0) * value for name, value in values.items())
        return Components(reward=finite_number(total, self._name, " as weighted sum"), values=values)
