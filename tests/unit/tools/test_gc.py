"""What is removed of a run: orphans, logs of decided groups, collected rollouts; and what never is."""

import os
import socket

import psutil
import pytest
import torch

from pipelinerl_core.config.sections import CheckpointConfig
from pipelinerl_core.data.codec import to_segment
from pipelinerl_core.data.partials import encode_partials
from pipelinerl_core.errors import PipelineRLError, StoreError, StoreUnavailable
from pipelinerl_core.models.resolve import build_config
from pipelinerl_core.roles.hub.recovery import read_stored_state
from pipelinerl_core.run import locate
from pipelinerl_core.run.records import (
    HUB_KEY,
    CheckpointRef,
    LogRecord,
    batch_key,
    commit_key,
    log_key,
    partial_key,
    retired_key,
    rollout_key,
)
from pipelinerl_core.run.versions import remove_weights, weights_to_remove
from pipelinerl_core.storage.object_store import open_store
from pipelinerl_core.tools.audit import Audit, lines
from pipelinerl_core.tools.gc import LIVE_MARGIN, collect, delete_shared_memory, find_shared_memory
from pipelinerl_core.training.live_state import LiveState
from pipelinerl_core.weights.checkpoint import save_checkpoint
from pipelinerl_core.weights.publish import WeightPublisher
from tests.builders import hub_record, partial_row, put_commit, put_epoch
from tests.fakes import MemoryStore
from tests.models import publish
from tests.synthetic_run import Shape, put_record, write_run
from tests.unit.tools.run_case import CONFIG, EPOCH, STEPS, change, commit_of, stored_run

NOTHING = {
    name: [] for name in ("orphans", "checkpoints", "weights", "partials", "logs", "rollouts", "unfinished", "noted")
}
LONGER = build_config({"trainer": {"steps": STEPS + 5}, "schedule": {"max_lag": 1}, "engine": {"concurrency": 8}})
WITHOUT_ROWS = build_config({"trainer": {"steps": STEPS}, "store": {"keep_rows": 2}})
DONE = build_config({"trainer": {"steps": STEPS}, "schedule": {"max_lag": 1}, "engine": {"concurrency": 8}})


@pytest.fixture
def store():
    return stored_run()


def put_log(store, seq, *group_ids):
    rows = [partial_row(num=0, group_id=group_id) for group_id in group_ids]
    key = partial_key("actor-0", 1, seq)
    store.put(key, to_segment([encode_partials(rows)]))
    return key


def put_orphans(store):
    """(of steps that the run has gone past, of those that a trainer may be at): what dead or fenced trainers wrote.

    The newest commit is the one of step 3; weights of that one may be published again.
    """
    past = [
        batch_key(2, 1, rank=0),
        "checkpoints/00000003.1/state-00001.safetensors",
        commit_key(2, 1),
        "weights/00000002.1/model.safetensors",
    ]
    beyond = [
        batch_key(4, 3, rank=0),
        "checkpoints/00000004.3/state-00001.safetensors",
        commit_key(STEPS + 1, EPOCH),
        "weights/00000003.1/model.safetensors",
        "weights/00000004.3/model.safetensors",
    ]
    for key in (*past, *beyond):
        store.put(key, b"x")
    put_epoch(store, 4, parent=EPOCH, adopted_through=STEPS)  # it did not adopt the commit of step 4
    return past, beyond


def put_next_steps(store, *steps, epoch=4):
    """A trainer of a later epoch goes on."""
    for step in steps:
        publisher = WeightPublisher(store, run_id="run", epoch=epoch, use_shm=False)
        manifest = publish(publisher, step, {"w": torch.full((2, 2), float(step))}, durable=True)
        store.put(batch_key(step, epoch, rank=0), b"x")
        commit = commit_of(store, STEPS).model_copy(update={"step": step, "epoch": epoch, "manifest": manifest})
        put_record(store, commit_key(step, epoch), commit)


class BusyStore:
    """A store in which something happens once a prefix has been listed for the first time."""

    def __init__(self, store, prefix, happens):
        self._store, self._prefix, self._happens = store, prefix, happens

    def __getattr__(self, name):
        return getattr(self._store, name)

    def list(self, prefix):
        keys = self._store.list(prefix)
        if prefix == self._prefix and self._happens is not None:
            happens, self._happens = self._happens, None
            happens()
        return keys


