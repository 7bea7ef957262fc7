"""The trainer: reserves the groups of a step, trains them, and passes the new weights to the committer.

    hub --reserve, rows--> assemble --> learner.step --> Committer (publish, checkpoint, commit, announce)
              |                |             |
              |                |             +-- not finite: quarantined/<step>, then other groups are reserved
              |                +--> batches/<step> (encoded and uploaded while the learner computes)
              +-- waits only here: time/reserve_wait_seconds

Start, restart and resume share one path: adopt the last valid commit, load the newest intact checkpoint, train the
recorded batches after the checkpoint again, compare the weights with the commit, continue.
"""

import logging
import sys
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import torch.distributed as dist

from pipelinerl_core.algo.parity import ParityReport, logprob_parity
from pipelinerl_core.batching.assemble import assemble_rows
from pipelinerl_core.channel.refusals import error_of
from pipelinerl_core.config import RunConfig
from pipelinerl_core.data.codec import decode_rollouts, encode_batch, to_segment
from pipelinerl_core.emulation.accelerators import emulated_learner
from pipelinerl_core.errors import (
    DeadlineExceeded,
    HubUnavailable,
    MissingObject,
    NotReserved,
    PipelineRLError,
    RunOver,
    SchemaMismatch,
    StoreError,
    StoreUnavailable,
    StreamError,
    TrainingDiverged,
)
from pipelinerl_core.host import own_cores
from pipelinerl_core.interfaces import Learner
from pipelinerl_core.messages import Refused, Register, Reserve, Reserved, Rows
from pipelinerl_core.roles.runtime.device import model_device
from pipelinerl_core.roles.runtime.gpu_turns import trainer_turn
from pipelinerl_core.roles.runtime.hub_link import HubLink
from pipelinerl_core.roles.runtime.monitor import RoleMonitor
from pipelinerl_core.roles.runtime.process import RoleProcess, freeze_startup_objects, keep_to_cores, leave, run_role
from pipelinerl_core.roles.runtime.token_digests import token_digests
from pipelinerl_core.roles.trainer.adopt import adopt
from pipelinerl_core.roles.trainer.already_done import is_already_done
from pipelinerl_core.roles.trainer.committer import Committer, ComputedStep, stored_batch
from pipelinerl_core.roles.trainer.learners import Spread, open_learners
from pipelinerl_core.roles.trainer.own_code import load_stored_functions
from pipelinerl_core.roles.trainer.rescoring import Rescored, Rescoring
from pipelinerl_core.roles.trainer.watch import TrainerWatch
from pipelinerl_core.run.context import RunContext
from pipelinerl_core.run.drain import stop_when_drained, wants_drain
from pipelinerl_core.run.history import check_not_fenced, counted_commit_keys, read_commit, take_over
from pipelinerl_core.run.records import EpochRecord, batch_key, quarantined_key
from pipelinerl_core.storage.digests import entry_of
from pipelinerl_core.telemetry.metrics import finite, step_metrics
from pipelinerl_core.telemetry.parts import PartMetrics
from pipelinerl_core.training.live_state import LiveState
from pipelinerl_core.types import FileEntry, Float32Array, GroupKey, GroupRef, Rollout, TrainingRow, WeightManifest
from pipelinerl_core.weights.subscribe import WeightSubscriber

logger = logging.getLogger(__name__)

# Actors send rows that the hub has lost again within a few syncs.
ROWS_DEADLINE_SECONDS = 30.0
# Wait of a reservation at the hub; the second one while a step is not announced yet. The hub answers the messages of
# the trainer in order, so the announcement of new weights waits behind the reservation of the next step.
_WAIT_SECONDS = 0.5
_SHORT_WAIT_SECONDS = 0.02
# Reservations of one step; rows were lost in each reservation but the last.
_RESERVATIONS = 20
# Tries of one step. A step that fails on so many groups in a row fails because of the weights or settings.
_TRIES = 3
# Largest share of the run time for copying and writing checkpoints, unless a checkpoint takes less than a second.
_CHECKPOINT_SHARE = 0.05
_CHEAP_SECONDS = 1.0
# Rollouts compared by the parity gate, at most.
_PARITY_ROLLOUTS = 200


