"""Writes finished groups of an actor to segments and reports the segments to the hub."""

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
"""Deadline for reporting the last segments. A hub that misses the report lists the store when it starts again."""


class Sealer:
    """The finished groups of one actor epoch. Called on the actor's event loop.

    Segments are written with or without a hub. Segments that are not reported yet wait in a queue, which `report`
    sends in order.
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
        """`forget` is called with groups that are sent and sealed, whose partial log is no longer needed."""
        self._segments = segments
        self._link = link
        self._actor = actor
        self._epoch = epoch
        self._forget = forget
        self._unreported: deque[Sealed] = deque()
        self._has_unreported = asyncio.Event()
        self._groups: dict[GroupKey, FinishedGroup] = {}
        self._logged: set[GroupKey] = set()  # sealed, and in the log
        self.must_send_again = False
        """Set after a registration with a new hub, which has lost the groups that were sent but not sealed."""

    def add(self, group: FinishedGroup) -> None:
        """Accept a finished group, to be written to a segment."""
        self._groups[_key(group)] = group
        self._segments.append(group.rows, group.ref)

    def confirm(self, group: FinishedGroup) -> None:
        """The hub has received the group; if the group is sealed too, the actor drops it."""
        if group.seq is not None:
            self.drop(group)

    def drop(self, group: FinishedGroup) -> None:
        """Drop a group that the hub has refused, or has received and that is sealed."""
        self._groups.pop(_key(group), None)

    def lease_refs(self) -> list[LeaseRef]:
        """All kept groups in the form of a registration. May be called on any thread."""
        return [
            LeaseRef(group_id=group.ref.group_id, attempt=group.ref.attempt, lease_id=group.lease_id)
            for group in list(self._groups.values())
        ]

    def groups_to_send_again(self) -> list[FinishedGroup]:
        """The groups to send to a new hub once more; empty at the next call."""
        if not self.must_send_again:
            return []
        self.must_send_again = False
        return [group for group in self._groups.values() if group.is_sent]

    async def run(self, segment_seconds: float) -> None:
        """Seal groups that are due, until cancelled."""
        while True:
            await asyncio.sleep(segment_seconds / 4)
            await self.seal(everything=False)

    async def seal(self, *, everything: bool) -> None:
        """Write waiting groups to a segment, either all groups or only groups that are due.

        If the store fails, the groups wait for the next call.
        """
        try:
            await self._seal(everything=everything)
        except StoreError as error:
            logger.warning("finished groups are not sealed yet, the actor tries again: %s", error)

    async def _seal(self, *, everything: bool) -> None:
        sealed = await asyncio.to_thread(self._segments.seal if everything else self._segments.seal_due)
        if sealed is not None:
            seq, keys = sealed
            for key in keys:
                if key in self._groups:
                    self._groups[key].seq = seq
            self._unreported.append(Sealed(actor=self._actor, epoch=self._epoch, seq=seq, groups=keys))
            self._has_unreported.set()
            self._logged.update(keys)
        # If this actor leaves before it has sent a group, the next holder of the group continues it from the log.
        done = {key for key in self._logged if key not in self._groups or self._groups[key].is_sent}
        self._logged -= done
        if done:
            await self._forget(done)

    async def report(self) -> None:
        """Report segments to the hub, one after the other, until cancelled."""
        while True:
            await self._has_unreported.wait()
            message = self._unreported[0]
            try:
                await asyncio.to_thread(self._link.request, message)
            except (HubUnavailable, RunOver):  # the sync loop handles the error
                await asyncio.sleep(LAST_REPORT_SECONDS / 10)
                continue
            self._reported(message)

    async def close(self) -> None:
        """Seal the remaining groups and report them if a hub answers. No other method may be running.

        Raises StoreError.
        """
        await self._seal(everything=True)
        while self._unreported:
            message = self._unreported[0]
            try:
                await asyncio.to_thread(self._link.request, message, seconds=LAST_REPORT_SECONDS)
            except (HubUnavailable, RunOver):
                logger.warning("%d segments are sealed, but no hub has confirmed them", len(self._unreported))
                return
            self._reported(message)

    def _reported(self, message: Sealed) -> None:
        self._unreported.popleft()
        if not self._unreported:
            self._has_unreported.clear()
        if self.must_send_again:  # the groups are sent to the new hub again, with their segment
            return
        for key in message.groups:
            group = self._groups.get((key[0], key[1]))
            if group is not None and group.is_sent:
                self.drop(group)


def _key(group: FinishedGroup) -> GroupKey:
    return group.ref.group_id, group.ref.attempt
