"""Where a restart begins: at the newest whole checkpoint."""

import logging
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch

from pipelinerl_core.errors import ConfigError, MissingObject, StoreUnavailable
from pipelinerl_core.models.resolve import load_config
from pipelinerl_core.roles.trainer import retrain
from pipelinerl_core.roles.trainer.retrain import inexact_steps, replay_steps, restore
from pipelinerl_core.run.history import take_epoch
from pipelinerl_core.run.records import CheckpointRef
from pipelinerl_core.tools import replay
from pipelinerl_core.training.live_state import LiveState
from pipelinerl_core.weights.checkpoint import save_checkpoint
from tests.builders import put_commit
from tests.fakes import MemoryStore

EPOCH = 2
CHECKPOINTS = (0, 2, 4)


class Learner:
    def __init__(self):
        self.version = -1

    def load_state(self, files, values):
        assert [int(tensors["w"][0]) for tensors in files] == [values["version"]]
        self.version = values["version"]


@pytest.fixture
def run():
    store, commits = MemoryStore(), {}
    for step in range(6):
        if step in CHECKPOINTS:
            save(store, step, EPOCH)
        newest = max(checkpoint for checkpoint in CHECKPOINTS if checkpoint <= step)
        commits[step] = put_commit(store, step, EPOCH, checkpoint=CheckpointRef(step=newest, epoch=EPOCH))
    return store, commits


def restored(run, step=5):
    learner = Learner()
    restore(run[0], learner, run[1], step)
    return learner.version


def flip(store, step):
    key = f"checkpoints/{step:08d}.{EPOCH}/state-00001.safetensors"
    data = bytearray(store.get(key))
    data[-1] ^= 1
    store.put(key, bytes(data))


def test_the_newest_checkpoint_at_or_before_a_step_is_loaded(run):
    assert [restored(run, step) for step in range(6)] == [0, 0, 2, 2, 4, 4]


def test_a_damaged_checkpoint_costs_a_longer_replay_and_no_more(run, caplog):
    caplog.set_level(logging.ERROR)
    store = run[0]
    flip(store, 4)
    assert restored(run) == 2
    assert "checkpoint of step 4 left out" in caplog.text
    store.delete([f"checkpoints/00000002.{EPOCH}/state-00001.safetensors"])  # its manifest is still there
    assert restored(run) == 0
    store.put(f"checkpoints/00000000.{EPOCH}/manifest.json", b"{")
    with pytest.raises(ConfigError, match="no intact checkpoint at or before step 5"):
        restored(run)


def save(store, step, epoch):
    save_checkpoint(store, step, epoch, LiveState({"w": torch.full((4,), float(step))}, {"version": step}))


def test_a_checkpoint_that_no_commit_names_is_loaded_if_its_step_counts(run):
    """A drain writes it after its last commit."""
    store = run[0]
    save(store, 3, EPOCH)
    save(store, 5, EPOCH + 1)  # of a trainer whose step 5 does not count
    assert [restored(run, step) for step in range(6)] == [0, 0, 2, 3, 4, 4]
    flip(store, 4)
    assert restored(run) == 3


def test_a_checkpoint_that_a_wrong_listing_lacks_is_loaded_by_its_name_in_a_commit(run, monkeypatch):
    monkeypatch.setattr(run[0], "list", lambda prefix: [])
    assert restored(run) == 4


@pytest.mark.parametrize("version", [4, 5])
def test_a_gpu_trains_no_step_again_for_a_version(run, monkeypatch, version):
    config = SimpleNamespace(trainer=SimpleNamespace(ranks=1))
    context = SimpleNamespace(store=run[0], config=config)
    learners = SimpleNamespace(build=lambda config: Learner())
    for name, value in {
        "load_stored_functions": lambda context: None,
        "counted_commit_keys": lambda store: run[1],
        "open_learners": lambda url, ranks: nullcontext(learners),
        "model_device": lambda config: torch.device("cuda"),
        "stored_versions": lambda store: {0, 2, 4},
        "take_snapshot": lambda learner: SimpleNamespace(entry=SimpleNamespace(digest="same")),
    }.items():
        monkeypatch.setattr(replay, name, value)
    commit = SimpleNamespace(step=version, weights_digest="same")
    if version == 4:  # its checkpoint has its state
        assert replay.replayed_weights(context, commit).entry.digest == "same"
    else:
        with pytest.raises(ConfigError, match=r"version 5: its weights are not stored.*a stored version: 0, 2, 4"):
            replay.replayed_weights(context, commit)


def test_a_store_that_does_not_answer_is_no_damaged_checkpoint(run, monkeypatch):
    """Seed 1215 of the simulation: the trainer gave up with exit code 2, although its checkpoint was intact."""
    get = run[0].get

    def fails(key):
        if key.startswith("checkpoints/00000004"):
            raise StoreUnavailable("timed out")
        return get(key)

    monkeypatch.setattr(run[0], "get", fails)
    with pytest.raises(StoreUnavailable):
        restored(run)
    monkeypatch.undo()
    assert restored(run) == 4


def test_steps_of_another_arithmetic_and_all_steps_of_a_gpu_are_close_at_best(run, monkeypatch):
    store, commits = run
    config = load_config("quickstart")
    assert inexact_steps(store, commits, config) == []  # nothing says how they were computed
    other = load_config("quickstart", ["trainer.pack_tokens=64"]).arithmetic
    while take_epoch(store, "trainer", -1, other).epoch < EPOCH:
        pass
    assert inexact_steps(store, commits, config) == list(range(6))
    assert inexact_steps(store, commits, load_config("quickstart", ["trainer.pack_tokens=64"])) == []
    with monkeypatch.context() as elsewhere:
        elsewhere.setattr(retrain, "processor", lambda: "another processor")
        assert inexact_steps(store, commits, load_config("quickstart", ["trainer.pack_tokens=64"])) == list(range(6))
    monkeypatch.setattr(retrain, "model_device", lambda _: torch.device("cuda"))
    assert inexact_steps(store, commits, load_config("quickstart", ["trainer.pack_tokens=64"])) == list(range(6))


def test_a_commit_that_is_missing_is_one_line_before_anything_is_trained(run):
    store, commits = run
    learner = Learner()
    learner.version = 0
    del commits[2]
    with pytest.raises(MissingObject, match=r"step 2 has no commit, and step 3 .* accept-loss .* after step 1$"):
        next(replay_steps(store, learner, commits, 5))