class _Reservation(NamedTuple):
    """The newest reservation; one object, so that a thread that registers at a new hub reads a consistent state."""

    step: int
    answer: Reserved | None
    """None between a quarantine and the next reservation."""
    quarantined: tuple[GroupRef, ...] = ()
    """The groups that were quarantined at this step."""
    tries: int = 0
    """Tries of this step whose groups were quarantined."""


class Trainer:
    """Trains the steps of a run; the process of rank 0."""

    def __init__(
        self,
        context: RunContext,
        learner: Learner,
        epoch: EpochRecord,
        *,
        link: Callable[[Callable[[], Register]], HubLink] | None = None,
        monitor: RoleMonitor | None = None,
        tokens: Mapping[str, str] | None = None,
    ) -> None:
        """tokens: `Register.tokens`; None: the hub does not compare them."""
        self._context = context
        self._token_digests = dict(tokens or {})
        self._config = context.config
        self._store = context.store
        self._learner = learner
        self._epoch = epoch
        self._reserved: _Reservation | None = None
        self._uploads = ThreadPoolExecutor(max_workers=1, thread_name_prefix="upload")
        self._link = (link or self._default_link)(self._registration)
        monitor = monitor or RoleMonitor("trainer", "trainer", context.run_id)
        self._watch = TrainerWatch(monitor, epoch.epoch)
        self._turn = partial(trainer_turn, context, monitor.heartbeat)
        self._committer = Committer(
            context.store, context.config, run_id=context.run_id, epoch=epoch, link=self._link,
            committed=self._watch.committed,
        )  # fmt: skip
        self._checkpointed_at = time.monotonic()
        self._state_seconds = 0.0
        self._started_at = time.time()
        self._samples = 0
        self._tokens = 0
        mixture = self._config.mixture
        self._parts = PartMetrics(self._config.mixture_order(), mixture) if mixture else None
        self._parity_checked = False
        self._rescoring = Rescoring(getattr(learner, "rescorer", None), context.config)
        self._start: WeightManifest | None = None  # of version 0

    def run(self, commits: dict[int, str], stop: threading.Event) -> None:
        """Train from the last commit to the last step, or until `stop` is set."""
        last = max(commits, default=-1)
        if last >= 0:
            with self._turn():
                self._adopt(commits)
        self._link.connect()
        self._watch.registered()
        try:
            if last < 0:
                self._commit_initial()
            while self._learner.version < self._config.trainer.steps and not stop.is_set():
                self._step(self._learner.version + 1, stop)
            self._committer.flush()
            if stop.is_set():
                self._save_state_if_drained()
        finally:
            self._committer.close()
            self._uploads.shutdown(wait=False, cancel_futures=True)
            self._link.close()

    def _save_state_if_drained(self) -> None:
        """A checkpoint, so that the next start trains no step again. After SIGTERM there is no time for it."""
        try:
            if wants_drain(self._store):
                with self._turn():
                    self._committer.save_state(self._learner)
        except (PipelineRLError, OSError) as error:
            logger.warning("the drain writes no checkpoint, so the next start trains some steps again: %s", error)

    def _adopt(self, commits: dict[int, str]) -> None:
        self._committer.counted.update(commits)
        commit = adopt(self._store, self._learner, commits, self._config, self._watch.replayed)
        self._committer.adopt(commit)
        weights = self._committer.snapshot(self._learner)
        self._rescoring.adopt(commit.metrics)
        self._rescoring.published(commit.step, weights.tensors)
        self._committer.republish(commit, weights)
        self._samples = int(commit.metrics.get("progress/samples", 0))
        self._tokens = int(commit.metrics.get("progress/tokens", 0))
        if self._parts is not None:
            self._parts.adopt(commit.metrics)
        first = read_commit(self._store, commits[min(commits)])
        self._started_at = first.committed_at
        self._start = first.manifest

    def _commit_initial(self) -> None:
        """Commit 0: the weights every run starts from, durable, with a checkpoint."""
        now, weights = time.time(), self._committer.snapshot(self._learner)
        self._rescoring.published(0, weights.tensors)
        self._committer.submit(
            ComputedStep(
                step=0,
                weights=weights,
                state=self._learner.state(),
                batch=None,
                reserved=None,
                reserved_at=now,
                computed_at=now,
            )
        )
        self._committer.flush()
        assert self._committer.newest is not None
        self._start = self._committer.newest.manifest

    def _divergence(self, step: int, rows: list[TrainingRow]) -> dict[str, float]:
        """`Rescoring.divergence` after a step whose version is evaluated."""
        is_evaluated = self._config.evaluates(step) or step == self._config.trainer.steps
        start = self._start
        if start is None or not is_evaluated or not self._config.eval.num_prompts:
            return {}
        try:
            return finite(self._rescoring.divergence(lambda: WeightSubscriber(self._store).read(start), rows))
        except StoreError as error:
            logger.warning("step %d: the divergence from version 0 is not measured: %s", step, error)
            return {}

    def _default_link(self, registration: Callable[[], Register]) -> HubLink:
        return HubLink(
            self._store, token=self._context.token, role="trainer", name="trainer", registration=registration
        )

    def _registration(self) -> Register:
        newest, reserved = self._committer.newest, self._reserved
        if reserved is not None and newest is not None and reserved.step <= newest.step:
            reserved = None  # it is committed
        return Register(
            role="trainer",
            name="trainer",
            epoch=self._epoch.epoch,
            tokens=self._token_digests,
            step=reserved.step if reserved else None,
            reservation=reserved.answer.groups if reserved and reserved.answer else (),
            quarantined=reserved.quarantined if reserved else (),
            fates=reserved.answer.fates if reserved and reserved.answer else (),
            committed_step=newest.step if newest else -1,
            manifest=self._committer.manifest,
        )

    def _step(self, step: int, stop: threading.Event) -> None:
        """Train and submit a step. If its loss or gradient is not finite, its groups are quarantined instead."""
        waited_from = time.time()
        reserved_rows = self._reserve_rows(step, stop)
        if reserved_rows is None:
            return
        with self._turn():
            computed = self._compute(step, *reserved_rows, waited_from)
        if computed is not None:
            self._committer.submit(computed)  # may wait for earlier commits

    def _compute(
        self, step: int, reserved: Reserved, groups: list[list[Rollout]], waited_from: float
    ) -> ComputedStep | None:
        """The step on the reserved groups, for the committer; None if its loss or gradient is not finite.

        waited_from: start of the wait for the groups, Unix seconds.
        """
        reserved_at, began = time.time(), time.perf_counter()
        self._watch.computing(step)
        assembled = assemble_rows(step, groups, self._config)
        rows = assembled.rows
        keeps_logprobs = self._config.store.trainer_logprobs
        key = batch_key(step, self._epoch.epoch, rank=0)
        upload = None if keeps_logprobs else self._uploads.submit(self._store_rows, key, step, rows)
        self._pass_parity_gate(rows)
        rescored = self._rescore(rows, reserved)
        try:
            learned = self._learner.step(rows)
        except TrainingDiverged as error:
            if upload is not None:  # a write that failed may arrive late, and replace the rows of the next try
                stored_batch(step, upload)
            self._quarantine(step, reserved, rows, error)
            return None
        computed_at, worked_seconds = time.time(), time.perf_counter() - began
        if upload is None:
            rows = _with_logprobs(rows, self._learner.trainer_logprobs)
            upload = self._uploads.submit(self._store_rows, key, step, rows)
        self._samples += len(rows)
        self._tokens += sum(row.rollout.num_tokens for row in rows)
        metrics = step_metrics(
            learned,
            rows,
            step=step,
            masked_stale=assembled.num_masked_stale,
            overlong_fraction=assembled.overlong_fraction,
            num_errors=assembled.num_errors,
            reserve_wait_seconds=reserved_at - waited_from,
            samples=self._samples,
            tokens=self._tokens,
            seconds=computed_at - self._started_at,
        )
        metrics |= rescored.metrics
        metrics["time/prepare_seconds"] = worked_seconds - metrics["time/compute_seconds"]
        metrics["time/cpu_seconds"] = time.process_time()
        metrics["train/quarantined_groups"] = len(self._held(step).quarantined)
        if self._parts is not None:
            metrics |= self._parts.step(groups, reserved.fates)
        copied_from = time.perf_counter()
        weights = self._committer.snapshot(self._learner)
        metrics["weights/copy_seconds"] = time.perf_counter() - copied_from
        self._rescoring.published(step, weights.tensors)
        metrics |= self._divergence(step, rows)
        self._watch.computed(step, rows, metrics, (waited_from, reserved_at, computed_at))
        logger.info("step %d: reward %.3f loss %.4f", step, metrics["reward/mean"], metrics["train/loss"])
        return ComputedStep(
            step=step,
            weights=weights,
            state=self._state_if_due(step),
            batch=upload,
            reserved=reserved,
            metrics=metrics,
            rescored=rescored.actors,
            reserved_at=reserved_at,
            computed_at=computed_at,
        )

    def _quarantine(self, step: int, reserved: Reserved, rows: list[TrainingRow], error: TrainingDiverged) -> None:
        """Store the rows of a step that was not taken, and note its groups for the next reservation.

        The rows are stored first: a group with the fate `quarantined` has its rows in the store. Raises
        TrainingDiverged after the last try of the step.
        """
        held = self._held(step)
        number = held.tries + 1
        key = quarantined_key(step, self._epoch.epoch, number)
        self._store_rows(key, step, rows)
        if number == _TRIES:
            raise TrainingDiverged(
                f"{error}. {_TRIES} tries in a row failed, each on other groups; their rows are in "
                f"{self._store.url}/{key.rpartition('/')[0]}/. `pipelinerl resume` continues after step {step - 1}; "
                "with other settings, start a new run from the weights of `pipelinerl export`"
            )
        self._reserved = _Reservation(step, None, (*held.quarantined, *reserved.groups), number)
        self._watch.quarantined(len(reserved.groups))
        logger.error("%s. Its %d groups are quarantined, their rows are in %s; other groups are reserved",
                     error, len(reserved.groups), key)  # fmt: skip

    def _held(self, step: int) -> _Reservation:
        """The newest reservation of a step, with the groups quarantined at this step; empty before the first."""
        reservation = self._reserved
        return reservation if reservation is not None and reservation.step == step else _Reservation(step, None)

    def _reserve_rows(self, step: int, stop: threading.Event) -> tuple[Reserved, list[list[Rollout]]] | None:
        """The groups of a step with their rollouts; None if `stop` is set while waiting.

        Groups whose rows are lost, because their segment is damaged, are returned to the hub and replaced by others.
        """
        lost: tuple[GroupKey, ...] = ()
        for _ in range(_RESERVATIONS):
            answer = self._reserve(step, stop, lost)
            if answer is None:
                return None
            reserved, at_hand = answer
            keys = tuple((ref.group_id, ref.attempt) for ref in reserved.groups)
            try:
                return reserved, self._rows(step, keys, at_hand)
            except (HubUnavailable, RunOver):
                raise
            except NotReserved as error:  # a hub that has just started, or one with a newer trainer
                logger.warning("the step is reserved again: %s", error)
            except (StreamError, MissingObject) as error:
                lost = tuple(key for key in keys if self._is_lost(step, key))
                logger.error("step %d: rows of %s are lost and generated again: %s", step, list(lost), error)
        raise MissingObject(f"step {step}: rows were lost {_RESERVATIONS} times in a row. Look at the hub's log")

    def _is_lost(self, step: int, key: GroupKey) -> bool:
        try:
            self._link.request_rows(Rows(step=step, groups=(key,)))
        except (SchemaMismatch, MissingObject):
            return True
        except NotReserved:
            pass
        return False

    def _reserve(
        self, step: int, stop: threading.Event, lost: tuple[GroupKey, ...]
    ) -> tuple[Reserved, dict[GroupKey, pa.RecordBatch]] | None:
        """The groups of a step, and the rows in the hub's answer; None if `stop` is set while waiting."""
        # If no further group is ready for this long while the hub answers, all actors have ended or all groups fail.
        deadline = time.monotonic() + self._config.group_seconds
        reason, most_ready = "", 0
        while not stop.is_set():
            self._watch.waiting(step)
            held = self._held(step)
            answer, received = self._link.reserve(self._reserve_message(step, lost, held.quarantined))
            if isinstance(answer, Refused):
                raise error_of(answer)
            if isinstance(answer, Reserved) and answer.is_ready:
                self._reserved = held._replace(answer=answer)
                return answer, {(header.group_id, header.attempt): batch for header, batch in received}
            if isinstance(answer, Reserved):
                reason = answer.reason
                self._committer.republish_if_unreadable(
                    answer.actors, self._learner.version, lambda: self._committer.snapshot(self._learner)
                )
                if answer.ready_groups > most_ready:  # a long phase may fill slowly
                    most_ready = answer.ready_groups
                    deadline = time.monotonic() + self._config.group_seconds
            if time.monotonic() > deadline:
                raise DeadlineExceeded(
                    f"step {step}: no {self._config.trainer.groups_per_step} groups within "
                    f"{self._config.group_seconds:.0f} s ({reason}). Look at the actors' logs"
                )
        return None

    def _rows(
        self, step: int, keys: tuple[GroupKey, ...], at_hand: dict[GroupKey, pa.RecordBatch]
    ) -> list[list[Rollout]]:
        """The rollouts of reserved groups, in the order of the reservation; requests rows that are not `at_hand`.

        Raises MissingObject if rows are missing after ROWS_DEADLINE_SECONDS, SchemaMismatch if rows are damaged.
        """
        deadline = time.monotonic() + ROWS_DEADLINE_SECONDS
        while missing := tuple(key for key in keys if key not in at_hand):
            try:
                received = self._link.request_rows(Rows(step=step, groups=missing))
            except (StreamError, MissingObject, StoreUnavailable) as error:
                is_final = isinstance(error, SchemaMismatch | NotReserved | HubUnavailable | RunOver)
                if is_final or time.monotonic() > deadline:
                    raise
                logger.warning("step %d: rows are not available yet: %s", step, error)
                time.sleep(0.2)
                continue
            at_hand |= {(header.group_id, header.attempt): batch for header, batch in received}
        return [decode_rollouts(at_hand[key]) for key in keys]

    def _store_rows(self, key: str, step: int, rows: list[TrainingRow]) -> FileEntry:
        data = to_segment([encode_batch(self._context.run_id, step, rows)])
        self._store.put(key, data)
        return entry_of(key, data)

    def _state_if_due(self, step: int) -> LiveState | None:
        """The learner's state if a checkpoint is due, else None. Expensive checkpoints are due less often."""
        now = time.monotonic()
        pause_seconds = self._config.checkpoint.every_seconds
        spent_seconds = self._state_seconds + self._committer.checkpoint_seconds
        if spent_seconds > _CHEAP_SECONDS:
            pause_seconds = max(pause_seconds, spent_seconds / _CHECKPOINT_SHARE)
        if now - self._checkpointed_at < pause_seconds and step != self._config.trainer.steps:
            return None
        self._checkpointed_at = now
        state = self._learner.state()
        self._state_seconds = time.monotonic() - now
        return state

    def _reserve_message(self, step: int, lost: tuple[GroupKey, ...], quarantined: tuple[GroupRef, ...]) -> Reserve:
        expelled = tuple(sorted(self._rescoring.expelled))
        return Reserve(
            step=step,
            epoch=self._epoch.epoch,
            wait_seconds=_SHORT_WAIT_SECONDS if self._committer.is_behind else _WAIT_SECONDS,
            lost=lost,
            quarantined=quarantined,
            expelled=expelled,
        )

    def _rescore(self, rows: list[TrainingRow], reserved: Reserved) -> Rescored:
        epochs = {(ref.group_id, ref.attempt): ref.actor_epoch for ref in reserved.groups}
        return self._rescoring.rescore(self._learner.version, rows, epochs, reserved.actors)

    def _pass_parity_gate(self, rows: list[TrainingRow]) -> None:
        """Once per start, compare engine and trainer on tokens of the current version without older context."""
        version = self._learner.version
        # No token is newer than the trainer's version, so a rollout without older context has this version only.
        fresh = [row.rollout for row in rows if [span.version for span in row.rollout.weight_spans] == [version]]
        if fresh and not self._parity_checked:
            compared = fresh[:_PARITY_ROLLOUTS]
            scores = self._learner.logprobs_of(compared)
            check_parity(compared, scores, self._config)
            self._rescoring.measure(compared, scores)
            self._parity_checked = True


