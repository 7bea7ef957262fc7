"""Which commits count, reading a run while it grows, and the metrics that follow from two commits."""

import json
import re

import pytest

from pipelinerl_core.errors import MissingObject, StoreError
from pipelinerl_core.messages import ActorSample, SwapRecord
from pipelinerl_core.run.follow import Forwarder, RunFollower, commit_metrics
from pipelinerl_core.run.history import counting, read_commit
from pipelinerl_core.run.records import RUN_KEY, EpochRecord, EvalRecord, commit_key, eval_key
from pipelinerl_core.telemetry.metrics import METRICS
from pipelinerl_core.types import NO_STEP, LoggedStep
from tests.fakes import MemoryStore
from tests.synthetic_run import Shape, make_commit, put_record, write_run


class Recorder:
    """A tracker that remembers; `logged_step`: the newest step that it has from earlier."""

    def __init__(self, logged_step=NO_STEP, room=1000):
        self.logged = logged_step
        self.room = room
        self.entries = []
        self.lost_at = []

    def log(self, step, metrics, *, at=None, weights_digest=""):
        self.entries.append((step, dict(metrics)))
        self.room -= 1

    def start_over(self, step):
        self.lost_at.append(step)
        self.logged = None

    @property
    def steps(self):
        return [step for step, _ in self.entries]


def forward(follower, tracker):
    Forwarder(follower, tracker).refresh()
    return len(tracker.entries)


def keys(*pairs):
    return [commit_key(step, epoch) for step, epoch in pairs]


def epochs(adopted_through):
    """Trainer epochs, by number, and a hub's that fences nothing."""
    values = {"parent": None, "started_at": 1.0, "host": "h", "pid": 1}
    trainers = [EpochRecord(epoch=k, role="trainer", adopted_through=s, **values) for k, s in adopted_through.items()]
    return [*trainers, EpochRecord(epoch=99, role="hub", adopted_through=-1, **values)]


def test_a_later_epoch_replaces_the_commits_that_were_not_adopted():
    # Epoch 2 reached step 6, epoch 4 adopted through 5 and committed 6 itself.
    chosen = counting(keys((4, 2), (5, 2), (6, 2), (6, 4), (7, 4)), epochs({2: -1, 4: 5}))
    assert chosen == {4: commit_key(4, 2), 5: commit_key(5, 2), 6: commit_key(6, 4), 7: commit_key(7, 4)}


def test_a_fenced_commit_does_not_count_even_without_a_successor():
    assert counting(keys((5, 2), (6, 2)), epochs({2: -1, 4: 5})) == {5: commit_key(5, 2)}


def test_every_later_epoch_fences():
    # Epoch 9 adopted through 3 only, although epoch 4 had adopted 5.
    assert list(counting(keys((3, 2), (5, 2), (6, 4)), epochs({2: -1, 4: 5, 9: 3}))) == [3]


def test_commits_are_delivered_once_and_in_order(store):
    write_run(store, Shape(steps=3))
    follower = RunFollower(store)
    assert follower.refresh().steps == [0, 1, 2, 3]
    assert follower.refresh().steps == []
    put_record(store, commit_key(4, 2), make_commit(4))
    assert follower.refresh().steps == [4]
    assert follower.last.step == 4
    assert follower.before(follower.last).step == 3


def poisoned(change) -> MemoryStore:
    """A finished run whose last commit an earlier release wrote, with a number that no message may have now."""
    store = MemoryStore()
    write_run(store, Shape(steps=3))
    commit = json.loads(store.get(commit_key(3, 2)))
    change(commit)
    store.put(commit_key(3, 2), json.dumps(commit).encode())
    return store


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda commit: commit.update(next_group_id=10**400), "next_group_id: Input should be less than"),
        (lambda commit: commit["fates"][0].update(num_tokens=-1), "fates.0.num_tokens: Input should be greater"),
        (lambda commit: commit["actors"]["actor-0/1"].pop("running"), "actors.actor-0/1.running: Field required"),
    ],
)
def test_any_other_number_out_of_its_range_is_one_line_that_names_the_field(change, says):
    with pytest.raises(StoreError, match=re.escape(f"{commit_key(3, 2)} is not a valid Commit: {says}")) as caught:
        read_commit(poisoned(change), commit_key(3, 2))
    assert "\n" not in str(caught.value)