def everything(store):
    prefixes = ("commits", "batches", "weights", "checkpoints", "rollouts", "partials")
    return {key for prefix in prefixes for key in store.list(prefix)}


def test_orphans_go_once_the_run_has_gone_past_them_and_everything_that_counts_stays(store):
    before = everything(store)
    past, beyond = put_orphans(store)
    assert collect(store, LONGER, with_rollouts=True, dry_run=True)["orphans"] == sorted(past)
    assert everything(store) == before.union(past, beyond)
    collect(store, LONGER, with_rollouts=False, dry_run=False, now=True)
    assert everything(store) == before.union(beyond)
    assert Audit(store, CONFIG).run().problems == []
    put_next_steps(store, 4, 5)
    assert collect(store, LONGER, with_rollouts=False, dry_run=True)["orphans"] == sorted(beyond)


def test_a_first_call_notes_the_objects_that_a_later_call_removes_if_they_still_are_garbage(store):
    past, _ = put_orphans(store)
    before = everything(store)
    first = collect(store, LONGER, with_rollouts=False, dry_run=False)
    assert (first["orphans"], everything(store)) == ([], before)
    assert set(past) <= set(first["noted"])
    store.delete(past[:1])
    store.put(batch_key(1, 1, rank=0), b"newer garbage")
    second = collect(store, LONGER, with_rollouts=False, dry_run=False)
    assert second["orphans"] == sorted(past[1:])
    assert second["noted"] == [batch_key(1, 1, rank=0)]
    assert collect(store, LONGER, with_rollouts=False, dry_run=False)["orphans"] == second["noted"]
    assert Audit(store, CONFIG).run().problems == []


def test_a_call_without_rollouts_keeps_the_noted_rollouts(store):
    config = build_config({"trainer": {"steps": STEPS}, "schedule": {"max_lag": 1}, "engine": {"concurrency": 8}})
    noted = collect(store, config, with_rollouts=True, dry_run=False)["noted"]
    segments = [key for key in noted if key.startswith("rollouts/")]
    assert segments
    collect(store, config, with_rollouts=False, dry_run=False)
    assert collect(store, config, with_rollouts=True, dry_run=False)["rollouts"] == segments


def test_nothing_is_removed_from_a_run_whose_listing_lacks_commits(store):
    put_orphans(store)
    before = everything(store)
    commit_bytes = store.get(commit_key(1, EPOCH))
    store.delete([commit_key(1, EPOCH)])
    with pytest.raises(StoreUnavailable, match=r"commits/00000001\.\*: the store lists no commit of step 1"):
        collect(store, LONGER, with_rollouts=True, dry_run=False, now=True)
    store.put(commit_key(1, EPOCH), commit_bytes)
    put_epoch(store, 4, parent=EPOCH, adopted_through=0)
    with pytest.raises(StoreError, match="commits of epoch 2 do not count, steps 1 to 4: epoch 4 adopted"):
        collect(store, LONGER, with_rollouts=True, dry_run=False, now=True)
    assert everything(store) == before
    assert "FAIL" in lines(Audit(store, CONFIG).run().document)[-1]


def test_orphans_of_a_run_that_is_done_go(store):
    before = everything(store)
    past, beyond = put_orphans(store)
    assert collect(store, DONE, with_rollouts=False, dry_run=False, now=True)["orphans"] == sorted([*past, *beyond])
    assert everything(store) == before


def test_nothing_is_removed_of_the_steps_that_a_run_takes_during_the_collection(store):
    put_epoch(store, 4, parent=EPOCH, adopted_through=STEPS)
    before = everything(store)
    busy = BusyStore(store, "commits", lambda: put_next_steps(store, 4, 5))
    collect(busy, LONGER, with_rollouts=False, dry_run=False, now=True)
    after = everything(store)
    assert before < after
    assert {commit_key(4, 4), commit_key(5, 4), batch_key(4, 4, rank=0), "weights/00000005.4/manifest.json"} <= after


def put_hub(store):
    process = psutil.Process()
    record = hub_record(host=socket.gethostname(), pid=process.pid, process_started_at=process.create_time())
    put_record(store, HUB_KEY, record)


