"""A run of three steps in memory, which audits and garbage collection read."""

import numpy as np
import torch

from pipelinerl_core.data.codec import encode_batch, encode_rollouts, to_segment
from pipelinerl_core.messages import FateRecord
from pipelinerl_core.models.resolve import build_config
from pipelinerl_core.run.records import CheckpointRef, Commit, batch_key, commit_key, rollout_key
from pipelinerl_core.storage.digests import entry_of
from pipelinerl_core.training.live_state import LiveState
from pipelinerl_core.types import TrainingRow
from pipelinerl_core.weights.checkpoint import save_checkpoint
from pipelinerl_core.weights.publish import WeightPublisher
from tests.builders import put_commit, put_epoch
from tests.fakes import MemoryStore
from tests.models import publish
from tests.rollout_rows import build_rollout
from tests.synthetic_run import put_record

CONFIG = build_config({"schedule": {"max_lag": 1}, "engine": {"concurrency": 8}})
STEPS, EPOCH = 3, 2
TOKENS = 6
PER_STEP = 2 * 2 * TOKENS


def rows_of(step, *, version=None, dead=0):
    """Two groups of two rollouts, sampled by the version before the step; `dead` masked tokens in each."""
    rows = []
    for group_id in (2 * step - 2, 2 * step - 1):
        for index in range(2):
            rollout = build_rollout(
                np.random.default_rng((step, index)),
                group_id=group_id,
                rollout_index=index,
                group_size=2,
                num_tokens=TOKENS,
                first_version=step - 1 if version is None else version,
            )
            mask = np.arange(TOKENS) >= dead
            rows.append(TrainingRow(rollout=rollout, loss_mask=mask, advantage=1.0, loss_weight=0.1))
    return rows


def put_batch(store, step, rows):
    data = to_segment([encode_batch("run", step, rows)])
    key = batch_key(step, EPOCH, rank=0)
    store.put(key, data)
    return entry_of(key, data)


def commit_of(store, step):
    return Commit.model_validate_json(store.get(commit_key(step, EPOCH)))


def change(store, step, **values):
    put_record(store, commit_key(step, EPOCH), commit_of(store, step).model_copy(update=values))


def fates(step, attempt=0):
    return tuple(
        FateRecord(group_id=group_id, attempt=attempt, fate="trained", num_tokens=2 * TOKENS)
        for group_id in (2 * step - 2, 2 * step - 1)
    )


def ledger(step):
    """At the reservation of a step: those before it are trained, its own groups are ready, one is in flight."""
    trained = max(0, step - 1) * PER_STEP
    names = ("masked_stale", "dropped_stale", "filtered", "failed", "superseded")
    return {
        "generated": trained + PER_STEP + 5,
        "trained": trained,
        **dict.fromkeys(names, 0),
        "in_flight": 5,
        "ready": PER_STEP,
    }


def stored_run():
    """The store of the run; group 6 is open at its end."""
    store = MemoryStore()
    for epoch, role in ((1, "hub"), (EPOCH, "trainer")):
        put_epoch(store, epoch, role)
    publisher = WeightPublisher(store, run_id="run", epoch=EPOCH, use_shm=False)
    for step in range(STEPS + 1):
        manifest = publish(publisher, step, {"w": torch.full((2, 2), float(step))}, durable=True)
        rows = rows_of(step) if step else []
        put_commit(
            store,
            step,
            EPOCH,
            batches=(put_batch(store, step, rows),) if step else (),
            weights_digest=manifest.files[0].digest,
            manifest=manifest,
            checkpoint=CheckpointRef(step=STEPS, epoch=EPOCH) if step == STEPS else None,
            fates=fates(step) if step else (),
            next_group_id=2 * step + 1 if step else 0,
            open_groups=(2 * step,) if step else (),
            tokens=ledger(step) if step else {},
        )
        if step:
            store.put(
                rollout_key("actor-0", 1, step),
                to_segment([encode_rollouts("run", [row.rollout for row in rows[:2]])]),
            )
    save_checkpoint(store, STEPS, EPOCH, LiveState({"weights.w": torch.zeros(2, 2)}, {"version": STEPS}))
    return store
