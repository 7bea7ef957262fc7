"""Accepts or refuses the finished groups of one Flight write: one ledger update, one answer per group."""

import logging
from collections.abc import Callable, Sequence

import pyarrow as pa

from pipelinerl_core.config import RunConfig
from pipelinerl_core.errors import MissingObject, PipelineRLError, StaleLease, StoreError
from pipelinerl_core.ledger import ActorKey, Arrival, GroupSummary
from pipelinerl_core.messages import Ack, Answer, Group
from pipelinerl_core.roles.hub.rows import WrittenGroup
from pipelinerl_core.roles.hub.state import HubState
from pipelinerl_core.roles.hub.summaries import check_versions, newest_version, summarize

logger = logging.getLogger(__name__)


class Arrivals:
    """Adds delivered groups to the ledger and keeps their rows in memory."""

    def __init__(self, config: RunConfig, state: HubState, read_missed_commits: Callable[[], None]) -> None:
        self._takes_turns = config.takes_turns
        self._state = state
        self._changed = state.changed
        self._ledger = state.ledger
        self._read_missed_commits = read_missed_commits

    def receive(self, peer: str, groups: Sequence[Group], rows: pa.RecordBatch | None) -> list[Answer | Exception]:
        """One answer or error per group.

        rows: checked rows of all groups, in the order of `groups`.
        """
        if rows is None:
            return [MissingObject(f"group {group.ref.group_id} arrived without its rows") for group in groups]
        summaries = summarize([group.ref for group in groups], rows)
        self._catch_up(max(map(newest_version, summaries), default=0))
        with self._changed:
            actor = self._state.peers[peer].actor
            if actor is None:
                return [self._state.unknown_boot(group.id) for group in groups]
            was_paused = self._must_pause()
            answers = [
                self._add(peer, actor, group, summary) for group, summary in zip(groups, summaries, strict=True)
            ]
            has_to_pause = self._must_pause() and not was_paused
            self._keep(groups, answers, rows)
            self._state.wake_trainer()
        if any(not isinstance(answer, Ack) or answer.note != Arrival.READY for answer in answers):
            self._state.return_credit([actor])
        if has_to_pause:
            self._state.request_sync()
        return answers

    def _catch_up(self, version: int) -> None:
        """An actor may come from the hub before, which has announced versions after this hub had read the store."""
        with self._changed:
            is_behind = version > max(0, self._ledger.committed_step)  # before the first commit there is version 0
        if is_behind:
            try:
                self._read_missed_commits()
            except StoreError as error:
                logger.warning("version %d is not known to this hub: %s", version, error)

    def _add(self, peer: str, actor: ActorKey, group: Group, summary: GroupSummary) -> Answer | Exception:
        ref = group.ref
        key = (ref.group_id, ref.attempt)
        try:
            self._state.check_ownership(actor, summary.actor, [key])
            self._state.check_groups([ref.group_id])
            check_versions(summary, self._ledger.committed_step)
            self._state.use_credit(self._state.peers[peer])
            arrival = self._ledger.add_group(summary, group.lease_id)
            if group.seq is not None:
                self._ledger.record_segment(*key, actor, group.seq)
        except PipelineRLError as error:
            if isinstance(error, StaleLease):
                logger.info("refused: %s", error)
            return error.with_traceback(None)  # the traceback would keep the rows in memory
        except Exception as error:  # noqa: BLE001 - concerns this group only; the dispatcher turns it into a refusal
            return error
        return Ack(re=group.id, note=arrival.value)

    def _keep(self, groups: Sequence[Group], answers: Sequence[Answer | Exception], rows: pa.RecordBatch) -> None:
        """Keep the rows of the accepted groups that the trainer may request."""
        kept, start = [], 0
        for group, answer in zip(groups, answers, strict=True):
            ref = group.ref
            if isinstance(answer, Ack) and self._ledger.needs_rows(ref.group_id, ref.attempt):
                key = (ref.group_id, ref.attempt)
                kept.append(WrittenGroup(key, start, ref.num_rollouts, group.seq is not None))
            start += ref.num_rollouts
        self._state.rows.keep_all(rows, kept)

    def _must_pause(self) -> bool:
        """Whether the schedule pauses engines that already have the newest weights."""
        return self._takes_turns and self._ledger.must_pause(self._ledger.newest_version)
