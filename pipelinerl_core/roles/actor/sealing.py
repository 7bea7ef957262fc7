"""Finished groups of an actor, until each is in a segment and the hub knows that."""

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable, Iterable

from pipelinerl_core.data.segments import SegmentWriter
from pipelinerl_core.errors import HubUnavailable, RunOver, StoreError
from pipelinerl_core.messages import LeaseRef, Sealed
from pipelinerl_core.roles.actor.finished_group import FinishedGroup
from pipelinerl_core.roles.runtime.hub_link import HubLink
from pipelinerl_core.types import GroupKey

logger = logging.getLogger(__name__)

LAST_REPORT_SECONDS = 5.0
"""For a hub to hear of the last segments; without it, it reads what is in the store when it starts again."""


class Sealer:
    """Of one actor epoch; on the actor's event loop.

    Segments are written whether the hub is there or not: what it has not heard of waits, in order, and is told by a
    loop of its own.
    """

    def __init__(
        self,
        segments: SegmentWriter,
        link: HubLink,
        *,
        actor: str,
        epoch: int,
        forget: Callable[[Iterable[GroupKey]], Awaitable[None]],
    ) -> None:
        """`forget` is told of groups that need no other log any more."""
        self._segments = segments
        self._link = link
        self._actor = actor
        self._epoch = epoch
        self._forget = forget
        self._unreported: deque[Sealed] = deque()
        self._has_unreported = asyncio.Event()
        self._groups: dict[GroupKey, FinishedGroup] = {}
        self.must_send_again = False
        """A new hub knows nothing of groups that were sent but not sealed."""

    def add(self, group: FinishedGroup) -> None:
        """Take a group whose rollouts have ended."""
        self._groups[_key(group)] = group
        self._segments.append(group.rows, group.ref)

    def confirm(self, group: FinishedGroup) -> None:
        """The hub has the group: it is forgotten if it is sealed too."""
        if group.seq is not None:
            self.drop(group)

    def drop(self, group: FinishedGroup) -> None:
        """Nobody wants the group, or everybody knows it."""
        self._groups.pop(_key(group), None)

    def lease_refs(self) -> list[LeaseRef]:
        """All groups, as a registration names them; from any thread."""
        return [
            LeaseRef(group_id=group.ref.group_id, attempt=group.ref.attempt, lease_id=group.lease_id)
            for group in list(self._groups.values())
        ]

    def groups_to_send_again(self) -> list[FinishedGroup]:
        """What a new hub is to be sent once more."""
        if not self.must_send_again:
            return []
        self.must_send_again = False
        return [group for group in self._groups.values() if group.is_sent]

    async def run(self, segment_seconds: float) -> None:
        """Seal what is due, until cancelled."""
        while True:
            await asyncio.sleep(segment_seconds / 4)
            await self.seal(everything=False)

    async def seal(self, *, everything: bool) -> None:
        """Write waiting groups as a segment, all of them or what is due; the hub hears of it by and by.

        A store that fails is no loss: they wait for the next call, while sequences go on.
        """
        try:
            await self._seal(everything=everything)
        except StoreError as error:
            logger.warning("finished groups are not sealed yet, tried again soon: %s", error)

    async def _seal(self, *, everything: bool) -> None:
        sealed = await asyncio.to_thread(self._segments.seal if everything else self._segments.seal_due)
        if sealed is None:
            return
        seq, keys = sealed
        for key in keys:
            if key in self._groups:
                self._groups[key].seq = seq
        self._unreported.append(Sealed(actor=self._actor, epoch=self._epoch, seq=seq, groups=keys))
        self._has_unreported.set()
        await self._forget(keys)

    async def report(self) -> None:
        """Let the hub know of segments, one after the other, until cancelled."""
        while True:
            await self._has_unreported.wait()
            message = self._unreported[0]
            try:
                await asyncio.to_thread(self._link.request, message)
            except (HubUnavailable, RunOver):  # whoever syncs with it decides what follows
                await asyncio.sleep(LAST_REPORT_SECONDS / 10)
                continue
            self._reported(message)

    async def close(self) -> None:
        """Seal the rest, and tell a hub that is there; call it when no other method runs any more.

        Raises StoreError.
        """
        await self._seal(everything=True)
        while self._unreported:
            message = self._unreported[0]
            try:
                await asyncio.to_thread(self._link.request, message, seconds=LAST_REPORT_SECONDS)
            except (HubUnavailable, RunOver):
                logger.warning("%d segments are sealed, but no hub heard of them", len(self._unreported))
                return
            self._reported(message)

    def _reported(self, message: Sealed) -> None:
        self._unreported.popleft()
        if not self._unreported:
            self._has_unreported.clear()
        if self.must_send_again:  # this hub has not been sent them; that they are sealed goes with them
            return
        for key in message.groups:
            group = self._groups.get((key[0], key[1]))
            if group is not None and group.is_sent:
                self.drop(group)


def _key(group: FinishedGroup) -> GroupKey:
    return group.ref.group_id, group.ref.attempt
