"""Scoring of the episodes of a group beside each other, for environments with `score_group`."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence

from pipelinerl_core.errors import RewardError
from pipelinerl_core.types import Played, Transcript


class GroupScoring:
    """Scores the episodes of a group together as soon as the last one has ended."""

    def __init__(self, size: int, score: Callable[[Sequence[Transcript]], Awaitable[Sequence[Played]]]) -> None:
        """size: episodes of the group; `scored` or `ended` is called for each of them."""
        self._num_open = size
        self._score = score
        self._waiting: dict[int, tuple[Transcript, asyncio.Future[Played]]] = {}

    async def scored(self, index: int, transcript: Transcript) -> Played:
        """The score of an episode beside the others of the group. Raises EnvironmentFailed."""
        future: asyncio.Future[Played] = asyncio.get_running_loop().create_future()
        self._waiting[index] = transcript, future
        await self.ended()
        return await future

    async def ended(self) -> None:
        """An episode has ended; without a call of `scored`, the episode has no transcript."""
        self._num_open -= 1
        if self._num_open or not self._waiting:
            return
        waiting = [self._waiting[index] for index in sorted(self._waiting)]
        try:
            results = await self._score([transcript for transcript, _ in waiting])
        except RewardError as error:
            for _, future in waiting:
                future.set_exception(error)
            return
        for (_, future), result in zip(waiting, results, strict=True):
            future.set_result(result)