def _with_logprobs(rows: list[TrainingRow], logprobs: list[Float32Array | None] | None) -> list[TrainingRow]:
    """The rows with the log-probabilities that the learner computed in their step."""
    assert logprobs is not None
    return [replace(row, trainer_logprobs=own) for row, own in zip(rows, logprobs, strict=True)]


def check_parity(rollouts: list[Rollout], scores: list[Float32Array], config: RunConfig) -> ParityReport:
    """Apply the parity gate to rollouts sampled with the learner's weights. Raises ParityError beyond the bound.

    scores: the learner's log-probabilities of the completion tokens of each rollout.
    """
    is_sampled = np.concatenate([rollout.loss_mask for rollout in rollouts])
    trainer_logprobs = np.concatenate(scores)[is_sampled]
    rollout_logprobs = np.concatenate([rollout.rollout_logprobs for rollout in rollouts])[is_sampled]
    report = logprob_parity(rollout_logprobs, trainer_logprobs, config.dtype)
    logger.info("parity gate: %s", report)
    return report.check()


def _train(own: RoleProcess) -> None:
    keep_to_cores(own_cores(own.context.config, "trainer"))
    train(own.context, own.stop, own.monitor)


def main() -> int:
    """Command line of the role."""
    return run_role("trainer", "The trainer of a run.", _train)


