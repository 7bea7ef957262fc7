"""A user's reward function, inside a scoring process: loaded, called by parameter names, and its result checked.

The code of a file arrives as text, because actors on other hosts use the copy that is stored with the run.
"""

import asyncio
import inspect
import math
import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module
from numbers import Real
from pathlib import Path
from types import ModuleType
from typing import Any

from pipelinerl_core.ranges import COMPONENT_NAME, MAX_COMPONENTS, MAX_REWARD
from pipelinerl_core.rewards.verifiers import Components, Invalid

_TAKEN_NAMES = ("mean", "std")
"""Metrics reward/mean and reward/std describe the reward itself."""


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
        location, _, self._name = self._spec.function.rpartition(":")
        code = self._spec.code
        module = _imported(location) if code is None else _executed(Path(location).name, code)
        self.file = getattr(module, "__file__", "")
        self._function = _found(module, self._name)
        parameters = inspect.signature(self._function).parameters.values()
        if any(one.kind is one.POSITIONAL_ONLY for one in parameters):
            raise Invalid(f"{self._name} has positional-only parameters, but is called by parameter names")
        if inspect.iscoroutinefunction(self._function) and not self._spec.has_network:
            raise Invalid(f"{self._name} is async, which requires reward.network=true. Use `def`, or set the key")
        named = [one for one in parameters if one.kind in (one.POSITIONAL_OR_KEYWORD, one.KEYWORD_ONLY)]
        self._takes_all = any(one.kind is one.VAR_KEYWORD for one in parameters)
        self._optional = {one.name for one in named if one.default is not one.empty}
        self._required = [one.name for one in named if one.default is one.empty]

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
            return _number(result, self._name, "")
        if not 0 < len(result) <= MAX_COMPONENTS:
            raise Invalid(f"{self._name} returned {len(result)} components; return 1 to {MAX_COMPONENTS}")
        for name in result:
            if not isinstance(name, str) or not re.fullmatch(COMPONENT_NAME, name) or name in _TAKEN_NAMES:
                raise Invalid(
                    f"{self._name} returned a component named {str(name)[:50]!r}. Name components with up to 40 "
                    f"letters, digits, '_', '.' or '-', other than {' and '.join(_TAKEN_NAMES)}"
                )
        if unknown := [name for name in weights if name not in result]:
            raise Invalid(
                f"reward.weights.{unknown[0]}: {self._name} returned no such component "
                f"(returned: {', '.join(result)}). Correct the name in reward.weights or in the function"
            )
        values = {name: _number(value, self._name, f" for {name}") for name, value in result.items()}
        total = sum(weights.get(name, 1.0) * value for name, value in values.items())
        return Components(reward=_number(total, self._name, " as weighted sum"), values=values)


def _imported(location: str) -> ModuleType:
    try:
        return import_module(location)
    except ModuleNotFoundError as error:
        raise Invalid(
            f"no module named {error.name}. Install the module on every host that runs actors, or name a file: "
            "FILE.py:FUNCTION"
        ) from None


def _executed(file_name: str, code: str) -> ModuleType:
    """The module that a file's text defines. Tracebacks name the file."""
    module = ModuleType(f"reward_function_{Path(file_name).stem}")
    module.__file__ = file_name
    sys.modules[module.__name__] = module
    try:
        exec(compile(code, file_name, "exec"), module.__dict__)  # the user's own program
    except ModuleNotFoundError as error:
        raise Invalid(
            f"{file_name} imports {error.name}, which is not installed. The run stores {file_name} alone: install "
            "other modules on every host that runs actors"
        ) from None
    return module


def _found(module: ModuleType, name: str) -> Callable[..., Any]:
    found = getattr(module, name, None)
    if found is None:
        defined = [one for one, value in vars(module).items() if inspect.isfunction(value) and one[0] != "_"]
        raise Invalid(f"no function {name} there. Functions: {', '.join(sorted(defined)) or 'none'}")
    if not callable(found):
        raise Invalid(f"{name} is not callable, but has the type {type(found).__name__}. Name a function")
    return found  # type: ignore[no-any-return]


def _number(value: Any, function: str, part: str) -> float:
    """A finite number, also of numpy or torch; raises Invalid for anything else."""
    if not isinstance(value, Real) and getattr(value, "shape", None) == ():
        value = value.item()
    if not isinstance(value, Real):
        shown = "None (no `return`?)" if value is None else f"{type(value).__name__} {str(value)[:50]!r}"
        raise Invalid(f"{function} returned {shown}{part}, not a number")
    number = float(value)
    if not math.isfinite(number) or abs(number) > MAX_REWARD:
        raise Invalid(f"{function} returned {number}{part}; rewards are finite and within {MAX_REWARD:g} of 0")
    return number
