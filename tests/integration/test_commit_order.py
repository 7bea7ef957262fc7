"""A crash of the trainer after each single write of the commit order: nothing is lost, nothing is trained twice.

In each step of a run another trainer dies right after another write (docs/architecture.md, "One weight version"), and
its successor goes on. max_lag=0 and the deterministic engine make a run a function of its configuration, so it is
compared with an uninterrupted run to the last bit. tests/simulation has S3, failed writes and the other roles.
"""

import math
import re
import shutil
import threading
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from pipelinerl_core.data.codec import decode_batch
from pipelinerl_core.data.trained import TrainedRows
from pipelinerl_core.errors import ConfigError
from pipelinerl_core.messages import Committed, Reserve
from pipelinerl_core.roles.runtime.hub_link import HubLink
from pipelinerl_core.roles.trainer.learners import build_alone
from pipelinerl_core.roles.trainer.main import Trainer
from pipelinerl_core.run.commits import read_commits
from pipelinerl_core.run.context import open_run
from pipelinerl_core.run.history import counted_commit_keys, read_commit, read_epochs, take_over
from pipelinerl_core.storage.object_store import open_store
from pipelinerl_core.tools import replay_child
from pipelinerl_core.tools.gradient import gradient_norms
from pipelinerl_core.tools.replay import replay_run
from pipelinerl_core.weights.memory import shm_directory
from tests.integration.pipeline import BIT_FOR_BIT, SIX_STEPS, TOKEN, assert_closes, make_run, role, trained_rows

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

# step -> the write after which its trainer dies: a pattern of keys, or the message that was answered.
CRASHES: dict[int, str | type] = {
    1: Reserve,
    2: r"batches/00000002\.\d+/0000\.arrow",
    3: r"weights/00000003\.\d+/model\.safetensors",
    4: r"weights/00000004\.\d+/manifest\.json",
    5: r"checkpoints/00000005\.\d+/state-00001\.safetensors",
    6: r"checkpoints/00000006\.\d+/manifest\.json",
    7: r"commits/00000007\.\d+\.json",
    8: Committed,
    9: r"epochs/\d+\.json",
}
STEPS = 10
OVERRIDES = (*SIX_STEPS, *BIT_FOR_BIT, f"trainer.steps={STEPS}", "checkpoint.every_seconds=0.001")


@pytest.fixture(autouse=True)
def _checkpoints_are_cheap(monkeypatch):
    """One that takes long, on a busy machine, would put off the next, and with it the crash in the midst of that."""
    monkeypatch.setattr("pipelinerl_core.roles.trainer.main._CHEAP_SECONDS", math.inf)


class Crash(BaseException):
    """The process is gone: nothing it had begun goes on."""


class Fate:
    """Whether a trainer still lives."""

    def __init__(self, after: "str | type | None", step: int = 0):
        self.after, self.step, self.is_dead = after, step, False

    def check(self):
        if self.is_dead:
            raise Crash

    def wrote(self, key):
        if isinstance(self.after, str) and re.fullmatch(self.after, key):
            self.is_dead = True
        self.check()

    def sent(self, message):
        if isinstance(self.after, type) and isinstance(message, self.after) and message.step == self.step:
            self.is_dead = True
        self.check()


class MortalStore:
    """The store, as long as its trainer lives."""

    def __init__(self, store, fate):
        self._store, self._fate, self.url = store, fate, store.url

    def put(self, key, data, **more):
        self._fate.check()
        self._store.put(key, data, **more)
        self._fate.wrote(key)

    def __getattr__(self, name):
        def call(*arguments, **more):
            self._fate.check()
            return getattr(self._store, name)(*arguments, **more)

        return call


class MortalLink(HubLink):
    """The link, as long as its trainer lives; a dead one says no goodbye."""

    def __init__(self, fate, *arguments, **more):
        super().__init__(*arguments, **more)
        self._fate = fate

    def request(self, message, rows=None):
        self._fate.check()
        answer = super().request(message, rows)
        if getattr(answer, "is_ready", True):
            self._fate.sent(message)
        return answer

    def reserve(self, message):
        self._fate.check()
        answer, rows = super().reserve(message)
        if answer.is_ready:
            self._fate.sent(message)
        return answer, rows

    def close(self, *, bye=True):
        super().close(bye=bye and not self._fate.is_dead)