def test_a_retracted_commit_is_replaced_by_its_successor(store):
    write_run(store, Shape(steps=5), crash_at=4)
    follower = RunFollower(store)
    follower.refresh()
    assert {step: commit.epoch for step, commit in follower.commits.items()} == {0: 2, 1: 2, 2: 2, 3: 2, 4: 3, 5: 3}


def test_forward_logs_commits_and_evaluations(store):
    recorder = Recorder()
    write_run(store, Shape(steps=2))
    assert forward(RunFollower(store), recorder) == 5
    assert recorder.steps == [0, 1, 2, 0, 2]
    assert recorder.entries[3][1]["eval/accuracy"] == pytest.approx(0.12)
    declared = "|".join(re.sub("<.*?>", ".*", name) for name in METRICS)
    assert all(re.fullmatch(declared, key) for _, metrics in recorder.entries for key in metrics)


def test_an_evaluation_that_is_removed_after_the_listing_is_left_out(store, monkeypatch):
    write_run(store, Shape(steps=2))
    get = store.get

    def get_after_removal(key):
        if key == eval_key(2):
            store.delete([key])
        return get(key)

    monkeypatch.setattr(store, "get", get_after_removal)
    assert [record.version for record in RunFollower(store).refresh().evals] == [0]


def digest_of(store, step):
    return read_commit(store, commit_key(step, 2)).weights_digest


def test_steps_that_the_tracker_has_are_not_logged_again(store):
    write_run(store, Shape(steps=5))
    recorder = Recorder(LoggedStep(3, digest_of(store, 3)))
    forward(RunFollower(store), recorder)
    assert recorder.steps[:2] == [4, 5]
    assert recorder.lost_at == []


def test_nothing_is_logged_before_the_newest_step_of_the_tracker_is_known(store):
    write_run(store, Shape(steps=5))
    recorder = Recorder(None)
    forwarder = Forwarder(RunFollower(store), recorder)
    forwarder.refresh()
    assert recorder.entries == []
    recorder.logged = LoggedStep(4, digest_of(store, 4))
    assert forwarder.push()
    assert recorder.steps[0] == 5


@pytest.mark.parametrize("logged", [LoggedStep(9, "9" * 64), LoggedStep(3, "of another timeline")], ids=str)
def test_after_a_restore_of_an_older_copy_all_steps_are_logged_again_apart_from_the_lost_ones(store, logged):
    write_run(store, Shape(steps=5))
    recorder = Recorder(logged)
    forwarder = Forwarder(RunFollower(store), recorder)
    forwarder.refresh()
    assert (recorder.lost_at, recorder.entries) == ([5], [])
    assert not forwarder.push()  # the tracker has not begun again
    recorder.logged = NO_STEP
    assert forwarder.push()
    assert recorder.steps[:6] == [0, 1, 2, 3, 4, 5]
    assert recorder.lost_at == [5]


def test_entries_without_room_in_the_tracker_wait_and_are_not_lost(store):
    write_run(store, Shape(steps=5))
    recorder = Recorder(room=2)
    forwarder = Forwarder(RunFollower(store), recorder)
    forwarder.refresh()
    assert recorder.steps == [0, 1]
    while not forwarder.push():
        recorder.room = 1
    assert recorder.steps[:6] == [0, 1, 2, 3, 4, 5]
    assert len(recorder.steps) == 8  # and two evaluations


def test_a_store_that_was_never_read_is_no_older_copy():
    recorder = Recorder(LoggedStep(9, "9" * 64))
    assert Forwarder(RunFollower(MemoryStore()), recorder).push()
    assert recorder.lost_at == []


