"""The state machine of a run: actor and trainer epochs, leases, reservations, commits and announced weights.

Not thread-safe; the hub calls the ledger under one lock.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import islice

from pipelinerl_core.algo.staleness import deadline_step
from pipelinerl_core.config import RunConfig
from pipelinerl_core.errors import Expelled, Fenced
from pipelinerl_core.ledger.actors import ActorReports
from pipelinerl_core.ledger.groups import ActorKey, Arrival, Grant, GroupSummary, Reservation, SealedGroup, SyncResult
from pipelinerl_core.ledger.pool import GroupPool
from pipelinerl_core.ledger.retirement import Retirement
from pipelinerl_core.ledger.schedules import Schedule, build_schedule
from pipelinerl_core.ledger.segments import SegmentIndex
from pipelinerl_core.ledger.tokens import RETIRED_ACTORS, UNKNOWN_ACTOR, TokenLedger
from pipelinerl_core.ledger.view import LedgerView
from pipelinerl_core.ledger.waits import Waits, empty_share
from pipelinerl_core.messages import ActorSample, FateRecord, LeaseRef, Reserved, SwapRecord, Sync
from pipelinerl_core.run.records import Commit
from pipelinerl_core.types import GroupRef, PreviousHolder, WeightManifest

# Actors find a restarted hub within 2 s. During the grace period their leases are not granted to other actors.
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
        """`first_attempt` > 0: earlier hubs granted lower attempts, whose holders have a grace period to register.

        `schedule` defaults to the schedule of the configuration.
        """
        pool = GroupPool(config, boot_id=boot_id, first_attempt=first_attempt)
        super().__init__(config, pool, schedule or build_schedule(config))
        self._clock = clock
        self._held_back: tuple[int, float] | None = None  # (step that waits for old groups, start of the wait)
        self._grace_until = clock()
        if first_attempt:
            self._grace_until += min(config.placement.lease_seconds, GRACE_SECONDS)
        self._newest_epochs: dict[str, int] = {}
        self._last_seen: dict[ActorKey, float] = {}
        self._expelled: set[ActorKey] = set()
        self._trainer_epoch = -1
        self._retirement = Retirement()
        self.actor_reports = ActorReports()
        self.waits = Waits()
        self.is_draining = False
        """Whether grants have ended."""

    def restore(
        self,
        commit: Commit,
        sealed: Iterable[SealedGroup],
        manifest: WeightManifest | None,
        retired: Iterable[ActorKey] = (),
    ) -> None:
        """Restore the state after the newest commit, with the groups in segments at and above its low-water marks.

        Groups without a fate are ready if their rows were found. Other groups wait for their holders to register, and
        are leased again after the grace period. Token totals come from the commit; the groups that it trained are
        added here, because the commit holds the totals at the reservation of the step.

        retired: all retired actor epochs; the commit may still contain the ones retired last.
        """
        pool = self._pool
        self.committed_step = commit.step
        self.manifest = manifest
        pool.start_at(commit.next_group_id)
        for group_id in commit.open_groups:
            pool.leases.queue(group_id)
        pool.tokens = TokenLedger.restore(commit.tokens, commit.actors, commit.lengths, commit.retired_tokens)
        pool.segments = SegmentIndex(commit.low_water)
        self.actor_reports.restore(commit.actors)
        self._newest_epochs = {actor.name: actor.epoch for actor in sorted(self.actor_reports.samples)}
        self.retire(retired)
        self.waits = Waits(commit.waits)
        trained = {record.group_id: record for record in commit.fates if record.fate == "trained"}
        for group_id in trained:
            pool.leases.queue(group_id)  # temporarily: their rows contain the number of masked tokens
        attempts = {group_id: record.attempt for group_id, record in trained.items()}
        refs = ((group, group.summary.ref) for group in sealed)
        self.restore_segments(g for g, ref in refs if attempts.get(ref.group_id, ref.attempt) == ref.attempt)
        for record in trained.values():
            pool.decide_by_commit(record, commit.step)
        for actor in self.actor_reports.samples:
            self._last_seen[actor] = self._grace_until - self._config.placement.lease_seconds

    def restore_segments(self, sealed: Iterable[SealedGroup]) -> None:
        """Add groups found in the store; to be called before any peer registers."""
        for group in sealed:
            summary, ref = group.summary, group.summary.ref
            self._pool.segments.seal(summary.actor, group.seq)
            if ref.group_id >= self._pool.next_group_id or self._pool.leases.is_queued(ref.group_id):
                self._pool.add(summary, "")
            self.record_segment(ref.group_id, ref.attempt, summary.actor, group.seq)

    def restore_holders(self, holders: Mapping[int, Sequence[PreviousHolder]]) -> None:
        """Add the actor epochs whose logs in the store hold tokens of queued groups."""
        for group_id, previous in holders.items():
            self._pool.leases.add_previous_holders(group_id, previous)

    def register_actor(self, actor: ActorKey, leases: Sequence[LeaseRef] = ()) -> None:
        """Register an actor epoch with its leases and remove earlier epochs of the actor. Raises Fenced."""
        self._check_actor(actor)
        for other in [key for key in self._last_seen if key.name == actor.name and key.epoch < actor.epoch]:
            self.bye(other)
        self._newest_epochs[actor.name] = actor.epoch
        self._revive(actor)
        for lease in leases:
            self._pool.claim(lease, actor, self._clock())

    def sync(self, actor: ActorKey, message: Sync) -> SyncResult:
        """Renew leases and grant new ones. Raises Fenced if a newer epoch of the actor exists."""
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
        """Add a finished group. Raises StaleLease if its lease is not in force."""
        return self._pool.add(summary, lease_id)

    def sealed(self, actor: ActorKey, seq: int, groups: Iterable[tuple[int, int]]) -> None:
        """Note that a segment with the rows of these groups is durable."""
        for group_id, attempt in groups:
            self.record_segment(group_id, attempt, actor, seq)
        self._pool.segments.seal(actor, seq)

    def record_segment(self, group_id: int, attempt: int, actor: ActorKey, seq: int) -> None:
        """Note which segment holds the rows of a group; no effect for a decided group."""
        if self._pool.is_open(group_id):
            self._pool.segments.add(group_id, attempt, actor, seq)

    def bye(self, actor: ActorKey) -> None:
        """Remove an actor epoch: its groups are queued, its tokens in flight count as superseded."""
        self._last_seen.pop(actor, None)
        self._pool.leases.release(actor)
        self._pool.tokens.account(actor).is_gone = True

    def expel(self, actors: Iterable[ActorKey]) -> None:
        """Refuse these actor epochs from now on, and queue their groups, without their tokens. Idempotent.

        Their finished groups stay. A later epoch of the same actor is admitted: its engine has loaded other weights.
        """
        for actor in set(actors) - self._expelled:
            self._expelled.add(actor)
            self.bye(actor)
            self._pool.leases.distrust(actor)

    def expire(self) -> list[int]:
        """Expire actors without a recent sync, and leases; returns the groups whose lease expired."""
        now = self._clock()
        for actor, last_seen in list(self._last_seen.items()):
            if last_seen + self._config.placement.lease_seconds < now:
                del self._last_seen[actor]
                self._pool.tokens.account(actor).is_gone = True
        return self._pool.leases.expire(now)

    def lives_to_retire(self) -> list[ActorKey]:
        """Actor epochs that have ended for good and whose groups are all decided; from now on they are refused.

        The caller writes the object of each, then calls `retire`.
        """
        pool = self._pool
        lives = {*self.actor_reports.samples, *pool.tokens.accounts, *pool.segments.actors()}
        needed = {*self._last_seen, *pool.segments.holders(pool.is_open), UNKNOWN_ACTOR, RETIRED_ACTORS}
        ended = [actor for actor in lives - needed if not pool.tokens.account(actor).present]
        return self._retirement.select(
            ended, self._is_replaced, now=self._clock(), committed_step=self.committed_step
        )

    def retire(self, actors: Iterable[ActorKey]) -> None:
        """Remove actor epochs whose objects are written: later commits do not name them."""
        for actor in actors:
            self._retirement.retire(actor)
            self.actor_reports.retire(actor)
            self._pool.segments.retire(actor)
            self._pool.tokens.retire(actor)

    def extend(self, seconds: float) -> None:
        """Move all deadlines by `seconds`, for which the hub was suspended."""
        self._pool.leases.extend(seconds)
        self._grace_until += seconds
        self._last_seen = {actor: last_seen + seconds for actor, last_seen in self._last_seen.items()}

    def _is_replaced(self, actor: ActorKey) -> bool:
        """Whether a newer epoch of the actor has registered."""
        return self._newest_epochs.get(actor.name, actor.epoch) > actor.epoch

    def _check_actor(self, actor: ActorKey) -> None:
        if self._is_replaced(actor):
            newest = self._newest_epochs[actor.name]
            raise Fenced(
                f"actor {actor.name}: epoch {actor.epoch} was replaced by epoch {newest}; this process must end"
            )
        if actor in self._expelled:
            raise Expelled(
                f"actor {actor.name}: the trainer has found that its engine does not sample from the versions that "
                "its tokens name (trainer.rescore_alarm=expel). Its groups go to other actors; the trainer's log has "
                "the figures. Repair the engine before the actor is started again"
            )
        if actor in self._retirement.lives:
            raise Fenced(
                f"actor {actor.name}: epoch {actor.epoch} was silent too long and is retired; this process must end"
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

    def check_trainer(self, epoch: int) -> None:
        """Raises Fenced if a newer trainer epoch exists."""
        if epoch < self._trainer_epoch:
            raise Fenced(f"trainer epoch {epoch} was replaced by epoch {self._trainer_epoch}; this process must end")

    def register_trainer(
        self,
        epoch: int,
        step: int | None = None,
        refs: Sequence[GroupRef] = (),
        quarantined: Sequence[GroupRef] = (),
        fates: Sequence[FateRecord] = (),
    ) -> None:
        """Register a trainer with the reservation it holds, if any. A newer epoch frees all earlier reservations.

        quarantined: the groups that the trainer has quarantined at the same step. fates: the fates in the answer to
        the reservation, which the trainer commits.

        After a restart of the hub the groups of the reservation leave their current state and are reserved again,
        because the trainer may commit them, and its fates are decided again. Actors deliver unsealed groups again,
        which restores missing rows.
        """
        self.check_trainer(epoch)
        self.adopt_trainer_epoch(epoch)
        if step is None or not (refs or quarantined) or step <= self.committed_step:
            return
        if step in self._pool.reservations:
            return
        self._pool.quarantine(quarantined)
        if not refs:
            return
        summaries = {ref.group_id: self._pool.take_reserved(ref) for ref in refs}
        taken = {group_id: summary for group_id, summary in summaries.items() if summary is not None}
        self._reserve(step, list(refs), taken, is_answered=False)
        # The trainer commits these fates. If it dies first, they return to the pool with the reservation.
        for record in fates:
            self._pool.decide_by_commit(record, step)
        recorded = {record.group_id for record in fates}
        self._pool.fates = [record for record in self._pool.fates if record.group_id not in recorded]
        reservation = self._pool.reservations[step]
        reservation.answer = reservation.answer.model_copy(update={"fates": tuple(fates)})

    def reserve(
        self,
        step: int,
        epoch: int,
        lost: Iterable[tuple[int, int]] = (),
        quarantined: Sequence[GroupRef] = (),
    ) -> Reserved:
        """Reserve the groups of a step, or answer is_ready=False. Idempotent: a repeat has the same answer.

        lost: reserved groups whose rows cannot be read; they are queued and the step is reserved anew.
        quarantined: all groups that were quarantined at this step; they are decided, and the step is reserved anew.
        Raises Fenced.
        """
        self.check_trainer(epoch)
        self.adopt_trainer_epoch(epoch)
        if step <= self.committed_step:
            raise Fenced(f"step {step} is committed already (the newest is {self.committed_step})")
        reservation = self._pool.reservations.get(step)
        has_quarantined = self._pool.quarantine(quarantined)
        if reservation is not None:
            refs = reservation.refs
            gone = [group_id for group_id, attempt in lost if group_id in refs and refs[group_id].attempt == attempt]
            if not gone and not has_quarantined:
                return reservation.answer
            self._pool.requeue_lost(self._pool.reservations.pop(step), gone)
            self._undo(reservation)
        unknown = self._missing_commits(step)
        if unknown:  # after a restart, the missing commits determine which ready groups are already trained
            return Reserved(re=0, is_ready=False, reason=f"the commits of steps {unknown} have not arrived")
        self._pool.drop_stale(step)
        too_few = self._not_due(step)
        reason = too_few or self._waits_for_old_groups(step)
        if reason:
            self.waits.trainer_waits(self._clock(), is_held_back=not too_few)
            actors = {str(actor): sample.model_dump() for actor, sample in self.actor_reports.samples.items()}
            return Reserved(re=0, is_ready=False, reason=reason, ready_groups=self.num_ready, actors=actors)
        self.waits.trainer_resumes(self._clock())
        self._pool.num_filtered = 0
        summaries = {
            group_id: self._pool.ready.take(group_id) for group_id in self._pool.choose(step, self._schedule)
        }
        return self._reserve(step, [summary.ref for summary in summaries.values()], summaries, is_answered=True)

    def is_due(self, step: int) -> bool:
        """Whether enough groups that are live at a step are ready."""
        if self._missing_commits(step):
            return False
        self._pool.drop_stale(step)
        return self.num_ready >= self._schedule.needed_groups(step)

    def _missing_commits(self, step: int) -> list[int]:
        """The first three steps before `step` that are neither committed nor reserved."""
        missing = (n for n in range(self.committed_step + 1, step) if n not in self._pool.reservations)
        return list(islice(missing, 3))  # limited, since a faulty trainer may send any step

    def _not_due(self, step: int) -> str:
        """The reason if too few groups are ready for a step, else an empty string."""
        needed = self._schedule.needed_groups(step)
        if self.num_ready >= needed:
            return ""
        reason = f"{self.num_ready} of {needed} groups are ready, {self.num_leased} leased, {self.num_queued} queued"
        filtered = self._pool.num_filtered
        return f"{reason}; {filtered} were filtered, whose rewards are all equal" if filtered else reason

    def _waits_for_old_groups(self, step: int) -> str:
        """With stale=wait: the reason if a step is held back, else an empty string.

        The step waits up to wait_seconds for leased groups whose oldest token may be live at this step for the last
        time. Even older groups are not waited for: their oldest tokens are already stale.
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
        fates: Sequence[FateRecord],
        manifest: WeightManifest | None,
    ) -> bool:
        """Record the commit of a step: decide its groups and announce its version. False if it was already recorded.

        fates: all fates that the commit records. Raises ValueError if an earlier commit is missing; the caller must
        read that commit from the store first.
        """
        if step <= self.committed_step:
            self.announce(manifest)
            return False
        if step > self.committed_step + 1:
            raise ValueError(f"commit {step} follows {self.committed_step}: a commit is missing")
        pool = self._pool
        reservation = pool.reservations.pop(step, None)
        others = list(fates)
        if reservation is not None:
            others = pool.train_reserved(reservation, fates)
            pool.return_groups(reservation, list(reservation.refs))
            pool.fates = [*reservation.answer.fates, *pool.fates]
            self.actor_reports.commit_swaps(reservation.answer.swaps)
        for record in others:
            pool.decide_by_commit(record, step)
        recorded = {record.group_id for record in fates}
        pool.fates = [record for record in pool.fates if record.group_id not in recorded]
        self.committed_step = step
        self.announce(manifest)
        return True

    def announce(self, manifest: WeightManifest | None) -> None:
        """Announce a committed version; the same version may be announced again with another location."""
        if manifest is not None and self.newest_version <= manifest.version <= self.committed_step:
            self.manifest = manifest

    def adopt_trainer_epoch(self, epoch: int) -> None:
        """A newer trainer epoch than before frees all reservations; no effect for an earlier one."""
        if epoch > self._trainer_epoch:
            self._trainer_epoch = epoch
            for step in sorted(self._pool.reservations):
                self._undo(self._pool.reservations.pop(step))

    def _undo(self, reservation: Reservation) -> None:
        """Undo a reservation: return its groups, fates and swaps."""
        self._pool.return_groups(reservation, list(reservation.refs))
        self._pool.fates = [*reservation.answer.fates, *self._pool.fates]
        self.actor_reports.return_swaps(reservation.answer.swaps)

    def _reserve(
        self, step: int, refs: list[GroupRef], summaries: dict[int, GroupSummary], *, is_answered: bool
    ) -> Reserved:
        """Reserve the groups, and build the answer with everything that the commit of the step records.

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
        actors = {str(actor): self._sample(actor, tokens) for actor in self.actor_reports.samples}
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
            retired_tokens=tokens.retired_tokens(),
            swaps=tuple(swaps),
            actors=actors,
        )
        return reservation.answer

    def _tokens_before(self, step: int) -> TokenLedger:
        """The token ledger as if every earlier reserved step were committed."""
        earlier = [reservation for number, reservation in self._pool.reservations.items() if number < step]
        if not earlier:
            return self._pool.tokens
        tokens = self._pool.tokens.copy()
        for reservation in earlier:
            for group_id in reservation.refs:
                self._pool.train(reservation, group_id, tokens)
        return tokens

    def _sample(self, actor: ActorKey, tokens: TokenLedger) -> ActorSample:
        """The sample of an actor for a commit, with the counters that a restarted hub needs."""
        sample, account = self.actor_reports.samples[actor], tokens.account(actor)
        restored = {
            "settled_tokens": account.decided,
            "refused_tokens": account.refused,
            "swap_version": self.actor_reports.swap_version(actor),
        }
        return sample.model_copy(update={"counters": sample.counters.model_copy(update=restored)})
