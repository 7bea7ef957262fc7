"""Samples and scores single rollouts, for the groups of an actor and for evaluations.

    prompt --encode--> EngineRequest --engine--> Completion --decode, score--> reward   (SingleTurns)
    prompt --environment--> Episode --engine, environment--> turns, score --> reward    (episode.EpisodePlayer)

A failed scoring is data: an error and no reward. The other rollouts of the prompt go on.
"""

import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from pipelinerl_core.config import RunConfig
from pipelinerl_core.errors import ConfigError, EngineError, PromptRefused, RewardError
from pipelinerl_core.interfaces import Engine, Scorer
from pipelinerl_core.rollouts.progress import Progress
from pipelinerl_core.types import (
    BoolArray,
    Completion,
    EngineRequest,
    FinishReason,
    Int32Array,
    Prompt,
    Sampler,
    TurnSpan,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class TextCodec:
    """The functions of the tokenizer that rollouts need."""

    encode: Callable[[Prompt], Int32Array]
    decode: Callable[[Int32Array], str]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Sampled:
    """The tokens of a rollout; the reward is in its `Progress`."""

    prompt_token_ids: Int32Array
    completion: Completion
    loss_mask: BoolArray
    finished_at: float
    """Unix seconds when the last token was sampled."""
    error: str | None = None
    """Why the rollout has no reward, or the reward environment.timeout_reward; one line."""
    turn_spans: tuple[TurnSpan, ...] = ()
    turn_rewards: tuple[float, ...] = ()
    branch_starts: tuple[int, ...] = ()
    task: str = ""
    """What the environment says of its task (Rollout.task); empty: the row of the prompt is the task."""


NO_PROMPT = np.zeros(1, np.int32)
"""Tokens of a prompt without tokens, because a row has at least one."""
PROMPT_ERROR = "prompt: "
"""Start of the error of a rollout whose prompt cannot be used: it cannot be encoded, or is too long."""
Sample = Callable[[int, str, Sampler, Progress], Awaitable[Sampled]]
"""Samples and scores a rollout: (index in the group, request id, sampler, the rollout so far)."""


@dataclass(slots=True)
class EpisodeCounts:
    """Tokens of all episodes of one player."""

    given: int = 0
    """Tokens in completions that were not sampled."""
    replayed: int = 0
    """Sampled tokens of earlier plays that were used again."""
    dropped: int = 0
    """Tokens of earlier plays that were dropped, because the environment acted differently."""


class Player(Protocol):
    """Plays the rollouts of the prompts of one part or set, on one engine."""

    @property
    def config(self) -> RunConfig:
        """Of the part or set."""
        ...

    @property
    def counts(self) -> EpisodeCounts | None:
        """Tokens of all episodes so far; None for rollouts of one turn."""
        ...

    def begin(self, prompt: Prompt, size: int) -> Sample:
        """The function that plays each of the `size` rollouts of a prompt."""
        ...


class SingleTurns:
    """Rollouts of one turn, which a scorer scores."""

    def __init__(self, engine: Engine, scorer: Scorer, codec: TextCodec, config: RunConfig) -> None:
        self.config = config
        self.counts = None
        self._engine = engine
        self._scorer = scorer
        self._codec = codec

    def begin(self, prompt: Prompt, size: int) -> Sample:
        try:
            encoded, limit = self._codec.encode(prompt), self.config.rollouts.max_prompt_tokens
            problem = "" if len(encoded) else "it has no tokens"
            if len(encoded) > limit:  # for which the engine has room if completions of others may be longer
                problem = f"its {len(encoded)} tokens exceed rollouts.max_prompt_tokens={limit}"
        except ConfigError as error:  # of this prompt: the others can be used
            encoded, problem = NO_PROMPT, str(error)
        prompt_token_ids = encoded if len(encoded) else NO_PROMPT

        async def sample(index: int, request_id: str, sampler: Sampler, progress: Progress) -> Sampled:
            request = EngineRequest(
                request_id=request_id,
                prompt_token_ids=prompt_token_ids,
                max_tokens=self.config.rollouts.max_tokens,
                sampler=sampler,
                prior=progress.completion() if progress.num_tokens else None,
            )
            completion, error, finished_at = _empty_completion(), None, time.time()
            try:
                if problem:
                    raise PromptRefused(problem)
                completion = await self._complete(request, progress)
                finished_at = time.time()
                if progress.outcome is None:
                    text = self._codec.decode(completion.token_ids)
                    progress.score(await self._scorer.score(prompt, text, completion))
            except PromptRefused as failure:
                finished_at, error = time.time(), f"{PROMPT_ERROR}{failure}"
            except EngineError as failure:
                finished_at, error = time.time(), f"engine: {failure}"
            except RewardError as failure:
                error = f"reward: {failure}"
                progress.score(None)
            return Sampled(
                prompt_token_ids=prompt_token_ids,
                completion=completion,
                loss_mask=np.ones(len(completion.token_ids), np.bool_),
                finished_at=finished_at,
                error=error,
            )

        return sample

    async def _complete(self, request: EngineRequest, progress: Progress) -> Completion:
        if progress.finish_reason is not None:  # the log of the previous holder has all tokens
            return progress.completion()
        async for chunk in self._engine.generate(request):
            progress.add(chunk)
            if chunk.completion is not None:
                progress.finish(chunk.completion.finish_reason or FinishReason.ABORT)
                return chunk.completion
        raise EngineError(f"request {request.request_id} ended without a completion")


def _empty_completion() -> Completion:
    """The completion of a request that failed in the engine: no token, no span."""
    return Completion(
        token_ids=np.empty(0, dtype=np.int32),
        rollout_logprobs=np.empty(0, dtype=np.float32),
        weight_spans=(),
        finish_reason=FinishReason.ABORT,
    )
