"""Sample and score the rollouts of a leased group, one asyncio task per rollout.

    lease --encode--> group_size x EngineRequest --engine--> Completion --decode, score--> Rollout --> group
    lease --environment--> group_size x Episode --engine, environment--> turns, score ---> Rollout --> group

A failed scoring is data: outcome `error`, reward None. The other rollouts of the group go on.
"""

import asyncio
import hashlib
import logging
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass

import numpy as np

from pipelinerl_core.config import RunConfig
from pipelinerl_core.errors import EngineError, EnvironmentTimeout, RewardError
from pipelinerl_core.interfaces import Engine, Scorer
from pipelinerl_core.messages import Lease
from pipelinerl_core.rollouts.episode import EpisodePlayer
from pipelinerl_core.rollouts.progress import Progress
from pipelinerl_core.types import (
    BoolArray,
    Completion,
    EngineRequest,
    FinishReason,
    Int32Array,
    Outcome,
    PartialRow,
    Played,
    Prompt,
    Rollout,
    Sampler,
    Score,
    TurnSpan,
)

logger = logging.getLogger(__name__)


def rollout_seed(seed: int, group_id: int, rollout_index: int) -> int:
    """Seed of one rollout's noise: a function of the run's seed, the group and the rollout's index only."""
    digest = hashlib.blake2b(f"{seed}/{group_id}/{rollout_index}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


@dataclass(frozen=True, slots=True, kw_only=True)
class TextCodec:
    """The functions of the tokenizer that rollouts need."""

    encode: Callable[[Prompt], Int32Array]
    decode: Callable[[Int32Array], str]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Sampled:
    """The tokens of a rollout."""

    prompt_token_ids: Int32Array
    completion: Completion
    loss_mask: BoolArray
    turn_spans: tuple[TurnSpan, ...] = ()
    turn_rewards: tuple[float, ...] = ()


class GroupRunner:
    """Turns leases into finished groups on one engine."""

    def __init__(
        self,
        engine: Engine,
        scorer: Scorer | None,
        codec: TextCodec,
        config: RunConfig,
        *,
        actor: str,
        player: EpisodePlayer | None = None,
    ) -> None:
        """player: plays the rollouts as episodes of the run's environment, which scores them; then scorer is None."""
        self._engine = engine
        self._scorer = scorer
        self._codec = codec
        self._config = config
        self._actor = actor
        self._player = player
        self._open: dict[tuple[int, int], list[Progress]] = {}

    async def run(self, lease: Lease, restored: Mapping[int, PartialRow] | None = None) -> list[Rollout]:
        """All rollouts of a lease, by rollout_index. Cancelling the call aborts the sequences.

        restored: rollout_index -> the logged part, from previous holders; the rest is sampled and scored.
        """
        known = restored or {}
        progress = [
            Progress(group_id=lease.group_id, rollout_index=index, attempt=lease.attempt, restored=known.get(index))
            for index in range(lease.group_size)
        ]
        self._open[lease.group_id, lease.attempt] = progress
        sample = self._single_turn(lease.prompt) if self._player is None else self._episodes(lease, self._player)
        try:
            async with asyncio.TaskGroup() as tasks:
                rollouts = [
                    tasks.create_task(self._rollout(lease, index, progress[index], sample))
                    for index in range(lease.group_size)
                ]
        except BaseException:
            self.forget([(lease.group_id, lease.attempt)])
            raise
        return [task.result() for task in rollouts]

    def growth(self) -> list[PartialRow]:
        """The parts of all open groups that are new since the last call, for the write-ahead log."""
        rows = (progress.growth() for group in self._open.values() for progress in group)
        return [row for row in rows if row is not None]

    def forget(self, keys: Iterable[tuple[int, int]]) -> None:
        """Drop groups, (group_id, attempt), that are in a segment or no longer leased to this actor."""
        for key in keys:
            self._open.pop(key, None)

    async def _rollout(self, lease: Lease, index: int, progress: Progress, sample: "_Sample") -> Rollout:
        limits = self._config.rollouts
        sampler = Sampler(
            temperature=limits.temperature,
            top_p=limits.top_p,
            seed=rollout_seed(self._config.seed, lease.group_id, index),
        )
        started_at = time.time()
        sampled, finished_at, error = await sample(lease, index, sampler, progress)
        reward = progress.reward
        completion = sampled.completion
        return Rollout(
            group_id=lease.group_id,
            rollout_index=index,
            attempt=lease.attempt,
            lease_id=lease.lease_id,
            prompt_id=lease.prompt.prompt_id,
            source=lease.prompt.source,
            env=lease.prompt.env,
            actor=self._actor,
            group_size=lease.group_size,
            prompt_token_ids=sampled.prompt_token_ids,
            completion_token_ids=completion.token_ids,
            rollout_logprobs=completion.rollout_logprobs,
            weight_spans=completion.weight_spans,
            loss_mask=sampled.loss_mask,
            turn_spans=sampled.turn_spans,
            turn_rewards=sampled.turn_rewards if reward is not None else (),
            reward=reward,
            outcome=Outcome.SCORED if reward is not None else Outcome.ERROR,
            finish_reason=completion.finish_reason or FinishReason.ABORT,
            error=error,
            sampler=sampler,
            max_tokens=limits.max_tokens,
            started_at=started_at,
            finished_at=finished_at,
            scored_at=time.time(),
            origins=progress.origins if len(completion.token_ids) else (),
            reward_components=progress.reward_components if reward is not None else (),
        )

    # ---- one turn ------------------------------------------------------------------------------------------------

    def _single_turn(self, prompt: Prompt) -> "_Sample":
        """Samples and scores one completion of the prompt."""
        prompt_token_ids = self._codec.encode(prompt)
        scorer = self._scorer
        assert scorer is not None

        async def sample(lease: Lease, index: int, sampler: Sampler, progress: Progress) -> _Result:
            request = EngineRequest(
                request_id=f"{lease.lease_id}.{index}",
                prompt_token_ids=prompt_token_ids,
                max_tokens=self._config.rollouts.max_tokens,
                sampler=sampler,
                prior=progress.completion() if progress.num_tokens else None,
            )
            completion, error, finished_at = _empty_completion(), None, time.time()
            try:
                completion = await self._complete(request, progress)
                finished_at = time.time()
                if progress.outcome is None:
                    text = self._codec.decode(completion.token_ids)
                    progress.score(await scorer.score(prompt, text, completion))
            except EngineError as failure:
                finished_at, error = time.time(), f"engine: {failure}"
            except RewardError as failure:
                error = f"reward: {failure}"
                progress.score(None)
            mask = np.ones(len(completion.token_ids), np.bool_)
            sampled = _Sampled(prompt_token_ids=prompt_token_ids, completion=completion, loss_mask=mask)
            return sampled, finished_at, error

        return sample

    async def _complete(self, request: EngineRequest, progress: Progress) -> Completion:
        if progress.finish_reason is not None:  # the log of the previous holder has all of it
            return progress.completion()
        async for chunk in self._engine.generate(request):
            progress.add(chunk)
            if chunk.completion is not None:
                progress.finish(chunk.completion.finish_reason or FinishReason.ABORT)
                return chunk.completion
        raise EngineError(f"request {request.request_id} ended without a completion")

    # ---- episodes ------------------------------------------------------------------------------------------------

    def _episodes(self, lease: Lease, player: EpisodePlayer) -> "_Sample":
        """Plays and scores one episode of the group; nothing is played if the log has the reward.

        An episode whose environment takes too long has the reward environment.timeout_reward, and its error.
        """
        group = player.group(lease.prompt, lease.group_size)
        late = Played(score=Score(self._config.environment.timeout_reward))

        async def sample(lease: Lease, index: int, sampler: Sampler, progress: Progress) -> _Result:
            episode = player.episode(progress, request_id=f"{lease.lease_id}.{index}", sampler=sampler)
            error, is_late = None, False
            try:
                if progress.outcome is None or episode.transcript is not None:
                    await player.play(episode, lease.prompt, sampler.seed, group, index)
                else:
                    await group.ended()
            except EngineError as failure:
                error = f"engine: {failure}"
            except RewardError as failure:
                error = f"environment: {failure}"
                is_late = isinstance(failure, EnvironmentTimeout) and bool(episode.loss_mask.any())
            if is_late:
                episode.end(late)
            elif error is not None:
                progress.finish(FinishReason.ABORT)
                progress.score(None)
            sampled = _Sampled(
                prompt_token_ids=episode.prompt_token_ids,
                completion=progress.completion(),
                loss_mask=episode.loss_mask,
                turn_spans=episode.turn_spans,
                turn_rewards=episode.turn_rewards,
            )
            return sampled, time.time(), error

        return sample


_Result = tuple[_Sampled, float, str | None]
"""Tokens, when the last token was sampled (Unix seconds), and the error, one line."""
_Sample = Callable[[Lease, int, Sampler, Progress], Awaitable[_Result]]


def _empty_completion() -> Completion:
    """The completion of a request that failed in the engine: no token, no span."""
    return Completion(
        token_ids=np.empty(0, dtype=np.int32),
        rollout_logprobs=np.empty(0, dtype=np.float32),
        weight_spans=(),
        finish_reason=FinishReason.ABORT,
    )


class ErrorBudget:
    """Stops a run whose rewards are broken: more than a fifth of errors over the last 200 rollouts.

    An episode whose environment took too long counts too, so that a slow service is not taken for a bad policy.
    """

    WINDOW = 200
    SHARE = 0.2

    def __init__(self, part: str = "") -> None:
        """part: of a mixture, for the log."""
        self._what = f"mixture.{part}: " if part else ""
        self._recent: list[bool] = []
        self.first_error: str | None = None
        self.num_errors = 0

    def add(self, rollouts: list[Rollout]) -> None:
        """Count the outcomes of a group."""
        for rollout in rollouts:
            failed = rollout.error is not None  # with or without environment.timeout_reward
            self._recent.append(failed)
            self.num_errors += failed
            if failed and self.first_error is None:
                self.first_error = rollout.error
            if failed and self.num_errors & (self.num_errors - 1) == 0:  # the 1st, 2nd, 4th, 8th
                logger.warning(
                    "%s%d rollouts failed so far; the newest: %s",
                    self._what, self.num_errors, rollout.error,
                )  # fmt: skip
        del self._recent[: -self.WINDOW]

    @property
    def is_spent(self) -> bool:
        """Whether the run should stop."""
        return len(self._recent) == self.WINDOW and sum(self._recent) > self.SHARE * self.WINDOW
