"""Evaluations during training on an actor's engine (eval.on=actors), between the groups of the actor."""

import asyncio
import logging
from collections.abc import AsyncIterator
from typing import Any

from pipelinerl_core.errors import PipelineRLError
from pipelinerl_core.interfaces import Engine
from pipelinerl_core.roles.runtime.evaluation import Evaluation
from pipelinerl_core.run.context import RunContext
from pipelinerl_core.run.records import EVALS_PREFIX, eval_key, eval_version
from pipelinerl_core.types import Chunk, EngineRequest

logger = logging.getLogger(__name__)

_SHARE = 8
"""An evaluation has at most an eighth of the slots."""


class _CountedEngine:
    """An engine that counts the tokens sampled through this object."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.num_sampled = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def generate(self, request: EngineRequest) -> AsyncIterator[Chunk]:
        return self._counted(self._engine.generate(request))

    async def _counted(self, chunks: AsyncIterator[Chunk]) -> AsyncIterator[Chunk]:
        async for chunk in chunks:
            self.num_sampled += len(chunk.token_ids)
            yield chunk


class ActorEvaluation:
    """Starts an evaluation when a version is due; at most one at a time. An error is logged and ends no actor."""

    def __init__(self, context: RunContext, engine: Engine) -> None:
        self._context = context
        self._engine = _CountedEngine(engine)
        self._task: asyncio.Task[None] | None = None
        self._seen = 0
        self._tried = 0  # newest due version for which an evaluation was started, or another actor has evaluated
        self._evaluation: Evaluation | None = None

    def consider(self, tasks: asyncio.TaskGroup) -> None:
        """Start an evaluation if none is running and a version up to the engine's version is due."""
        version = self._engine.weight_version
        if version == self._seen or (self._task is not None and not self._task.done()):
            return
        self._seen = version
        due = self._context.config.due_evaluation(version)
        if due > self._tried:
            self._tried = due
            self._task = tasks.create_task(self._run(due))

    @property
    def num_tokens(self) -> int:
        """Tokens that evaluations have sampled, as far as the engine has sent them."""
        return self._engine.num_sampled

    def cancel(self) -> None:
        if self._task is not None:
            self._task.cancel()

    async def close(self) -> None:
        """End the scoring processes."""
        if self._evaluation is not None:
            await self._evaluation.close()

    async def _run(self, due: int) -> None:
        try:
            keys = await asyncio.to_thread(self._context.store.list, EVALS_PREFIX)
            # The record without the name of a set is written last: an actor may have ended between two sets.
            if any(eval_version(key) >= due and key == eval_key(eval_version(key)) for key in keys):
                return
            if self._evaluation is None:
                self._evaluation = await asyncio.to_thread(self._build)
            config = self._context.config.eval
            await self._evaluation.run(min(config.subset, config.num_prompts))
        except* PipelineRLError as failures:
            logger.warning("version %d was not evaluated: %s", due, failures.exceptions[0])

    def _build(self) -> Evaluation:
        slots = max(1, self._engine.stats().slots // _SHARE)
        return Evaluation(self._context, self._engine, slots=slots, newest_step=lambda: self._engine.weight_version)
