"""Evaluates an engine on sets of held-out prompts, for the evaluator and for an actor.

    prompts of a set, in order --slots--> completions --scorer--> rewards --> EvalRecord --> evals/<version>.json

The ledger does not count these tokens.
"""

import asyncio
import itertools
import logging
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from pipelinerl_core.config import RunConfig
from pipelinerl_core.config.mixture import naming
from pipelinerl_core.errors import ConfigError, EngineError
from pipelinerl_core.interfaces import Engine
from pipelinerl_core.prompts import build_source
from pipelinerl_core.roles.runtime.task import Task, build_task
from pipelinerl_core.rollouts.player import PROMPT_ERROR, Sample, Sampled
from pipelinerl_core.rollouts.progress import Progress
from pipelinerl_core.rollouts.runner import rollout_seed
from pipelinerl_core.rollouts.task_columns import answer_text, task_columns, task_text
from pipelinerl_core.run.context import RunContext
from pipelinerl_core.run.evaluations import evaluation_line, weighted_mean
from pipelinerl_core.run.reading import read_record
from pipelinerl_core.run.records import EvalRecord, eval_key
from pipelinerl_core.run.user_code import stored_code
from pipelinerl_core.telemetry.measures import confidence_interval
from pipelinerl_core.types import Completion, Int32Array, Prompt, RewardComponent, Sampler

logger = logging.getLogger(__name__)

_GREEDY = -1
"""Number of the greedy completion of a prompt; the sampled completions are 0, 1, ..."""
_NUM_SHOWN = 12
_PROGRESS_SECONDS = 5.0
_FIRST_PROMPTS = 8
"""If no answer to the first prompts of a run's first evaluation has a reward, the run ends."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class EvalSet:
    """The prompts of one set, and what encodes and scores them."""

    name: str
    """Name in eval.sets, or part of a mixture; empty: the run's own held-out prompts."""
    prompts: Sequence[Prompt]
    task: Task


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Answer:
    """One scored completion."""

    is_greedy: bool
    completion: Completion | None = None
    """None without a token."""
    text: str = ""
    reward: float | None = None
    components: tuple[RewardComponent, ...] = ()
    error: str = ""
    """Why there is no reward."""
    shown: Mapping[str, Any] = field(default_factory=dict)
    """Of an episode, fields of its sample (EvalRecord.samples) that replace those of the prompt."""


def build_set(config: RunConfig, name: str = "", code: str | None = None) -> EvalSet:
    """The held-out prompts of a configuration, as a set with this name. code: see `build_scorer`. Raises
    ConfigError."""
    prompts = build_source(config).held_out(config.eval.num_prompts)
    return EvalSet(name=name, prompts=prompts, task=build_task(config, code))


class Evaluation:
    """Evaluates the weights of one engine on all sets of a run and writes the records; one evaluation at a time."""

    def __init__(
        self,
        context: RunContext,
        engine: Engine,
        *,
        slots: int,
        newest_step: Callable[[], int],
        report: Callable[[str], None] = lambda progress: None,
    ) -> None:
        """slots: sequences that an evaluation may have in the engine at once. newest_step: newest committed step.

        report: called every few seconds with a line of progress. Raises ConfigError.
        """
        self._config = context.config
        self._store = context.store
        self._engine = engine
        config, code = context.config, stored_code(context)
        self._sets = [build_set(config.with_set(name), name, code) for name in config.eval.sets]
        for name, part in config.parts.items():
            with naming(name):
                self._sets.append(build_set(part, name, stored_code(context, name)))
        self._slots = slots
        self._newest_step = newest_step
        self._report = report

    async def run(self, num_prompts: int, max_seconds: float = math.inf) -> EvalRecord:
        """Evaluate the engine's version on the first `num_prompts` of each set, and write the records.

        max_seconds: after this time, no further prompt of a set is taken. Later evaluations take at most the prompts
        that the evaluation of version 0 has taken. Returns the record of the run's own prompts, which is written
        last: if this record exists, the records of all sets exist. With a mixture, each part is a set, and the
        record of the run is the weighted mean of the parts.
        """
        records: list[EvalRecord] = []
        for held_out in self._sets:
            limit = await asyncio.to_thread(self._limit, held_out.name, num_prompts)
            record = await measure(
                self._engine, held_out, slots=self._slots, num_prompts=limit, max_seconds=max_seconds,
                report=self._report,
            )  # fmt: skip
            records.append(await self._write(record))
        if not self._config.mixture:
            return records[-1]
        weights = {name: part.weight for name, part in self._config.mixture.items()}
        return await self._write(weighted_mean([record for record in records if record.set in weights], weights))

    async def _write(self, record: EvalRecord) -> EvalRecord:
        record = record.model_copy(update={"newest_step": await asyncio.to_thread(self._newest_step)})
        data = record.model_dump_json().encode()
        await asyncio.to_thread(self._store.put, eval_key(record.version, record.set), data)
        logger.info("%s", evaluation_line(record))
        return record

    async def close(self) -> None:
        """End the scoring processes."""
        for held_out in self._sets:
            await held_out.task.close()

    def _limit(self, name: str, num_prompts: int) -> int:
        first = eval_key(0, name)
        if self._engine.weight_version == 0 or not self._store.exists(first):
            return num_prompts
        return min(num_prompts, read_record(self._store, first, EvalRecord).num_prompts)


