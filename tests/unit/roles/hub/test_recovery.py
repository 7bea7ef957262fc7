"""What a starting hub reads of the store."""

import numpy as np

from pipelinerl_core.data.codec import encode_rollouts, to_segment
from pipelinerl_core.ledger import ActorKey
from pipelinerl_core.roles.hub.recovery import read_stored_state
from pipelinerl_core.roles.hub.retiring import RetiringThread
from pipelinerl_core.run.records import retired_key, rollout_key
from pipelinerl_core.storage.local import FileStore
from tests.builders import put_commit, put_epoch, weight_manifest
from tests.counting_store import CountingStore
from tests.rollout_rows import build_rollout


def put_segment(store, actor, epoch, seq, group_id):
    rollouts = [
        build_rollout(
            np.random.default_rng(index), group_id=group_id, rollout_index=index, group_size=2, num_tokens=5
        )
        for index in range(2)
    ]
    store.put(rollout_key(actor, epoch, seq), to_segment([encode_rollouts("run", rollouts)]))


def test_segments_of_retired_lives_are_not_read(store):
    put_epoch(store, 1)
    for step in range(3):
        put_commit(store, step)
    put_commit(store, 3, low_water={"actor-0/9": 4}, manifest=weight_manifest(3), next_group_id=9)
    for seq in range(6):
        put_segment(store, "actor-0", 9, seq, group_id=seq)
    for seq in range(20):
        put_segment(store, "actor-0", 5, seq, group_id=seq)
    put_segment(store, "actor-1", 5, 0, group_id=9)  # a life that is not in the commit yet
    store.put(retired_key("actor-0", 5), b"")
    counting = CountingStore(store)
    past = read_stored_state(counting)
    assert past.retired == {ActorKey("actor-0", 5)}
    assert {(group.summary.actor.name, group.seq) for group in past.sealed} == {
        ("actor-0", 4),
        ("actor-0", 5),
        ("actor-1", 0),
    }
    assert counting.requests["get rollouts"] == 3


def test_a_segment_that_vanishes_after_the_listing_does_not_end_the_start(store, monkeypatch):
    put_epoch(store, 1)
    put_commit(store, 0, manifest=weight_manifest(0), next_group_id=3)
    for seq in range(3):
        put_segment(store, "actor-0", 9, seq, group_id=seq)
    get, gone = store.get, rollout_key("actor-0", 9, 1)

    def vanish(key):
        if key == gone:
            store.delete([gone])
        return get(key)

    monkeypatch.setattr(store, "get", vanish)
    assert [group.seq for group in read_stored_state(store).sealed] == [0, 2]


class FakeHub:
    """Notes which lives left the ledger."""

    def __init__(self, lives):
        self.lives = lives
        self.retired = []

    def lives_to_retire(self):
        return self.lives

    def retire(self, lives):
        self.retired += lives


def test_a_life_leaves_the_ledger_after_its_object_is_written(tmp_path, caplog):
    lives = [ActorKey("actor-0", 1), ActorKey("actor-1", 1), ActorKey("actor-2", 1)]
    (tmp_path / "retired").mkdir()
    (tmp_path / "retired" / "actor-1").write_text("in the way")
    hub = FakeHub(lives)
    RetiringThread(hub, FileStore(tmp_path, retry_seconds=0)).retire(lives)
    assert hub.retired == lives[:1]
    assert "actor-1/1 is not retired yet" in caplog.text
    (tmp_path / "retired" / "actor-1").unlink()
    RetiringThread(hub, FileStore(tmp_path)).retire(lives[1:])
    assert hub.retired == lives
    assert FileStore(tmp_path).list("retired") == [retired_key(*actor) for actor in lives]