@pytest.mark.parametrize("starts", [lambda store: put_epoch(store, 4, parent=EPOCH, adopted_through=STEPS), put_hub])
def test_a_run_that_starts_during_the_collection_is_left_alone(store, starts):
    store.put(batch_key(2, 1, rank=0), b"x")
    before = everything(store)
    with pytest.raises(PipelineRLError, match=r"started during the collection|this run is live"):
        collect(
            BusyStore(store, "batches", lambda: starts(store)), LONGER, with_rollouts=True, dry_run=False, now=True
        )
    assert everything(store) == before


def test_a_copy_of_a_log_goes_if_another_host_has_a_newer_one_of_the_role(store):
    figures = {"num_lines": 1, "num_warnings": 0, "num_errors": 0, "last_problem": "", "last_lines": ("a line",)}
    for at, (name, host) in enumerate([("trainer", "b"), ("actor-0", "a"), ("trainer", "c"), ("trainer", "a")]):
        put_record(store, log_key(name, host), LogRecord(name=name, host=host, at=float(at), **figures))
    older = [log_key("trainer", "b"), log_key("trainer", "c")]
    assert collect(store, LONGER, with_rollouts=False, dry_run=False)["noted"] == older
    assert collect(store, LONGER, with_rollouts=False, dry_run=False)["logs"] == older
    assert store.list("logs") == [log_key("actor-0", "a"), log_key("trainer", "a")]


def test_a_run_without_a_commit_keeps_everything(store):
    for key in store.list("commits"):
        store.delete([key])
    garbage = collect(store, LONGER, with_rollouts=True, dry_run=True)
    assert garbage == NOTHING


@pytest.mark.parametrize(
    ("config", "gone"), [(LONGER, [1]), (DONE, [1, 2, STEPS + 1]), (WITHOUT_ROWS, [1, STEPS + 1])]
)
def test_checkpoints_go_that_no_start_and_no_replay_needs(store, config, gone):
    for step in range(STEPS + 1):
        save_checkpoint(store, step, EPOCH, LiveState({"w": torch.zeros(1)}, {}))
        change(store, step, checkpoint=CheckpointRef(step=step, epoch=EPOCH))
    # Its commit is on the way, unless the run is done.
    save_checkpoint(store, STEPS + 1, EPOCH, LiveState({"w": torch.zeros(1)}, {}))
    collect(store, config, with_rollouts=False, dry_run=False, now=True)
    left = {int(key.split("/")[1].split(".")[0]) for key in store.list("checkpoints")}
    assert left == set(range(STEPS + 2)) - set(gone)
    assert Audit(store, CONFIG).run().problems == []


@pytest.mark.parametrize(("keep_every", "left"), [(0, [0, 8, 9]), (3, [0, 3, 7, 8, 9]), (6, [0, 7, 8, 9])])
def test_the_first_checkpoint_of_every_n_steps_stays(keep_every, left):
    store = MemoryStore()
    put_epoch(store, EPOCH)
    for step in range(10):
        put_commit(store, step, EPOCH)
        if step not in (1, 6):
            save_checkpoint(store, step, EPOCH, LiveState({"w": torch.zeros(1)}, {}))
    config = LONGER.model_copy(update={"checkpoint": CheckpointConfig(keep_every=keep_every)})
    collect(store, config, with_rollouts=False, dry_run=False, now=True)
    assert [int(key.split("/")[1][:8]) for key in store.list("checkpoints") if key.endswith("manifest.json")] == left


def test_a_checkpoint_that_a_drain_wrote_after_its_last_commit_stays(store):
    for step in (0, 1, STEPS):
        save_checkpoint(store, step, EPOCH, LiveState({"w": torch.zeros(1)}, {}))
    for step in range(STEPS + 1):
        change(store, step, checkpoint=CheckpointRef(step=min(step, 1), epoch=EPOCH))
    assert collect(store, LONGER, with_rollouts=False, dry_run=False, now=True)["checkpoints"] == []


