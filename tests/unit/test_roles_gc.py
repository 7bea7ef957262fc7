"""What is removed of a run: orphans, logs of decided groups, collected rollouts; and what never is."""

import numpy as np
import pytest
import torch

from pipelinerl_core.config import build_config
from pipelinerl_core.records import (
    CheckpointRef,
    EpochRecord,
    batch_key,
    commit_key,
    epoch_key,
    partial_key,
    rollout_key,
)
from pipelinerl_core.roles.audit import Audit
from pipelinerl_core.roles.gc import collect
from pipelinerl_core.stream.codec import to_segment
from pipelinerl_core.stream.partials import encode_partials
from pipelinerl_core.takeover import PartialRow
from pipelinerl_core.training.checkpoint import save_checkpoint
from tests.unit.test_roles_audit import CONFIG, EPOCH, STEPS, change, store

__all__ = ["store"]

LONGER = build_config({"trainer": {"steps": STEPS + 5}, "schedule": {"max_lag": 1}, "engine": {"concurrency": 8}})
DONE = build_config({"trainer": {"steps": STEPS}, "schedule": {"max_lag": 1}, "engine": {"concurrency": 8}})


def put_log(store, seq, *group_ids):
    rows = [
        PartialRow(
            group_id=group_id,
            rollout_index=0,
            attempt=0,
            start=0,
            token_ids=np.zeros(0, np.int32),
            rollout_logprobs=np.zeros(0, np.float32),
            weight_spans=(),
        )
        for group_id in group_ids
    ]
    key = partial_key("actor-0", 1, seq)
    store.put(key, to_segment([encode_partials(rows)]))
    return key


def put_orphans(store):
    """A trainer of a later epoch wrote these for step 4 and died; another one, for step 2, had been fenced."""
    keys = [
        batch_key(4, 3, rank=0),
        "weights/00000004.3/model.safetensors",
        "checkpoints/00000004.3/state.safetensors",
        batch_key(2, 1, rank=0),
        "weights/00000002.1/model.safetensors",
        commit_key(STEPS + 1, EPOCH),
    ]
    for key in keys:
        store.put(key, b"x")
    record = EpochRecord(
        epoch=4, role="trainer", parent=EPOCH, adopted_through=STEPS, started_at=0.0, host="here", pid=1
    )
    store.put(epoch_key(4), record.model_dump_json().encode())  # it did not adopt the last of these
    return sorted(keys)


def everything(store):
    prefixes = ("commits", "batches", "weights", "checkpoints", "rollouts", "partials")
    return {key for prefix in prefixes for key in store.list(prefix)}


def test_orphans_go_and_everything_that_counts_stays(store):
    before = everything(store)
    orphans = put_orphans(store)
    assert collect(store, LONGER, with_rollouts=True, dry_run=True)["orphans"] == orphans
    assert everything(store) == before | set(orphans)
    collect(store, LONGER, with_rollouts=False, dry_run=False)
    assert everything(store) == before
    assert Audit(store, CONFIG).run().problems == []


def test_a_run_without_a_commit_keeps_everything(store):
    for key in store.list("commits"):
        store.delete([key])
    garbage = collect(store, LONGER, with_rollouts=True, dry_run=True)
    assert garbage == {"orphans": [], "checkpoints": [], "partials": [], "rollouts": []}


@pytest.mark.parametrize(("config", "gone"), [(LONGER, [1]), (DONE, [1, 2])])
def test_checkpoints_go_that_no_start_and_no_replay_needs(store, config, gone):
    for step in range(STEPS + 1):
        save_checkpoint(store, step, EPOCH, {"w": torch.zeros(1)}, {})
        change(store, step, checkpoint=CheckpointRef(step=step, epoch=EPOCH))
    save_checkpoint(store, STEPS + 1, EPOCH, {"w": torch.zeros(1)}, {})  # its commit is on the way
    collect(store, config, with_rollouts=False, dry_run=False)
    left = {int(key.split("/")[1].split(".")[0]) for key in store.list("checkpoints")}
    assert left == set(range(STEPS + 1)) - set(gone)
    assert Audit(store, CONFIG).run().problems == []


def test_logs_stay_while_one_of_their_groups_is_open(store):
    decided, still_open, unknown = put_log(store, 0, 0, 5), put_log(store, 1, 0, 6), put_log(store, 2, 9)
    torn = partial_key("actor-0", 1, 3)
    store.put(torn, b"torn")
    assert collect(store, LONGER, with_rollouts=False, dry_run=False)["partials"] == [decided, torn]
    assert store.list("partials") == [still_open, unknown]
    assert collect(store, DONE, with_rollouts=False, dry_run=False)["partials"] == [still_open, unknown]


@pytest.mark.parametrize(("config", "gone"), [(LONGER, [1, 2]), (DONE, [1, 2, 3])])
def test_segments_below_the_low_water_mark_go_when_asked(store, config, gone):
    change(store, STEPS, low_water={"actor-0/1": 3})
    assert "rollouts" not in collect(store, config, with_rollouts=False, dry_run=False)
    assert len(store.list("rollouts")) == STEPS
    collected = collect(store, config, with_rollouts=True, dry_run=False)["rollouts"]
    assert collected == [rollout_key("actor-0", 1, seq) for seq in gone]
    assert Audit(store, CONFIG).run().problems == []
