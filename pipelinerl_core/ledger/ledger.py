"""The truth about a run as its peers may know it: who is who, who gets what, what is reserved, committed, announced.

Not thread-safe; the hub calls it under one lock.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import islice

from pipelinerl_core.algo.staleness import deadline_step
from pipelinerl_core.config import RunConfig
from pipelinerl_core.errors import Fenced
from pipelinerl_core.ledger.actors import SWAP_COUNTER, ActorReports
from pipelinerl_core.ledger.groups import ActorKey, Arrival, Grant, GroupSummary, SealedGroup, SyncResult
from pipelinerl_core.ledger.pool import GroupPool
from pipelinerl_core.ledger.reservations import Reservation
from pipelinerl_core.ledger.schedules import Schedule, build_schedule
from pipelinerl_core.ledger.segments import SegmentIndex
from pipelinerl_core.ledger.tokens import DECIDED_COUNTER, TokenLedger
from pipelinerl_core.ledger.view import LedgerView
from pipelinerl_core.ledger.waits import Waits, empty_share
from pipelinerl_core.messages import FateRecord, LeaseRef, Reserved, Sync
from pipelinerl_core.run.records import ActorSample, Commit, SwapRecord
from pipelinerl_core.types import GroupRef, PreviousHolder, WeightManifest

# Actors find a restarted hub within a second or two; until then their leases are nobody else's.
GRACE_SECONDS = 5.0


class Ledger(LedgerView):
    """Leases, reservations, commits, tokens and announcements of one run."""

    def __init__(
        self,
        config: RunConfig,
        *,
        clock: Callable[[], float],
        boot_id: str = "0",
        first_attempt: int = 0,
        schedule: Schedule | None = None,
    ) -> None:
        """`first_attempt` > 0: earlier hubs granted lower attempts, whose holders have a grace time to register.

        `schedule` defaults to the one that the configuration names.
        """
        pool = GroupPool(config, boot_id=boot_id, first_attempt=first_attempt)
        super().__init__(config, pool, schedule or build_schedule(config))
        self._clock = clock
        self._held_back: tuple[int, float] | None = None  # step that waits for old groups, since when
        self._grace_until = clock()
        if first_attempt:
            self._grace_until += min(config.placement.lease_seconds, GRACE_SECONDS)
        self._newest_epochs: dict[str, int] = {}
        self._last_seen: dict[ActorKey, float] = {}
        self._trainer_epoch = -1
        self.actor_reports = ActorReports()
        self.waits = Waits()
        self.is_draining = False
        """Grant nothing more."""

    def restore(self, commit: Commit, sealed: Iterable[SealedGroup], manifest: WeightManifest | None) -> None:
        """Go on after the newest commit, with what was found in the segments at and above its low-water marks.

        Groups without a fate are ready where rows were found, the others wait for their holders to register, and are
        leased once more when the grace time is over. Token totals come from the commit; groups that it trained are
        added to them here, because its totals are those of the moment of their reservation.
        """
        pool = self._pool
        self.committed_step = commit.step
        self.manifest = manifest
        pool.start_at(commit.next_group_id)
        for group_id in commit.open_groups:
            pool.leases.queue(group_id)
        pool.tokens = TokenLedger.restore(commit.tokens, commit.actors, commit.lengths)
        pool.segments = SegmentIndex(commit.low_water)
        self.actor_reports.restore(commit.actors)
        self.waits = Waits(commit.waits)
        trained = {record.group_id: record for record in commit.fates if record.fate == "trained"}
        for group_id in trained:
            pool.leases.queue(group_id)  # for a moment: their rows tell how many tokens were masked
        attempts = {group_id: record.attempt for group_id, record in trained.items()}
        refs = ((group, group.summary.ref) for group in sealed)
        self.restore_segments(g for g, ref in refs if attempts.get(ref.group_id, ref.attempt) == ref.attempt)
        for record in trained.values():
            pool.decide_by_commit(record, commit.step)
        for key in commit.actors:
            self._last_seen[ActorKey.parse(key)] = self._grace_until - self._config.placement.lease_seconds

    def restore_segments(self, sealed: Iterable[SealedGroup]) -> None:
        """Groups found in the store, before any peer registers."""
        for group in sealed:
            summary, ref = group.summary, group.summary.ref
            self._pool.segments.seal(summary.actor, group.seq)
            if ref.group_id >= self._pool.next_group_id or self._pool.leases.is_queued(ref.group_id):
                self._pool.add(summary, "")
            self.record_segment(ref.group_id, ref.attempt, summary.actor, group.seq)

    def restore_holders(self, holders: Mapping[int, Sequence[PreviousHolder]]) -> None:
        """Whose logs hold tokens of which group, found in the store."""
        for group_id, found in holders.items():
            self._pool.leases.add_previous_holders(group_id, found)

    # ---- actors ----------------------------------------------------------------------------------------------

    def register_actor(self, actor: ActorKey, leases: Sequence[LeaseRef] = ()) -> None:
        """An actor epoch (re)appears with the leases it holds; earlier epochs of its name are gone. Raises Fenced."""
        self._check_actor(actor)
        for other in [key for key in self._last_seen if key.name == actor.name and key.epoch < actor.epoch]:
            self.bye(other)
        self._newest_epochs[actor.name] = actor.epoch
        self._revive(actor)
        for lease in leases:
            self._pool.claim(lease, actor, self._clock())

    def sync(self, actor: ActorKey, message: Sync) -> SyncResult:
        """Renew, reconcile and grant. Raises Fenced for an epoch that a newer one has replaced."""
        self._check_actor(actor)
        now = self._clock()
        self._revive(actor)
        self._pool.tokens.report(actor, message.num_tokens)
        swaps = self.actor_reports.record_sync(actor, message, now)
        missing, foreign = self._pool.leases.renew(actor, message.leases, now)
        granted = self._grant(actor, message.want - len(missing), message.engine_version, now)
        num_leases = len(missing) + len(granted)
        self.waits.actor_synced(actor, now, empty_share(message, num_leases, self._config.rollouts.group_size))
        return SyncResult(leases=(*missing, *granted), stop_leases=tuple(foreign), swaps=tuple(swaps))

    def add_group(self, summary: GroupSummary, lease_id: str) -> Arrival:
        """Take in a finished group. Raises StaleLease when its lease is not in force."""
        return self._pool.add(summary, lease_id)

    def sealed(self, actor: ActorKey, seq: int, groups: Iterable[tuple[int, int]]) -> None:
        """Rows are durable in a segment."""
        for group_id, attempt in groups:
            self.record_segment(group_id, attempt, actor, seq)
        self._pool.segments.seal(actor, seq)

    def record_segment(self, group_id: int, attempt: int, actor: ActorKey, seq: int) -> None:
        """A segment holds the rows of a group; of no interest once the group is decided."""
        if self._pool.is_open(group_id):
            self._pool.segments.add(group_id, attempt, actor, seq)

    def bye(self, actor: ActorKey) -> None:
        """An actor epoch is gone: its leases are free, what it had in flight is superseded."""
        self._last_seen.pop(actor, None)
        self._pool.leases.release(actor)
        self._pool.tokens.account(actor).is_gone = True

    def expire(self) -> list[int]:
        """Let silent actors and their leases go; returns the groups whose lease ran out. Call it now and then."""
        now = self._clock()
        for actor, last_seen in list(self._last_seen.items()):
            if last_seen + self._config.placement.lease_seconds < now:
                del self._last_seen[actor]
                self._pool.tokens.account(actor).is_gone = True
        return self._pool.leases.expire(now)

    def extend(self, seconds: float) -> None:
        """The hub itself did not run for so long: no actor was silent."""
        self._pool.leases.extend(seconds)
        self._grace_until += seconds
        self._last_seen = {actor: last_seen + seconds for actor, last_seen in self._last_seen.items()}

    def _check_actor(self, actor: ActorKey) -> None:
        newest = self._newest_epochs.get(actor.name, actor.epoch)
        if newest > actor.epoch:
            raise Fenced(
                f"actor {actor.name}: epoch {actor.epoch} was replaced by epoch {newest}; this process must end"
            )

    def _revive(self, actor: ActorKey) -> None:
        self._last_seen[actor] = self._clock()
        self._pool.tokens.account(actor).is_gone = False

    def _grant(self, actor: ActorKey, want: int, engine_version: int, now: float) -> list[Grant]:
        if self.is_draining or self.is_done or now < self._grace_until:
            return []
        num_groups = min(want, self._schedule.grantable_groups(self.counts, engine_version))
        leases = self._pool.leases
        return [leases.grant(self._pool.next_group(), actor, now, version=engine_version) for _ in range(num_groups)]

    # ---- trainer ---------------------------------------------------------------------------------------------

    def check_trainer(self, epoch: int) -> None:
        """Raises Fenced when a newer trainer has taken over."""
        if epoch < self._trainer_epoch:
            raise Fenced(f"trainer epoch {epoch} was replaced by epoch {self._trainer_epoch}; this process must end")

    def register_trainer(self, epoch: int, step: int | None = None, refs: Sequence[GroupRef] = ()) -> None:
        """A trainer (re)appears, perhaps with a reservation it holds. A newer epoch frees those of earlier ones.

        After a restart of the hub the groups of that reservation are taken out of wherever they are: the trainer may
        be about to commit them. Rows that are missing come from their actors, which offer unsealed groups again.
        """
        self._adopt_trainer_epoch(epoch)
        if step is None or not refs or step <= self.committed_step or step in self._pool.reservations:
            return
        summaries = {ref.group_id: self._pool.take_reserved(ref) for ref in refs}
        found = {group_id: summary for group_id, summary in summaries.items() if summary is not None}
        self._reserve(step, list(refs), found, is_answered=False)

    def reserve(self, step: int, epoch: int, lost: Iterable[tuple[int, int]] = ()) -> Reserved:
        """The groups of a step, or that they are not ready; the same question has the same answer. Raises Fenced.

        lost: groups of that answer whose rows cannot be read, which makes it another question.
        """
        self._adopt_trainer_epoch(epoch)
        if step <= self.committed_step:
            raise Fenced(f"step {step} is committed already (the newest is {self.committed_step})")
        reservation = self._pool.reservations.get(step)
        if reservation is not None:
            refs = reservation.refs
            gone = [group_id for group_id, attempt in lost if group_id in refs and refs[group_id].attempt == attempt]
            if not gone:
                return reservation.answer
            self._pool.requeue_lost(self._pool.reservations.pop(step), gone)
            self._free(reservation)
        unknown = self._missing_commits(step)
        if unknown:  # this hub has restarted: some ready groups belong to these steps, and only commits tell which
            return Reserved(re=0, is_ready=False, reason=f"the commits of steps {unknown} have not arrived")
        self._pool.drop_stale(step)
        too_few = self._not_due(step)
        reason = too_few or self._waits_for_old_groups(step)
        if reason:
            self.waits.trainer_waits(self._clock(), is_held_back=not too_few)
            actors = {str(actor): sample.model_dump() for actor, sample in self.actor_reports.samples.items()}
            return Reserved(re=0, is_ready=False, reason=reason, ready_groups=self.num_ready, actors=actors)
        self.waits.trainer_resumes(self._clock())
        summaries = {
            group_id: self._pool.ready.take(group_id) for group_id in self._pool.choose(step, self._schedule)
        }
        return self._reserve(step, [summary.ref for summary in summaries.values()], summaries, is_answered=True)

    def is_due(self, step: int) -> bool:
        """Whether a reserve of a step is worth repeating: enough groups that are live at it are ready."""
        if self._missing_commits(step):
            return False
        self._pool.drop_stale(step)
        return self.num_ready >= self._schedule.needed_groups(step)

    def _missing_commits(self, step: int) -> list[int]:
        """The first steps before this one that are neither committed nor reserved here."""
        missing = (n for n in range(self.committed_step + 1, step) if n not in self._pool.reservations)
        return list(islice(missing, 3))  # the step is the trainer's word: it may be any number

    def _not_due(self, step: int) -> str:
        """Why the schedule has not enough ready groups for a step, if so."""
        needed = self._schedule.needed_groups(step)
        if self.num_ready >= needed:
            return ""
        return f"{self.num_ready} of {needed} groups are ready, {self.num_leased} leased, {self.num_queued} queued"

    def _waits_for_old_groups(self, step: int) -> str:
        """stale=wait: why a step is held back, if so.

        A leased group whose oldest token may be live at this step for the last time is waited for, wait_seconds at
        most; one that is older still has lost those tokens already.
        """
        rules = self._config.schedule
        if rules.stale != "wait":
            return ""
        old = sum(deadline_step(version, rules.max_lag) == step for version in self._pool.leases.oldest_versions())
        if not old:
            return ""
        now = self._clock()
        if self._held_back is None or self._held_back[0] != step:
            self._held_back = (step, now)
        waited = now - self._held_back[1]
        return f"{old} leased groups would be stale after this step" if waited < rules.wait_seconds else ""

    def reserved(self, step: int) -> set[tuple[int, int]]:
        """(group_id, attempt) of the groups reserved for a step."""
        reservation = self._pool.reservations.get(step)
        return {(ref.group_id, ref.attempt) for ref in reservation.refs.values()} if reservation else set()

    def committed(
        self,
        step: int,
        groups: Sequence[tuple[int, int]],
        fates: Sequence[FateRecord],
        manifest: WeightManifest | None,
    ) -> bool:
        """Step n is committed: forget its groups, announce its version. False when that was known.

        `fates` are the fates that the commit records, with or without those of `groups`. Raises ValueError when a
        commit before it is missing: read it from the store first.
        """
        if step <= self.committed_step:
            self.announce(manifest)
            return False
        if step > self.committed_step + 1:
            raise ValueError(f"commit {step} follows {self.committed_step}: a commit is missing")
        pool = self._pool
        tokens_of = {(record.group_id, record.attempt): record.num_tokens for record in fates}
        reservation = pool.reservations.pop(step, None)
        others = list(groups)
        if reservation is not None:
            others = pool.train_reserved(reservation, groups)
            pool.return_groups(reservation, list(reservation.refs))
            pool.fates = [*reservation.answer.fates, *pool.fates]
            self.actor_reports.commit_swaps(SwapRecord.model_validate(swap) for swap in reservation.answer.swaps)
        for group_id, attempt in others:
            num_tokens = tokens_of.get((group_id, attempt), 0)
            pool.decide_by_commit(
                FateRecord(group_id=group_id, attempt=attempt, fate="trained", num_tokens=num_tokens), step
            )
        for record in fates:
            if record.fate != "trained":
                pool.decide_by_commit(record, step)
        recorded = {record.group_id for record in fates}
        pool.fates = [record for record in pool.fates if record.group_id not in recorded]
        self.committed_step = step
        self.announce(manifest)
        return True

    def announce(self, manifest: WeightManifest | None) -> None:
        """Tell the actors of a committed version; the same version again may lie somewhere else."""
        if manifest is not None and self.newest_version <= manifest.version <= self.committed_step:
            self.manifest = manifest

    def _adopt_trainer_epoch(self, epoch: int) -> None:
        self.check_trainer(epoch)
        if epoch > self._trainer_epoch:
            self._trainer_epoch = epoch
            for step in sorted(self._pool.reservations):
                self._free(self._pool.reservations.pop(step))

    def _free(self, reservation: Reservation) -> None:
        """What a reservation holds goes back: groups, and what its answer would have recorded."""
        self._pool.return_groups(reservation, list(reservation.refs))
        self._pool.fates = [*reservation.answer.fates, *self._pool.fates]
        self.actor_reports.return_swaps([SwapRecord.model_validate(swap) for swap in reservation.answer.swaps])

    def _reserve(
        self, step: int, refs: list[GroupRef], summaries: dict[int, GroupSummary], *, is_answered: bool
    ) -> Reserved:
        """Take the groups, and note everything that the commit of this step will say.

        is_answered: the trainer receives this answer and commits it. Otherwise the trainer commits the answer of an
        earlier hub, and fates and swaps wait for the next reservation.
        """
        pool = self._pool
        pool.reservations[step] = reservation = Reservation(
            step=step,
            answer=Reserved(re=0, is_ready=True),
            refs={ref.group_id: ref for ref in refs},
            summaries=summaries,
        )
        tokens = self._tokens_before(step)
        actors = {str(actor): self._sample(actor, tokens).model_dump() for actor in self.actor_reports.samples}
        fates: tuple[FateRecord, ...] = ()
        swaps: list[SwapRecord] = []
        if is_answered:
            fates, pool.fates = tuple(pool.fates), []
            swaps = self.actor_reports.take_swaps()
        reservation.answer = Reserved(
            re=0,
            is_ready=True,
            groups=tuple(refs),
            fates=fates,
            next_group_id=pool.next_group_id,
            open_groups=pool.open_groups(),
            low_water=pool.segments.low_water(pool.is_open),
            tokens=tokens.totals(),
            lengths=tokens.lengths.totals(),
            waits=self.waits.totals(),
            swaps=tuple(swap.model_dump() for swap in swaps),
            actors=actors,
        )
        return reservation.answer

    def _tokens_before(self, step: int) -> TokenLedger:
        """The token ledger as if every earlier step were committed: a commit of this step implies theirs."""
        earlier = [reservation for number, reservation in self._pool.reservations.items() if number < step]
        if not earlier:
            return self._pool.tokens
        tokens = self._pool.tokens.copy()
        for reservation in earlier:
            for group_id in reservation.refs:
                self._pool.train(reservation, group_id, tokens)
        return tokens

    def _sample(self, actor: ActorKey, tokens: TokenLedger) -> ActorSample:
        """What a commit says of an actor, with what a restarted hub needs to go on."""
        sample = self.actor_reports.samples[actor]
        counters = {
            **sample.counters,
            DECIDED_COUNTER: float(tokens.account(actor).decided),
            SWAP_COUNTER: float(self.actor_reports.swap_version(actor)),
        }
        return sample.model_copy(update={"counters": counters})