def train(context: RunContext, stop: threading.Event, monitor: RoleMonitor) -> None:
    """Resume from the last commit, or start, and train until the last step or `stop`.

    If no step is left, return before anything is loaded: ranks on other hosts may have ended, and this start would
    wait for them in vain.
    """
    if is_already_done(context, counted_commit_keys(context.store), stop):
        return
    load_stored_functions(context)
    # Steps of a GPU do not repeat to the last bit: with device=auto a host without the GPU must know of it.
    on_gpu = {"device": "cuda"} if model_device(context.config).type == "cuda" else {}
    epoch, commits = take_over(context.store, context.config.arithmetic | on_gpu)
    if is_already_done(context, commits, stop):  # the previous trainer has committed in the meantime
        return
    spread = Spread(nodes=context.config.placement.trainer_nodes, store=context.store, epoch=epoch.epoch)
    try:
        with open_learners(context.store.url, context.config.trainer.ranks, spread) as learners:
            with trainer_turn(context, monitor.heartbeat):
                learner = emulated_learner(learners.build(context.config), context.config)
            trainer = Trainer(context, learner, epoch, monitor=monitor, tokens=token_digests(context.config))
            freeze_startup_objects()
            stop_when_drained(context.store, stop)
            trainer.run(commits, stop)
    except PipelineRLError:
        # A newer trainer may have taken the ranks, removed what this trainer reads, or ended the run: exit as fenced,
        # because another start of this trainer would take the ranks back.
        try:
            check_not_fenced(context.store, epoch)
        except StoreError as unknown:
            logger.warning("whether a newer trainer has the run is not known: %s", unknown)
        raise


if __name__ == "__main__":
    code = main()
    if dist.is_initialized():  # a rank was lost: gloo's threads wait for the rank, and to end them here would abort
        leave(code)
    sys.exit(code)