def train(url, fate, stop):
    """One trainer, until its end or the end of the run; a new one each time, as after a restart."""
    context = open_run(url)
    store = MortalStore(context.store, fate)
    learner = build_alone(context.config)
    epoch, commits = take_over(store)

    def link(registration):
        return MortalLink(fate, context.store, token=TOKEN, role="trainer", name="trainer", registration=registration)

    Trainer(replace(context, store=store), learner, epoch, link=link).run(commits, stop)


def run(url, log, crashes):
    torch.set_num_threads(1)
    make_run(url, *OVERRIDES)
    stop = threading.Event()
    crashed = []
    try:
        with role("hub", url, log), role("actor", url, log, "--name", "actor-0") as actor:
            for step, after in crashes.items():
                with pytest.raises(Crash):
                    train(url, Fate(after, step), stop)
                crashed.append(step)
            train(url, Fate(None), stop)
            assert actor.wait(timeout=60) == 0
    finally:
        stop.set()
        shutil.rmtree(shm_directory(Path(url).name), ignore_errors=True)
    return crashed


@pytest.fixture(scope="module")
def clean(tmp_path_factory, prepared_model):
    """URL of a run whose trainer does not die."""
    directory = tmp_path_factory.mktemp("clean")
    url = str(directory / "order-clean")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PIPELINERL_TOKEN", TOKEN)
        run(url, directory / "log", {})
    return url


def test_a_run_replays_and_has_the_gradient_of_each_rollout(clean):
    check_replays(clean)


@pytest.mark.campaign  # tests/simulation kills every role after its writes
def test_a_crash_after_each_single_write_changes_nothing(clean, tmp_path, monkeypatch):
    monkeypatch.setenv("PIPELINERL_TOKEN", TOKEN)
    crashed = str(tmp_path / "order-crashed")
    assert run(crashed, tmp_path / "crashed.log", CRASHES) == list(CRASHES)
    expected, actual = commits_of(clean), commits_of(crashed)
    assert sorted(actual) == sorted(expected) == list(range(STEPS + 1))
    assert trained_rows(crashed) == trained_rows(clean)
    for step in range(1, STEPS + 1):
        assert actual[step].metrics["train/loss"] == expected[step].metrics["train/loss"], f"step {step}"
        assert actual[step].weights_digest == expected[step].weights_digest, f"step {step}"
    for url in (clean, crashed):
        assert assert_closes(url)["groups"]["trained"] == STEPS * 4
    epochs = [record for record in read_epochs(open_store(crashed)) if record.role == "trainer"]
    assert len(epochs) == len(CRASHES) + 1
    check_replays(crashed)


def check_replays(url):
    """The recorded stream gives the recorded losses; a flow replays it alike."""
    replayed = list(replay_run(url, None, None))
    assert all(step.weights_match and step.metrics["train/loss"] == step.recorded_loss for step in replayed)
    original = open_run(url)
    document = replay_child.replay_run(original, 5, 0)
    assert (document["all_equal"], [step["step"] for step in document["steps"]]) == (True, list(range(5, STEPS + 1)))
    with pytest.raises(ConfigError, match="beyond the last step"):
        replay_child.replay_run(original, STEPS + 1, 0)
    check_gradient(url)


def check_gradient(url):
    """The gradient of a step is the recorded one; it has a part of each rollout with an advantage."""
    store = open_run(url).store
    commits = read_commits(store)
    rows = [
        (step, row)
        for step, commit in commits.items()
        for batch in TrainedRows(store).batches(commit)
        for row in decode_batch(batch)
    ]
    step, chosen = max(rows, key=lambda item: abs(item[1].advantage))
    own = chosen.rollout
    norms = gradient_norms(url, step, own.group_id, own.rollout_index)["gradient_norms"]
    assert norms["all"] == commits[step].metrics["train/grad_norm"]
    assert (norms["without"] != norms["all"]) is (chosen.advantage != 0)
    assert abs(norms["all"] - norms["without"]) <= norms["alone"] * 1.001
    with pytest.raises(ConfigError, match="has not trained rollout"):
        gradient_norms(url, step, 10**6, 0)


def commits_of(url):
    store = open_store(url)
    return {step: read_commit(store, key) for step, key in counted_commit_keys(store).items()}
