"""Evaluates an engine on sets of held-out prompts, for the evaluator and for an actor.

    prompts of a set, in order --slots--> completions --scorer--> rewards --> EvalRecord --> evals/<version>.json

The ledger does not count these tokens.
"""

import asyncio
import itertools
import logging
import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from pipelinerl_core.config import RunConfig
from pipelinerl_core.config.mixture import naming
from pipelinerl_core.environments.pool import build_environments
from pipelinerl_core.errors import EngineError, RewardError
from pipelinerl_core.interfaces import ChatCodec, Engine, Environments, Scorer
from pipelinerl_core.prompts import build_source
from pipelinerl_core.rewards.pool import build_scorer
from pipelinerl_core.roles.runtime.inference import build_chat, build_codec
from pipelinerl_core.rollouts.episode import EpisodePlayer
from pipelinerl_core.rollouts.group_scoring import GroupScoring
from pipelinerl_core.rollouts.progress import Progress
from pipelinerl_core.rollouts.runner import TextCodec, rollout_seed
from pipelinerl_core.run.context import RunContext
from pipelinerl_core.run.evaluations import evaluation_line, weighted_mean
from pipelinerl_core.run.reading import read_record
from pipelinerl_core.run.records import EvalRecord, eval_key
from pipelinerl_core.run.user_code import stored_code
from pipelinerl_core.telemetry.measures import confidence_interval
from pipelinerl_core.types import Completion, EngineRequest, Prompt, Sampler, Score

logger = logging.getLogger(__name__)

_GREEDY = -1
"""Number of the greedy completion of a prompt; the sampled completions are 0, 1, ..."""
_NUM_SHOWN = 12
_PROGRESS_SECONDS = 5.0


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class EvalSet:
    """The prompts of one set, and what encodes and scores them."""

    name: str
    """Name in eval.sets, or part of a mixture; empty: the run's own held-out prompts."""
    prompts: Sequence[Prompt]
    codec: TextCodec
    scorer: Scorer | None
    environments: Environments | None = None
    """Plays and scores the prompts as episodes; then scorer is None."""
    chat: ChatCodec | None = None
    """With environments."""

    async def close(self) -> None:
        """End the processes."""
        if self.scorer is not None:
            await self.scorer.close()
        if self.environments is not None:
            await self.environments.close()


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Answer:
    """One scored completion."""

    is_greedy: bool
    completion: Completion | None
    """None after an error of the engine."""
    text: str
    reward: Score | None
    error: str = ""
    """Why there is no reward."""


def build_set(config: RunConfig, name: str = "", code: str | None = None) -> EvalSet:
    """The held-out prompts of a configuration, as a set with this name. code: see `build_scorer`. Raises
    ConfigError."""
    environment = config.environment
    scorer = None if environment.path and not environment.is_judged else build_scorer(config, code=code)
    return EvalSet(
        name=name,
        prompts=build_source(config).held_out(config.eval.num_prompts),
        codec=build_codec(config),
        scorer=None if environment.path else scorer,
        environments=build_environments(config, code, scorer) if environment.path else None,
        chat=build_chat(config) if config.environment.path else None,
    )


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
        self._sets: list[tuple[EvalSet, RunConfig]] = []
        for name in config.eval.sets:
            of_set = config.with_set(name)
            self._sets.append((build_set(of_set, name, code), of_set))
        for name, part in config.parts.items():
            with naming(name):
                self._sets.append((build_set(part, name, stored_code(context, name)), part))
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
        for one, config in self._sets:
            record = await measure(
                self._engine, one, config, slots=self._slots, num_prompts=self._limit(one.name, num_prompts),
                max_seconds=max_seconds, report=self._report,
            )  # fmt: skip
            records.append(await self._write(record))
        if not self._config.mixture:
            return records[-1]
        weights = {name: part.weight for name, part in self._config.mixture.items()}
        return await self._write(weighted_mean([one for one in records if one.set in weights], weights))

    async def _write(self, record: EvalRecord) -> EvalRecord:
        record = record.model_copy(update={"newest_step": await asyncio.to_thread(self._newest_step)})
        data = record.model_dump_json().encode()
        await asyncio.to_thread(self._store.put, eval_key(record.version, record.set), data)
        logger.info("%s", evaluation_line(record))
        return record

    async def close(self) -> None:
        """End the scoring processes."""
        for one, _ in self._sets:
            await one.close()

    def _limit(self, name: str, num_prompts: int) -> int:
        first = eval_key(0, name)
        if self._engine.weight_version == 0 or not self._store.exists(first):
            return num_prompts
        return min(num_prompts, read_record(self._store, first, EvalRecord).num_prompts)