def test_logs_stay_while_one_of_their_groups_is_open(store):
    decided, still_open, unknown = put_log(store, 0, 0, 5), put_log(store, 1, 0, 6), put_log(store, 2, 9)
    torn = partial_key("actor-0", 1, 3)
    store.put(torn, b"torn")
    assert collect(store, LONGER, with_rollouts=False, dry_run=False, now=True)["partials"] == [decided, torn]
    assert store.list("partials") == [still_open, unknown]
    assert collect(store, DONE, with_rollouts=False, dry_run=False, now=True)["partials"] == [still_open, unknown]


@pytest.mark.parametrize(("config", "gone"), [(LONGER, [1, 2]), (DONE, [1, 2, 3])])
def test_segments_below_the_low_water_mark_go_when_asked(store, config, gone):
    change(store, STEPS, low_water={"actor-0/1": 3})
    assert "rollouts" not in collect(store, config, with_rollouts=False, dry_run=False, now=True)
    assert len(store.list("rollouts")) == STEPS
    collected = collect(store, config, with_rollouts=True, dry_run=False, now=True)["rollouts"]
    assert collected == [rollout_key("actor-0", 1, seq) for seq in gone]
    assert Audit(store, CONFIG).run().problems == []


def test_unfinished_writes_of_killed_processes_are_counted_and_removed(tmp_path):
    store = open_store(str(tmp_path / "run"))
    source = stored_run()
    for key in everything(source) | set(source.list("epochs")):
        store.put(key, source.get(key))
    left = tmp_path / "run" / "weights" / ".tmp-77-1-0-model.safetensors"
    left.write_bytes(b"half")
    os.utime(left, (0, 0))
    for dry_run in (True, False):
        assert collect(store, LONGER, with_rollouts=False, dry_run=dry_run)["unfinished"] == [f"weights/{left.name}"]
        assert left.exists() == dry_run
    assert collect(store, LONGER, with_rollouts=False, dry_run=True)["unfinished"] == []


def test_shared_memory_of_killed_runs_is_counted_and_removed(tmp_path, monkeypatch):
    monkeypatch.setattr(locate, "SHARED_MEMORY", tmp_path / "shm")
    write_run(open_store(f"{tmp_path}/runs/r-1"), Shape(steps=1))
    left = tmp_path / "shm" / "pipelinerl-r-1"
    left.mkdir(parents=True)
    (left / "weights").write_bytes(b"12345")
    directories = find_shared_memory(f"{tmp_path}/runs")
    assert directories == {str(left): 5}
    assert delete_shared_memory(f"{tmp_path}/runs", directories) == directories
    assert not left.exists()


def test_segments_of_retired_lives_go_when_asked(store):
    change(store, STEPS, low_water={})
    assert collect(store, LONGER, with_rollouts=True, dry_run=True)["rollouts"] == []
    store.put(retired_key("actor-0", 1), b"")
    collected = collect(store, LONGER, with_rollouts=True, dry_run=False, now=True)["rollouts"]
    assert collected == [rollout_key("actor-0", 1, seq) for seq in range(1, STEPS + 1)]


def put_versions(store, num, *, epoch=EPOCH):
    """Steps 0 to `num`, from 1 with durable weights."""
    put_commit(store, 0, epoch)
    for step in range(1, num + 1):
        publisher = WeightPublisher(store, run_id="run", epoch=epoch, use_shm=False)
        manifest = publish(publisher, step, {"w": torch.full((2, 2), float(step))}, durable=True)
        put_commit(store, step, epoch, manifest=manifest, weights_digest=manifest.files[0].digest)


def versions_in(store):
    return sorted({int(key.split("/")[1].split(".")[0]) for key in store.list("weights")})


@pytest.mark.parametrize("is_live", [False, True])
def test_weights_beyond_the_kept_versions_go_and_the_audit_does_not_miss_them(is_live):
    store = MemoryStore()
    put_epoch(store, EPOCH)
    put_versions(store, 40)
    config = build_config({"weights": {"keep": 5}, "trainer": {"steps": 100}, "eval": {"num_prompts": 0}})
    store.put("weights/00000041.2/model.safetensors", b"being written")
    collected = collect(store, config, with_rollouts=False, dry_run=False, now=True, is_live=is_live)["weights"]
    assert versions_in(store) == [36, 37, 38, 39, 40, 41]
    assert len(collected) == 2 * 35
    audit = Audit(store, config).run()
    assert [text for text in (*audit.problems, *audit.damaged) if "weights" in text] == []
    store.delete(["weights/00000037.2/model.safetensors"])
    assert "00000037" in str(Audit(store, config).run().damaged)


