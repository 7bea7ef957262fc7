"""Prompts from the procedural tasks of the reasoning-gym library."""

import difflib
import random
import sys
from collections.abc import Mapping
from functools import lru_cache, partial
from typing import Any

from reasoning_gym.factory import DATASETS, create_dataset

from pipelinerl_core.config.prompts import ReasoningGymPrompts
from pipelinerl_core.config.run import RunConfig
from pipelinerl_core.config.verifier import verifier_name
from pipelinerl_core.errors import ConfigError
from pipelinerl_core.gym.options import TaskOptions, dataset_options, options_of, options_text
from pipelinerl_core.gym.tasks import COMPOSITE, check_task, scored_tasks
from pipelinerl_core.prompts.split import GENERATED_SHARE, is_held_out, prompt_id, stable_seed
from pipelinerl_core.types import Prompt

NAME = "reasoning_gym"

INSTRUCTION = "\nGive the final answer between <answer> and </answer>."

PAGE_ENTRIES = 500
"""Entries generated from one seed: the library's default size, with which all tasks work."""

MAX_DRAWS = 200
"""Draws per training prompt. A share of 0.2 is held out; a task whose draws are all held out has too few entries."""

MAX_HELD_OUT_DRAWS = 20
"""Draws per held-out prompt (5 are expected); a task with few entries then has fewer held-out prompts."""

HASH_SEEDED = {"isomorphic_strings", "knight_swap", "polynomial_multiplication", "ransom_note", "word_ladder"}
"""Tasks whose entries depend on the order of sets of strings, which differs between processes (library 0.1.25)."""


def build(config: RunConfig) -> "GymSource":
    """The source of a configuration; raises ConfigError if a task is unknown or unusable."""
    assert isinstance(config.prompts, ReasoningGymPrompts)
    given = {task: options_of(config.prompts, task) for task in config.prompts.tasks}
    options = {task: _check(task, given[task]) for task in given}
    scored_tasks(config)
    return GymSource(config.prompts.tasks, config.seed, verifier_name(config), options)


class GymSource:
    """Endless entries of one or several tasks; the position determines task, seed and entry."""

    name = NAME
    generates = True

    def __init__(self, tasks: tuple[str, ...], seed: int, env: str, options: Mapping[str, Mapping[str, Any]]) -> None:
        """`tasks` are names of the library, drawn uniformly; options: of their data sets, by task."""
        self._page = lru_cache(maxsize=256)(partial(_page, options))
        self._tasks = tasks
        self._seed = seed
        self._env = env

    def prompt(self, index: int) -> Prompt:
        """The entry at a position of the training sequence; never a held-out one."""
        rng = random.Random(stable_seed(self._seed, NAME, index))
        task = rng.choice(self._tasks)
        for draw in range(MAX_DRAWS):
            prompt = self._entry(task, index, self._seed, draw)
            if not is_held_out(prompt.prompt_id, GENERATED_SHARE):
                return prompt
        raise ConfigError(f"prompts.tasks={task}: all of {MAX_DRAWS} draws were held out. Choose another task")

    def held_out(self, count: int) -> list[Prompt]:
        """`count` different held-out entries, the same for every seed; fewer if the draws have fewer."""
        rng = random.Random(stable_seed(NAME, "held_out"))
        prompts: dict[str, Prompt] = {}
        for index in range(MAX_HELD_OUT_DRAWS * (count + 1)):
            if len(prompts) == count:
                break
            prompt = self._entry(rng.choice(self._tasks), index, "held_out", 0)
            if is_held_out(prompt.prompt_id, GENERATED_SHARE):
                prompts.setdefault(prompt.prompt_id, prompt)
        if count and not prompts:
            raise ConfigError(f"prompts.tasks={', '.join(self._tasks)}: too few entries to hold any out. Add a task")
        return list(prompts.values())

    def _entry(self, task: str, index: int, stream: object, draw: int) -> Prompt:
        number, position = divmod(index, PAGE_ENTRIES)
        entry = self._page(task, stable_seed(stream, NAME, number, draw) % 2**31)[position]
        text = entry["question"] + INSTRUCTION
        return Prompt(
            prompt_id=prompt_id(NAME, text),
            source=NAME,
            env=self._env,
            text=text,
            task={"task": task, "answer": entry["answer"], "metadata": with_tagged_tuples(entry["metadata"])},
        )


def _page(options: Mapping[str, Mapping[str, Any]], task: str, seed: int) -> Any:
    """The library's data set of PAGE_ENTRIES entries for one seed."""
    return create_dataset(task, seed=seed, size=PAGE_ENTRIES, **options[task])


def with_tagged_tuples(value: Any) -> Any:
    """A copy with {"__tuple__": [...]} for tuples: JSON has no tuples, and some verifiers compare with tuples."""
    if isinstance(value, tuple):
        return {"__tuple__": [with_tagged_tuples(item) for item in value]}
    if isinstance(value, list):
        return [with_tagged_tuples(item) for item in value]
    if isinstance(value, dict):
        return {key: with_tagged_tuples(item) for key, item in value.items()}
    return value


def _check(task: str, given: TaskOptions) -> dict[str, Any]:
    """The options of the task's data set. Raises ConfigError if the task is unknown or unusable."""
    if task not in DATASETS:
        close = difflib.get_close_matches(task, DATASETS, n=1, cutoff=0)[0]
        raise ConfigError(f"prompts.tasks={task}: reasoning-gym has no such task; did you mean {close}?")
    check_task(task)
    options = dataset_options(task, given)
    names = {task, *(part.name for part in options.get("datasets") or () if task == COMPOSITE)}
    if names & HASH_SEEDED and sys.flags.hash_randomization:
        raise ConfigError(
            f"prompts.tasks={task}: its entries depend on Python's hash seed, which differs between processes. "
            "Set PYTHONHASHSEED=0 in the environment or leave the task out"
        )
    try:
        create_dataset(task, seed=0, size=PAGE_ENTRIES, **options)[0]
    except Exception as error:  # noqa: BLE001  (a task of the library may raise any error)
        reason = (str(error).splitlines() or [""])[0]
        if options:
            raise ConfigError(
                f"prompts.options.{task}: reasoning-gym refuses these options: {type(error).__name__}: {reason}. "
                f"{options_text(task)}"
            ) from None
        raise ConfigError(
            f"prompts.tasks={task}: reasoning-gym cannot make an entry: {type(error).__name__}: {reason}. "
            "Remove the task"
        ) from None
    return options