async def measure(
    engine: Engine,
    held_out: EvalSet,
    *,
    slots: int,
    num_prompts: int,
    max_seconds: float = math.inf,
    report: Callable[[str], None] = lambda progress: None,
) -> EvalRecord:
    """Evaluate the engine's version on the first `num_prompts` of a set; see `Evaluation`.

    Raises EngineError, in a group, if the engine ends for good meanwhile.
    """
    config = held_out.task.config.for_evaluation
    player = replace(held_out.task, config=config).player(engine)
    started, version = time.monotonic(), engine.weight_version
    prompts = held_out.prompts[:num_prompts]
    numbers = [*range(config.eval.samples), *([_GREEDY] if config.eval.greedy else [])]
    answers: dict[int, list[_Answer]] = {}
    waiting = iter(enumerate(prompts))

    async def work() -> None:
        for index, prompt in itertools.takewhile(lambda _: time.monotonic() < started + max_seconds, waiting):
            sample = player.begin(prompt, len(numbers))
            rollouts = (
                _answer(held_out, sample, config, index, place, number) for place, number in enumerate(numbers)
            )
            answers[index] = await asyncio.gather(*rollouts)
            if failure := getattr(engine, "failure", ""):  # not the model's errors: another engine evaluates again
                raise EngineError(failure)
            if version == 0 and len(answers) == min(_FIRST_PROMPTS, len(prompts)):
                _require_rewards(answers.values(), held_out.name)

    async def show() -> None:
        shown = f"version {version}{f' on {held_out.name}' if held_out.name else ''}"
        while True:
            await asyncio.sleep(_PROGRESS_SECONDS)
            report(f"evaluating {shown}: {len(answers):,}/{len(prompts):,} prompts")

    shower = asyncio.create_task(show())
    try:
        async with asyncio.TaskGroup() as tasks:
            for _ in range(max(1, slots // len(numbers))):
                tasks.create_task(work())
    finally:
        shower.cancel()
        report("")
    ordered = [answers[index] for index in sorted(answers)]
    return EvalRecord(
        version=version,
        set=held_out.name,
        num_samples=config.eval.samples,
        temperature=config.rollouts.temperature,
        top_p=config.rollouts.top_p,
        **_figures(ordered),
        seconds=time.monotonic() - started,
        finished_at=time.time(),
        samples=tuple(
            {
                "prompt": prompt.text,
                "completion": given[0].text,
                "reward": given[0].reward,
                "reference": answer_text(prompt.task),
                "task": task_columns(task_text(prompt.task)),
                **given[0].shown,
            }
            for prompt, given in list(zip(prompts, ordered, strict=False))[:_NUM_SHOWN]
        ),
    )


def _require_rewards(answers: Iterable[Sequence[_Answer]], name: str) -> None:
    """Raises ConfigError if no answer has a reward; answers to prompts that cannot be used do not matter."""
    flat = [answer for given in answers for answer in given if not (answer.error or "").startswith(PROMPT_ERROR)]
    if flat and not any(answer.reward is not None for answer in flat):
        where = f" of the set {name}" if name else ""
        raise ConfigError(
            f"the first evaluation{where} has no reward: all of its first {len(flat)} rollouts failed; first: "
            f"{flat[0].error}. Correct the cause and start a new run"
        )


def _sampler(config: RunConfig, index: int, number: int) -> Sampler:
    # No lease has a negative group id.
    seed = 0 if number == _GREEDY else rollout_seed(config.seed, -1 - number, index)
    temperature = 0.0 if number == _GREEDY else config.rollouts.temperature
    return Sampler(seed=seed, temperature=temperature, top_p=config.rollouts.top_p)


async def _answer(
    held_out: EvalSet, sample: Sample, config: RunConfig, index: int, place: int, number: int
) -> _Answer:
    """The completion `number` of the prompt `index`; place: its position among the completions of the prompt."""
    name = f"eval.{held_out.name}.{index}.{'greedy' if number == _GREEDY else number}"
    progress = Progress(group_id=0, rollout_index=0, attempt=0)
    sampled = await sample(place, name, _sampler(config, index, number), progress)
    if sampled.error is not None:
        logger.warning("%s: %s", name, sampled.error)
    return _Answer(
        is_greedy=number == _GREEDY,
        completion=sampled.completion if len(sampled.completion.token_ids) else None,
        text=held_out.task.codec.decode(sampled.completion.token_ids),
        reward=progress.reward if sampled.error is None else None,
        components=progress.reward_components if sampled.error is None else (),
        error=sampled.error or "",
        shown=_shown(sampled, held_out.task.codec.decode) if held_out.task.config.environment.path else {},
    )


def _shown(sampled: Sampled, decode: Callable[[Int32Array], str]) -> dict[str, Any]:
    """What the sample of an episode shows: its first messages as tokens, the environment's task, and its turns."""
    ids, rewards = sampled.completion.token_ids, sampled.turn_rewards or itertools.repeat(None)
    ends = itertools.accumulate((turn.end for turn in sampled.turn_spans), lambda _, end: end, initial=0)
    turns = [
        {"given": decode(ids[before : turn.start]), "text": decode(ids[turn.start : turn.end]), "reward": reward}
        for before, turn, reward in zip(ends, sampled.turn_spans, rewards, strict=False)
    ]
    shown: dict[str, Any] = {"prompt": decode(sampled.prompt_token_ids)} | ({"turns": turns} if turns else {})
    if sampled.task:
        columns = task_columns(sampled.task)
        shown |= {"task": columns, "reference": answer_text(columns)}
    return shown


def _figures(answers: Sequence[Sequence[_Answer]]) -> dict[str, Any]:
    """The fields of an EvalRecord that follow from the answers to each prompt."""
    sampled = [[answer for answer in given if not answer.is_greedy] for given in answers]
    rewards = [values for given in sampled if (values := _rewards(given))]
    means_P = np.array([np.mean(values) for values in rewards])
    low, high = confidence_interval(means_P) if rewards else (None, None)
    greedy = _rewards(answer for given in answers for answer in given if answer.is_greedy)
    flat = [answer for given in sampled for answer in given]
    completions = [answer.completion for answer in flat if answer.completion is not None]
    lengths = [len(completion.token_ids) for completion in completions]
    components: dict[str, list[float]] = {}
    for component in (part for answer in flat for part in answer.components):
        components.setdefault(component.name, []).append(component.value)
    return {
        "num_prompts": len(answers),
        "accuracy": float(means_P.mean()) if rewards else 0.0,
        "low": low,
        "high": high,
        "best": float(np.mean([max(values) for values in rewards]))
        if max(map(len, sampled), default=0) > 1
        else None,
        "greedy": float(np.mean(greedy)) if greedy else None,
        "components": {name: float(np.mean(values)) for name, values in components.items()},
        "mean_tokens": float(np.mean(lengths)) if lengths else 0.0,
        "errors": sum(answer.reward is None for given in answers for answer in given),
        "error": next((answer.error for given in answers for answer in given if answer.reward is None), ""),
        "last_version": max((completion.weight_spans[-1].version for completion in completions), default=-1),
    }


def _rewards(answers: Iterable[_Answer]) -> list[float]:
    return [float(answer.reward) for answer in answers if answer.reward is not None]
