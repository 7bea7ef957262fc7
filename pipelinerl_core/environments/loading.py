"""A user's environment inside its process: the class is loaded and checked, its results are checked."""

import inspect
import json
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from pipelinerl_core.environments.api import Ask, json_text
from pipelinerl_core.sandbox.user_code import Invalid, checked_components, finite_number, is_component, keywords, load


class UserEnvironment:
    """An instance of the user's class; all episodes of the process share the instance."""

    def __init__(self, path: str, code: str | None, options: Mapping[str, Any], weights: Mapping[str, float]) -> None:
        """Load and construct the class of environment.path; raises Invalid, or any exception of the loaded code.

        code: text of the file; None for a module. weights: replace weights of the class by name.
        """
        loaded, self.file = load(path, code, "class")
        self._name = path.rpartition(":")[2]
        if not inspect.isclass(loaded):
            raise Invalid(f"{self._name} is not a class, but has the type {type(loaded).__name__}. Name a class")
        self._check_options(loaded, options)
        self._instance: Any = loaded(**options)
        self.weights = self._checked_weights(weights)
        self.note = str(getattr(self._instance, "note", ""))[:500]
        self._play = self._method("play", "task", "ask", "seed")
        self.scores_groups = hasattr(loaded, "score_group")
        if self.scores_groups and hasattr(loaded, "score"):
            raise Invalid(f"{self._name} has both score and score_group. Write one of them")
        name, parameter = ("score_group", "transcripts") if self.scores_groups else ("score", "transcript")
        self._score = self._method(name, "task", parameter)
        if not inspect.iscoroutinefunction(self._play):
            raise Invalid(f"{self._name}.play is not async. Write `async def play(self, task, ask, seed)`")
        self.has_tasks = hasattr(loaded, "task")
        if self.has_tasks != hasattr(loaded, "held_out"):
            there, missing = ("task", "held_out") if self.has_tasks else ("held_out", "task")
            raise Invalid(f"{self._name} has {there}, but no {missing}. Write both, or neither to use prompts.*")
        self._held_out: dict[int, list[Any]] = {}
        if self.has_tasks:
            for name, parameter in (("task", "index"), ("held_out", "count")):
                if inspect.iscoroutinefunction(self._method(name, parameter)):
                    raise Invalid(f"{self._name}.{name} is async. Write `def {name}(self, {parameter})`")

    def task(self, request: Mapping[str, Any]) -> str:
        """The task of an episode as JSON. Raises Invalid, or any exception of the environment.

        request: the row of a prompt; or with the class's own tasks {"index": i} or {"held_out": i, "of": count}.
        """
        if not self.has_tasks:
            return json_text(request, is_sorted=False)
        if "index" in request:
            return self._json(self._instance.task(request["index"]), "task")
        count = request["of"]
        if count not in self._held_out:
            self._held_out[count] = self._checked_tasks(self._instance.held_out(count), count)
        return self._json(self._held_out[count][request["held_out"]], "held_out")

    async def play(self, task: str, ask: Ask, seed: int) -> str:
        """Play one episode; returns its transcript as JSON."""
        return self._json(await self._play(json.loads(task), ask, seed), "play")

    async def score(self, task: str, transcript: str, num_turns: int) -> tuple[dict[str, float], list[float]]:
        """The components of an episode's reward, all finite, and the weighted parts of single turns.

        Each name of `weights` is there. A component of the environment may be a list with a number for each of the
        `num_turns` turns; its value is the sum. Without such a component the second list is empty.
        """
        result = await _awaited(self._score(json.loads(task), json.loads(transcript)))
        return self._scored(result, num_turns)

    async def score_group(
        self, task: str, transcripts: Sequence[Any], nums_turns: Sequence[int]
    ) -> list[tuple[dict[str, float], list[float]]]:
        """For each transcript of a group what `score` returns for one; nums_turns: turns of the episodes."""
        results = await _awaited(self._score(json.loads(task), transcripts))
        if not isinstance(results, list) or len(results) != len(transcripts):
            shown = (
                f"{len(results)} results" if isinstance(results, list) else f"{type(results).__name__}, not a list"
            )
            raise Invalid(f"score_group returned {shown} for {len(transcripts)} transcripts{_place(self._score)}")
        return [self._scored(result, num) for result, num in zip(results, nums_turns, strict=True)]

    def _scored(self, result: Any, num_turns: int) -> tuple[dict[str, float], list[float]]:
        name = "score_group" if self.scores_groups else "score"
        try:
            if not isinstance(result, Mapping):
                shown = "None (no `return`?)" if result is None else f"{type(result).__name__} {str(result)[:50]!r}"
                raise Invalid(f"{name} returned {shown}, not a mapping of component names to numbers")
            summed, turn_rewards = _by_turn(result, self.weights, num_turns, name)
            return weighted_components(summed, self.weights, name)[1], turn_rewards
        except Invalid as error:
            raise Invalid(f"{error}{_place(self._score)}") from None

    def _check_options(self, environment_class: type, options: Mapping[str, Any]) -> None:
        is_required, takes_all = keywords(environment_class)
        if unknown := [name for name in options if name not in is_required and not takes_all]:
            raise Invalid(
                f"environment.options.{unknown[0]}: {self._name} has no such option. "
                f"Options: {', '.join(is_required) or 'none'}"
            )
        if missing := [name for name, required in is_required.items() if required and name not in options]:
            raise Invalid(f"environment.options.{missing[0]} is not set, but {self._name} requires this option")

    def _checked_weights(self, replaced: Mapping[str, float]) -> dict[str, float]:
        weights = getattr(self._instance, "weights", None)
        if not isinstance(weights, Mapping) or not weights or not all(is_component(name) for name in weights):
            raise Invalid(
                f"{self._name}.weights is {str(weights)[:60]}, not a mapping of component names to numbers, for "
                'example {"solved": 1.0}'
            )
        if unknown := [name for name in replaced if name not in weights]:
            raise Invalid(
                f"reward.weights.{unknown[0]}: {self._name}.weights names no such component "
                f"(weights: {', '.join(weights)})"
            )
        try:
            return checked_components({**weights, **replaced}, f"{self._name}.weights")
        except Invalid as error:
            raise Invalid(str(error).replace(" returned ", " has ")) from None

    def _method(self, name: str, *parameters: str) -> Callable[..., Any]:
        method = getattr(self._instance, name, None)
        if not callable(method):
            raise Invalid(f"{self._name} has no method {name}({', '.join(('self', *parameters))})")
        try:
            inspect.signature(method).bind(*parameters)
        except TypeError as error:
            raise Invalid(
                f"{self._name}.{name} is called with ({', '.join(parameters)}): {error}{_place(method)}"
            ) from None
        return method  # type: ignore[no-any-return]

    def _checked_tasks(self, tasks: Any, count: int) -> list[Any]:
        if not isinstance(tasks, list):
            raise Invalid(f"held_out returned {type(tasks).__name__}, not a list{_place(self._instance.held_out)}")
        if len(tasks) < count:
            raise Invalid(
                f"held_out({count}) returned {len(tasks)} tasks. Set eval.num_prompts to at most {len(tasks)}"
            )
        return tasks

    def _json(self, value: Any, name: str) -> str:
        try:
            return json_text(value, is_sorted=False)
        except (TypeError, ValueError, RecursionError) as error:
            place = _place(getattr(self._instance, name))
            raise Invalid(f"{name} returned {type(value).__name__} that is not JSON: {error}{place}") from None