def test_sets_are_apart_and_have_metrics_of_their_own(store):
    write_run(store, Shape(steps=2))
    values = {"num_prompts": 50, "accuracy": 0.5, "mean_tokens": 4.0, "errors": 0, "seconds": 1.0}
    further = {"best": 0.8, "low": 0.4, "high": 0.6, "newest_step": 2, "components": {"right": 0.75}}
    put_record(store, eval_key(1, "hard"), EvalRecord(version=1, set="hard", num_samples=4, **values, **further))
    follower, recorder = RunFollower(store), Recorder()
    forward(follower, recorder)
    assert list(follower.evals) == [0, 2]
    assert [record.lag for record in follower.set_evals["hard"].values()] == [1]
    (metrics,) = [entry for _, entry in recorder.entries if "eval/hard/accuracy" in entry]
    assert metrics == {
        "eval/hard/accuracy": 0.5, "eval/hard/accuracy_low": 0.4, "eval/hard/accuracy_high": 0.6,
        "eval/hard/best": 0.8, "eval/hard/mean_tokens": 4.0, "eval/hard/lag": 1.0, "eval/hard/component/right": 0.75,
    }  # fmt: skip


def test_a_failed_reading_loses_no_commit(store):
    write_run(store, Shape(steps=1))
    good = store.get(eval_key(0))
    store.put(eval_key(0), b"{}")
    follower = RunFollower(store)
    with pytest.raises(StoreError, match="EvalRecord"):
        follower.refresh()
    store.put(eval_key(0), good)
    assert len(follower.refresh().steps) == 2


def test_a_record_of_another_format_is_refused_by_name(store):
    run = write_run(store, Shape(steps=1))
    put_record(store, RUN_KEY, run.model_copy(update={"format_version": 1}))
    with pytest.raises(StoreError, match="format_version 1"):
        _ = RunFollower(store).run
    with pytest.raises(MissingObject):
        _ = RunFollower(MemoryStore()).run


def test_derived_metrics_by_hand():
    def sample(at, tokens, running_seconds, version, **counters):
        return ActorSample(
            at=at, engine_version=version, running=8, waiting=0, concurrency=10, num_tokens=tokens,
            running_seconds=running_seconds,
            counters={f"environment_{name}_tokens": number for name, number in counters.items()},
        )  # fmt: skip

    def swap(pause):
        return SwapRecord(
            actor="a", actor_epoch=1, version=1, at=1.0, pause_seconds=pause, num_bytes=1, num_running=1, num_tokens=1
        )

    before = make_commit(1).model_copy(
        update={"actors": {"a/1": sample(100, 1000, 50, 0, replayed=5, dropped=2), "b/1": sample(100, 0, 0, 0)}}
    )
    commit = make_commit(2, reserved_at=200.0).model_copy(
        update={
            "actors": {
                "a/1": sample(102, 1600, 66, 1, replayed=8, dropped=2),
                "b/1": sample(104, 400, 20, 3),
                "c/1": sample(104, 9, 9, 2, replayed=40, dropped=1),
            },
            "swaps": (swap(0.004), swap(0.009)),
            "tokens": {"generated": 2009},
        }
    )
    metrics = commit_metrics(commit, before)
    assert metrics["actor/running_mean"] == pytest.approx(16 / 2 + 20 / 4)
    assert metrics["actor/tokens_per_second"] == pytest.approx(600 / 2 + 400 / 4)
    assert (metrics["weights/live_min"], metrics["weights/live_max"]) == (1, 3)
    assert metrics["swap/pause_seconds_max"] == 0.009
    assert metrics["weights/published_seconds"] == pytest.approx(0.05)
    assert metrics["tokens/generated"] == 2009
    assert (metrics["environment/replayed_tokens"], metrics["environment/dropped_tokens"]) == (3 + 40, 1)
