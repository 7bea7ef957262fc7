"""Publishes and commits computed steps in order, on one thread, while the trainer computes the next step.

    snapshot of the weights --> digest --> publish --> checkpoint if due --> commit --> announce

A version is announced only after its commit is written.
"""

import logging
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from pipelinerl_core.channel.refusals import error_of
from pipelinerl_core.config import RunConfig
from pipelinerl_core.data.compaction import compact_rollouts
from pipelinerl_core.errors import DeadlineExceeded, PipelineRLError, RunOver, StoreError
from pipelinerl_core.interfaces import Learner, ObjectStore
from pipelinerl_core.messages import ActorSample, Committed, LedgerSnapshot, Refused, Reserved
from pipelinerl_core.roles.runtime.hub_link import HubLink
from pipelinerl_core.roles.trainer.broadcasting import BroadcastPublisher
from pipelinerl_core.run.compaction import compact_commits, is_due
from pipelinerl_core.run.history import write_commit
from pipelinerl_core.run.reading import list_keys
from pipelinerl_core.run.records import CheckpointRef, Commit, EpochRecord, RescoredActor, commit_key
from pipelinerl_core.run.versions import remove_weights, weights_to_remove
from pipelinerl_core.types import FileEntry, WeightManifest
from pipelinerl_core.weights.checkpoint import prune_checkpoints, save_checkpoint
from pipelinerl_core.weights.files import Snapshot, take_snapshot
from pipelinerl_core.weights.publish import WeightPublisher

if TYPE_CHECKING:
    from pipelinerl_core.training.live_state import LiveState

logger = logging.getLogger(__name__)

# Longest time for the upload of one batch file.
UPLOAD_DEADLINE_SECONDS = 120.0
# Steps that are computed but not committed: one being committed, one waiting.
MAX_UNCOMMITTED = 2
_KEPT_CHECKPOINTS = 2


def stored_batch(step: int, upload: "Future[FileEntry]") -> FileEntry:
    """The batch file of a step, once it is written. Raises StoreError, DeadlineExceeded."""
    try:
        return upload.result(timeout=UPLOAD_DEADLINE_SECONDS)
    except TimeoutError:
        raise DeadlineExceeded(
            f"step {step}: its batch file was not written within {UPLOAD_DEADLINE_SECONDS:.0f} s"
        ) from None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ComputedStep:
    """A trained step, with everything that its commit needs."""

    step: int
    weights: Snapshot
    state: "LiveState | None"
    """Learner state, if a checkpoint is due."""
    batch: "Future[FileEntry] | None"
    """The upload of the batch file."""
    reserved: Reserved | None
    metrics: dict[str, float] = field(default_factory=dict)
    rescored: dict[str, RescoredActor] = field(default_factory=dict)
    reserved_at: float
    computed_at: float