async def measure(
    engine: Engine,
    one: EvalSet,
    config: RunConfig,
    *,
    slots: int,
    num_prompts: int,
    max_seconds: float = math.inf,
    report: Callable[[str], None] = lambda progress: None,
) -> EvalRecord:
    """Evaluate the engine's version on the first `num_prompts` of a set; see `Evaluation`."""
    config = config.for_evaluation
    started, version = time.monotonic(), engine.weight_version
    prompts = one.prompts[:num_prompts]
    numbers = [*range(config.eval.samples), *([_GREEDY] if config.eval.greedy else [])]
    answers: dict[int, list[_Answer]] = {}
    waiting = iter(enumerate(prompts))

    if one.environments is not None and one.chat is not None:
        player = EpisodePlayer(engine, one.environments, one.chat, config)
        ask = partial(_episodes, player, one, config)
    else:
        ask = partial(_completions, engine, one, config)

    async def work() -> None:
        for index, prompt in itertools.takewhile(lambda _: time.monotonic() < started + max_seconds, waiting):
            answers[index] = await ask(prompt, index, numbers)

    async def show() -> None:
        what = f"version {version}{f' on {one.name}' if one.name else ''}"
        while True:
            await asyncio.sleep(_PROGRESS_SECONDS)
            report(f"evaluating {what}: {len(answers):,}/{len(prompts):,} prompts")

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
        set=one.name,
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
                "reference": str(prompt.task.get("answer", "")),
            }
            for prompt, given in list(zip(prompts, ordered, strict=False))[:_NUM_SHOWN]
        ),
    )


def _sampler(config: RunConfig, index: int, number: int) -> Sampler:
    # No lease has a negative group id.
    seed = 0 if number == _GREEDY else rollout_seed(config.seed, -1 - number, index)
    temperature = 0.0 if number == _GREEDY else config.rollouts.temperature
    return Sampler(seed=seed, temperature=temperature, top_p=config.rollouts.top_p)


def _request_id(one: EvalSet, index: int, number: int) -> str:
    return f"eval.{one.name}.{index}.{'greedy' if number == _GREEDY else number}"


async def _episodes(
    player: EpisodePlayer, one: EvalSet, config: RunConfig, prompt: Prompt, index: int, numbers: Sequence[int]
) -> list[_Answer]:
    group = player.group(prompt, len(numbers))
    episodes = [_episode(player, one, config, prompt, index, number, group, at) for at, number in enumerate(numbers)]
    return await asyncio.gather(*episodes)


async def _episode(
    player: EpisodePlayer, one: EvalSet, config: RunConfig, prompt: Prompt, index: int, number: int,
    group: GroupScoring, place: int,
) -> _Answer:  # fmt: skip
    sampler = _sampler(config, index, number)
    progress = Progress(group_id=0, rollout_index=0, attempt=0)
    episode = player.episode(progress, request_id=_request_id(one, index, number), sampler=sampler)
    reward, failure = None, ""
    try:
        reward = (await player.play(episode, prompt, sampler.seed, group, place)).score
    except (EngineError, RewardError) as error:
        failure = str(error)
        logger.warning("%s: %s", prompt.text, error)
    completion = progress.completion()
    text = one.codec.decode(completion.token_ids)
    return _Answer(is_greedy=number == _GREEDY, completion=completion, text=text, reward=reward, error=failure)


async def _completions(
    engine: Engine, one: EvalSet, config: RunConfig, prompt: Prompt, index: int, numbers: Sequence[int]
) -> list[_Answer]:
    return await asyncio.gather(*(_completion(engine, one, config, prompt, index, number) for number in numbers))


async def _completion(
    engine: Engine, one: EvalSet, config: RunConfig, prompt: Prompt, index: int, number: int
) -> _Answer:
    completion, text, reward, failure = None, "", None, ""
    try:
        request = EngineRequest(
            request_id=_request_id(one, index, number),
            prompt_token_ids=one.codec.encode(prompt),
            max_tokens=config.rollouts.max_tokens,
            sampler=_sampler(config, index, number),
        )
        async for chunk in engine.generate(request):
            completion = chunk.completion
        if completion is not None:
            text = one.codec.decode(completion.token_ids)
            assert one.scorer is not None
            reward = await one.scorer.score(prompt, text, completion)
    except (EngineError, RewardError) as error:
        failure = str(error)
        logger.warning("%s: %s", prompt.prompt_id, error)
    return _Answer(is_greedy=number == _GREEDY, completion=completion, text=text, reward=reward, error=failure)


def _figures(answers: Sequence[Sequence[_Answer]]) -> dict[str, Any]:
    """The fields of an EvalRecord that follow from the answers to each prompt."""
    sampled = [[one for one in given if not one.is_greedy] for given in answers]
    rewards = [values for given in sampled if (values := _rewards(given))]
    means_P = np.array([np.mean(values) for values in rewards])
    low, high = confidence_interval(means_P) if rewards else (None, None)
    greedy = _rewards(one for given in answers for one in given if one.is_greedy)
    flat = [one for given in sampled for one in given]
    completions = [one.completion for one in flat if one.completion is not None]
    components: dict[str, list[float]] = {}
    for component in (part for one in flat if one.reward is not None for part in one.reward.components):
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
        "mean_tokens": float(np.mean([len(one.token_ids) for one in completions])) if completions else 0.0,
        "errors": sum(one.reward is None for given in answers for one in given),
        "error": next((one.error for given in answers for one in given if one.reward is None), ""),
        "last_version": max((one.weight_spans[-1].version for one in completions if one.weight_spans), default=-1),
    }


def _rewards(answers: Iterable[_Answer]) -> list[float]:
    return [float(one.reward) for one in answers if one.reward is not None]