def test_versions_of_steps_that_were_given_up_displace_no_committed_version():
    store, config = MemoryStore(), build_config({"weights": {"keep": 5}, "trainer": {"steps": 100}})
    put_epoch(store, EPOCH)
    put_versions(store, 40)
    store.delete([commit_key(step, EPOCH) for step in range(31, 41)])
    collect(store, config, with_rollouts=False, dry_run=False, now=True)
    assert 30 in versions_in(store)
    store.delete(["weights/00000030.2/model.safetensors"])
    assert "00000030" in str(Audit(store, config).run().problems)


def test_a_version_that_was_published_again_displaces_another_version_without_damage():
    store, config = MemoryStore(), build_config({"weights": {"keep": 5}, "eval": {"num_prompts": 0}})
    put_epoch(store, EPOCH)
    put_versions(store, 40)
    put_commit(store, 38, EPOCH, weights_digest="0" * 64)  # not durable; an actor could not read its weights
    remove_weights(store, weights_to_remove(config, store.list("weights"), 40))
    assert versions_in(store) == [36, 37, 38, 39, 40]
    audit = Audit(store, config).run()
    assert [text for text in (*audit.problems, *audit.damaged) if "weights" in text] == []
    assert collect(store, config, with_rollouts=False, dry_run=True)["weights"] == []


def test_a_live_run_is_collected_as_of_ten_steps_ago():
    store = MemoryStore()
    put_epoch(store, EPOCH)
    for step in range(STEPS + 20):
        marks = {"actor-0/1": step}
        put_commit(store, step, EPOCH, low_water=marks, open_groups=(step,), next_group_id=step + 1)
        for epoch in (1, EPOCH):
            store.put(batch_key(step, epoch, rank=0), b"x")
        store.put(rollout_key("actor-0", 1, step), b"x")
        put_log(store, step, step)
    put_hub(store)
    before = everything(store)
    end = STEPS + 20 - 1 - LIVE_MARGIN
    garbage = collect(store, LONGER, with_rollouts=True, dry_run=False, now=True, is_live=True)
    assert garbage["orphans"] == [batch_key(step, 1, rank=0) for step in range(end + 1)]
    assert garbage["rollouts"] == [rollout_key("actor-0", 1, seq) for seq in range(end)]
    assert garbage["partials"] == [partial_key("actor-0", 1, seq) for seq in range(end)]
    assert (garbage["checkpoints"], garbage["weights"]) == ([], [])
    assert before - everything(store) == {key for keys in garbage.values() for key in keys}


def test_a_live_run_with_few_steps_loses_nothing(store):
    for step in range(STEPS + 1):
        store.put(batch_key(step, 1, rank=0), b"x")
    garbage = collect(store, LONGER, with_rollouts=True, dry_run=True, is_live=True)
    assert garbage == NOTHING


def test_a_hub_that_starts_after_a_collection_of_a_live_run_finds_the_same_state(store):
    for step in range(STEPS + 1, STEPS + 16):
        commit = commit_of(store, STEPS).model_copy(update={"step": step, "low_water": {"actor-0/1": 3}})
        put_record(store, commit_key(step, EPOCH), commit)
    before = read_stored_state(store)
    collect(store, LONGER, with_rollouts=True, dry_run=False, now=True, is_live=True)
    after = read_stored_state(store)
    assert len(store.list("rollouts")) == 1
    assert (after.commit, after.manifest, after.sealed) == (before.commit, before.manifest, before.sealed)


def test_the_checkpoints_of_a_live_run_are_left_to_its_trainer(store):
    for step in range(STEPS + 30):
        save_checkpoint(store, step, EPOCH, LiveState({"w": torch.zeros(1)}, {}))
        put_commit(store, step, EPOCH, checkpoint=CheckpointRef(step=step, epoch=EPOCH))
    assert collect(store, LONGER, with_rollouts=False, dry_run=True)["checkpoints"] != []
    assert collect(store, LONGER, with_rollouts=False, dry_run=True, is_live=True)["checkpoints"] == []