async def _awaited(result: Any) -> Any:
    return await result if inspect.isawaitable(result) else result


def weighted_components(
    result: Mapping[Any, Any], weights: Mapping[str, float], method: str = "score"
) -> tuple[float, dict[str, float]]:
    """The reward and its components; components without a weight are metrics. Raises Invalid."""
    components = checked_components(result, method)
    if missing := [name for name in weights if name not in components]:
        raise Invalid(f"{method} returned no {missing[0]}, which weights names (returned: {', '.join(components)})")
    total = sum(weight * components[name] for name, weight in weights.items())
    return finite_number(total, method, " as weighted sum"), components


def _by_turn(
    result: Mapping[Any, Any], weights: Mapping[str, float], num_turns: int, method: str
) -> tuple[dict[Any, Any], list[float]]:
    """The components with the sums of lists, and for each turn the weighted sum of the lists' numbers."""
    summed, turn_rewards = dict(result), list[float]()
    for name, values in result.items():
        if not isinstance(values, list | tuple):
            continue
        if len(values) != num_turns:
            raise Invalid(f"{method} returned {len(values)} numbers for {name}; the episode has {num_turns} turns")
        numbers = [finite_number(value, method, f" for {name}") for value in values]
        summed[name] = sum(numbers)
        turn_rewards = turn_rewards or [0.0] * num_turns
        for turn, number in enumerate(numbers):
            turn_rewards[turn] += weights.get(name, 0.0) * number
    return summed, turn_rewards


def _place(method: Callable[..., Any]) -> str:
    """Where a method is defined, in brackets after a space; empty if unknown."""
    code = getattr(inspect.unwrap(method), "__code__", None)
    return f" ({os.path.basename(code.co_filename)}:{code.co_firstlineno})" if code is not None else ""