class Committer:
    """Commits computed steps one after the other. The next call after a failure raises the failure."""

    def __init__(
        self,
        store: ObjectStore,
        config: RunConfig,
        *,
        run_id: str,
        epoch: EpochRecord,
        link: HubLink | None,
        committed: Callable[[Commit], None] = lambda commit: None,
    ) -> None:
        """`committed` is called with every announced step, on the thread of this object."""
        self._store = store
        self._config = config
        self._run_id = run_id
        self._epoch = epoch
        self._link = link
        self._committed = committed
        self._publisher = WeightPublisher(
            store, run_id=run_id, epoch=epoch.epoch,
            use_shm=config.weights.uses_shared_memory, use_deltas=config.uses_deltas,
        )  # fmt: skip
        self._broadcasts: BroadcastPublisher | None = None
        if config.weights.is_broadcast:
            self._broadcasts = BroadcastPublisher(store, self._publisher, config, epoch=epoch.epoch)
        self._republishing: Future[None] | None = None
        self._republished_version = -1
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="commit")
        self._pending: list[Future[Commit]] = []
        self._failure: BaseException | None = None
        """The first failure; no step is committed after a failure."""
        self._compacting = ThreadPoolExecutor(max_workers=1, thread_name_prefix="compact")
        self._checkpoint: CheckpointRef | None = None
        self.newest: Commit | None = None
        self.manifest: WeightManifest | None = None
        """Of the version that was announced last; None if the hub reads it from the commits."""
        self.counted: dict[int, str] = {}
        """Step -> key of its commit; the trainer adds those that it adopts."""
        self.checkpoint_seconds = 0.0
        """Duration of writing the newest checkpoint."""

    def adopt(self, commit: Commit) -> None:
        """Continue after a commit of an earlier epoch."""
        self._compacting.submit(self._compact)
        self.newest, self.manifest = commit, commit.manifest
        self._checkpoint = commit.checkpoint

    def snapshot(self, learner: Learner) -> Snapshot:
        """Copy the learner's weights into the memory that actors of this host read."""
        return take_snapshot(learner, self._publisher.memory)

    def republish(self, commit: Commit, weights: Snapshot) -> Commit:
        """Publish the weights of an adopted commit again, with equal bytes: its shared memory may be gone."""
        if commit.manifest is None:
            return commit
        manifest = self._publisher.publish(commit.step, weights, durable=commit.manifest.key is not None, again=True)
        self.newest, self.manifest = commit.model_copy(update={"manifest": manifest}), manifest
        return self.newest

    def submit(self, computed: ComputedStep) -> None:
        """Queue a step; blocks while MAX_UNCOMMITTED steps are not committed."""
        self._take_results(num_left=MAX_UNCOMMITTED - 1)
        self._pending.append(self._thread.submit(self._commit_next, computed))

    @property
    def is_behind(self) -> bool:
        """Whether a submitted step is not announced yet."""
        return any(not future.done() for future in self._pending)

    def flush(self) -> None:
        """Wait until every submitted step is committed."""
        self._take_results(num_left=0)

    def _take_results(self, num_left: int) -> None:
        """Wait until at most `num_left` steps are not committed; raises the first failure."""
        while self._pending and (len(self._pending) > num_left or self._pending[0].done()):
            self._pending.pop(0).result()

    def republish_if_unreadable(
        self, actors: Mapping[str, ActorSample], version: int, weights: Callable[[], Snapshot]
    ) -> None:
        """Publish the newest version durably, if an actor cannot read the version that was published last: the same,
        or with weights.publish_every an earlier one. Raises the failure of a commit.

        The trainer calls this while it waits for groups: such an actor, or a failed commit, may be the cause.

        actors: as in a reservation. weights: returns a snapshot of version `version`; called only if needed.
        """
        self._take_results(num_left=MAX_UNCOMMITTED)
        if self._republishing is not None:
            if not self._republishing.done():
                return
            self._republishing.result()  # raises its failure
            self._republishing = None
        broadcasts = self._broadcasts
        if broadcasts is not None:
            self._republishing = self._thread.submit(
                self._announce_again, lambda: broadcasts.store_if_unreachable(actors)
            )
        elif self._is_unreadable(actors, version):
            self._republished_version, snapshot = version, weights()
            logger.warning("an actor cannot read the weights: version %d is published to the store", version)
            self._republishing = self._thread.submit(
                self._announce_again, lambda: self._publisher.publish(version, snapshot, durable=True, again=True)
            )

    def _is_unreadable(self, actors: Mapping[str, ActorSample], version: int) -> bool:
        """Whether `version` is the newest commit, and a live actor cannot read the last published version."""
        if self.newest is None or self.newest.step != version:
            return False
        if version == self._republished_version:  # the sample may come from an actor that has ended since
            return False
        scheduled = next(earlier for earlier in range(version, -1, -1) if self._config.publishes(earlier))
        oldest = max((sample.at for sample in actors.values()), default=0.0) - self._config.placement.lease_seconds
        live = (sample.counters.unreadable_version for sample in actors.values() if sample.at >= oldest)
        return any(unreadable >= scheduled for unreadable in live)

    def save_state(self, learner: Learner) -> None:
        """Write a checkpoint after the newest commit, if this trainer made the commit without a checkpoint. No commit
        names the checkpoint; the next start looks for it."""
        newest = self.newest
        if newest is None or (newest.step, newest.epoch) != (learner.version, self._epoch.epoch):
            return
        if newest.checkpoint is None or newest.checkpoint.step < newest.step:
            save_checkpoint(self._store, newest.step, newest.epoch, learner.state())
            self._prune_checkpoints()

    def _prune_checkpoints(self) -> None:
        prune_checkpoints(
            self._store, self.counted, keep=_KEPT_CHECKPOINTS, keep_every=self._config.checkpoint.keep_every
        )

    def close(self) -> None:
        """Stop the thread; queued steps are not committed."""
        self._thread.shutdown(wait=False, cancel_futures=True)
        self._compacting.shutdown(wait=False, cancel_futures=True)
        if self._broadcasts is not None:
            self._broadcasts.close()

    def _publish(self, computed: ComputedStep, *, is_last: bool) -> WeightManifest:
        # The memory of a version ends with the trainer, and no start publishes a version of an earlier step again.
        outlives_step = self._config.phase_end(computed.step + 1) > computed.step + 1
        durable = self._config.keeps(computed.step) or computed.state is not None or outlives_step
        if self._broadcasts is None:
            return self._publisher.publish(computed.step, computed.weights, durable=durable)
        # No actor loads the last version: its announcement ends the actors.
        actors = computed.reserved.actors if computed.reserved is not None and not is_last else {}
        return self._broadcasts.publish(computed.step, computed.weights, durable=durable, actors=actors)

    def _announce_again(self, find: Callable[[], WeightManifest | None]) -> None:
        """Announce the newest version again if `find` returns another manifest for it."""
        if self.newest is None:
            return
        manifest = find()
        if manifest is not None:
            self.newest = self.newest.model_copy(update={"manifest": manifest})
            self._announce(self.newest, is_last=False)

    def _commit_next(self, computed: ComputedStep) -> Commit:
        """`_commit`, if the step before is committed: a gap in the commits could not be closed later."""
        try:
            newest = self.newest.step if self.newest is not None else -1
            if self._failure is not None or computed.step != newest + 1:
                reason = self._failure or f"the newest commit is {newest}"
                raise PipelineRLError(
                    f"step {computed.step} is not committed, because the step before it was not: {reason}"
                ) from self._failure
            return self._commit(computed)
        except BaseException as error:
            self._failure = self._failure or error
            raise

    def _commit(self, computed: ComputedStep) -> Commit:
        started = time.monotonic()
        step, is_last = computed.step, computed.step == self._config.trainer.steps
        manifest = None
        if self._config.publishes(step):
            manifest = self._publish(computed, is_last=is_last)
        published = time.monotonic()
        if computed.state is not None:
            save_checkpoint(self._store, step, self._epoch.epoch, computed.state)
            self.checkpoint_seconds = time.monotonic() - published
            self._checkpoint = CheckpointRef(step=step, epoch=self._epoch.epoch)
        commit = self._commit_record(computed)
        commit = commit.model_copy(
            update={
                "manifest": manifest,
                "metrics": {
                    **computed.metrics,
                    "time/commit_seconds": time.monotonic() - started,
                    "weights/published_seconds": published - started,
                    "weights/bytes": float(manifest.num_bytes if manifest else computed.weights.entry.size),
                },
                "committed_at": time.time(),
            }
        )
        write_commit(self._store, self._epoch, commit)
        self.newest = commit
        self.counted[step] = commit_key(step, self._epoch.epoch)
        self._announce(commit, is_last=is_last)
        if self._broadcasts is not None and manifest is not None and manifest.is_broadcast:
            self._announce_again(self._broadcasts.deliver)
        self._committed(commit)
        self._remove_old(commit, has_checkpoint=computed.state is not None)
        if is_due(step) or is_last:
            self._compacting.submit(self._compact)
        return commit

    def _compact(self) -> None:
        """Compact old commits and rollouts, on a thread of its own: no step waits for the requests."""
        try:
            compact_commits(self._store)
            compact_rollouts(self._store, self._config.store.keep_rows)
        except Exception as error:  # the result of this thread has no reader
            is_known = isinstance(error, StoreError)
            logger.warning("old commits or rollouts are not compacted, the trainer tries again later: %s",
                           error, exc_info=not is_known)  # fmt: skip

    def _remove_old(self, commit: Commit, *, has_checkpoint: bool) -> None:
        """Remove checkpoints and weights that the run does not keep. `gc` removes leftovers of a failed request."""
        try:
            if has_checkpoint:
                self._prune_checkpoints()
            if commit.manifest is not None and commit.manifest.key is not None:
                keys = list_keys(self._store, "weights")
                remove_weights(self._store, weights_to_remove(self._config, keys, commit.step))
        except StoreError as error:
            logger.warning("old checkpoints or weights are not removed: %s", error)

    def _commit_record(self, computed: ComputedStep) -> Commit:
        reserved = computed.reserved or Reserved(re=0, is_ready=False)  # step 0 has no reservation
        batches: tuple[FileEntry, ...] = ()
        if computed.batch is not None:
            batches = (stored_batch(computed.step, computed.batch),)
        return Commit(
            run_id=self._run_id,
            step=computed.step,
            epoch=self._epoch.epoch,
            batches=batches,
            weights_digest=computed.weights.entry.digest,
            manifest=None,
            checkpoint=self._checkpoint,
            fates=reserved.decided,
            swaps=reserved.swaps,
            actors=reserved.actors,
            rescored=computed.rescored,
            **{name: getattr(reserved, name) for name in LedgerSnapshot.model_fields},
            reserved_at=computed.reserved_at,
            computed_at=computed.computed_at,
            committed_at=time.time(),
        )

    def _announce(self, commit: Commit, *, is_last: bool) -> None:
        self.manifest = commit.manifest or self.manifest
        if self._link is None:
            return
        message = Committed(
            step=commit.step,
            epoch=self._epoch.epoch,  # also with a commit of an earlier trainer, which is announced again
            manifest=commit.manifest,
            fates=commit.fates,
            metrics=commit.metrics,
            is_last=is_last,
        )
        try:
            answer = self._link.request(message)
        except RunOver:  # the hub has received the message and ended before its answer arrived
            if not is_last:
                raise
            return
        if isinstance(answer, Refused):
            raise error_of(answer)
