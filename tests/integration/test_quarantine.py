"""A step whose loss is not finite: its groups are quarantined, and a crash after each write of that changes nothing.

The learner gets an advantage that is not a number in chosen groups. max_lag=0 and the deterministic engine make a run
a function of its configuration and these groups, so a run with crashes is compared with one without to the last bit.
"""

import math
import shutil
import threading
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from pipelinerl_core.data.codec import decode_batch, from_segment
from pipelinerl_core.errors import TrainingDiverged
from pipelinerl_core.messages import Committed, Reserve
from pipelinerl_core.roles.trainer.learners import build_alone
from pipelinerl_core.roles.trainer.main import Trainer
from pipelinerl_core.run.context import open_run
from pipelinerl_core.run.history import take_over
from pipelinerl_core.storage.object_store import open_store
from pipelinerl_core.tools.gc import collect
from pipelinerl_core.tools.replay import replay_run
from pipelinerl_core.weights.memory import shm_directory
from tests.integration.pipeline import BIT_FOR_BIT, SIX_STEPS, TOKEN, assert_closes, make_run, role, trained_rows
from tests.integration.test_commit_order import Crash, Fate, MortalLink, MortalStore, commits_of

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

STEPS = 4
OVERRIDES = (*SIX_STEPS, *BIT_FOR_BIT, f"trainer.steps={STEPS}", "checkpoint.every_seconds=0.001")
# With four groups in each try: step 2 is taken at the second try, step 3 at the third, step 4 at the second.
BAD_GROUPS = {5, 13, 18, 25}
QUARANTINED = {2: [*range(4, 8)], 3: [*range(12, 20)], 4: [*range(24, 28)]}


@pytest.fixture(autouse=True)
def _checkpoints_are_cheap(monkeypatch):
    monkeypatch.setattr("pipelinerl_core.roles.trainer.main._CHEAP_SECONDS", math.inf)


class FaultyLearner:
    """A learner whose advantages in some groups are not numbers."""

    def __init__(self, learner, bad_groups, on_step):
        self._learner, self._bad, self._on_step = learner, bad_groups, on_step

    def step(self, rows):
        groups = [row.rollout.group_id for row in rows]
        self._on_step(self._learner.version + 1, groups)
        faulty_rows = [replace(row, advantage=math.nan) if row.rollout.group_id in self._bad else row for row in rows]
        return self._learner.step(faulty_rows)

    def __getattr__(self, name):
        return getattr(self._learner, name)


class QuarantineCrash(Fate):
    """The trainer dies after its first reservation with quarantined groups."""

    def __init__(self):
        super().__init__(None)

    def sent(self, message):
        if isinstance(message, Reserve) and message.quarantined:
            self.is_dead = True
        self.check()


def train(url, fate, stop, bad_groups=frozenset(BAD_GROUPS), on_step=lambda step, groups: None):
    context = open_run(url)
    learner = FaultyLearner(build_alone(context.config), bad_groups, on_step)
    store = MortalStore(context.store, fate)
    epoch, commits = take_over(store)

    def link(registration):
        return MortalLink(fate, context.store, token=TOKEN, role="trainer", name="trainer", registration=registration)

    Trainer(replace(context, store=store), learner, epoch, link=link).run(commits, stop)


CRASHES = {
    "the rows of a first try are stored": lambda: Fate(r"quarantined/00000002\.\d+/0001\.arrow"),
    "the hub has decided them": QuarantineCrash,
    "the commit names them": lambda: Fate(r"commits/00000002\.\d+\.json"),
    "the rows of a second try are stored": lambda: Fate(r"quarantined/00000003\.\d+/0002\.arrow"),
    "the commit is announced": lambda: Fate(Committed, 3),
}


def run(url, log, crashes, *, restarts_hub=False):
    torch.set_num_threads(1)
    make_run(url, *OVERRIDES)
    stop = threading.Event()
    hubs = []

    def start_hub():
        hubs.append(role("hub", url, log))
        return hubs[-1].__enter__()

    def restart_hub(step, groups):
        if restarts_hub and step == STEPS and groups[0] == 28 and len(hubs) == 1:
            hub.kill()
            hub.wait(60)
            start_hub()

    hub = start_hub()
    try:
        with role("actor", url, log, "--name", "actor-0") as actor:
            for crash in crashes:
                with pytest.raises(Crash):
                    train(url, crash(), stop)
            train(url, Fate(None), stop, on_step=restart_hub)
            assert actor.wait(timeout=60) == 0
    finally:
        stop.set()
        for running_hub in hubs:
            running_hub.__exit__(None, None, None)
        shutil.rmtree(shm_directory(Path(url).name), ignore_errors=True)
    assert len(hubs) == 1 + restarts_hub


def test_a_quarantine_survives_crashes_and_a_restart_of_the_hub_bit_for_bit(tmp_path, monkeypatch, prepared_model):
    monkeypatch.setenv("PIPELINERL_TOKEN", TOKEN)
    clean, crashed = str(tmp_path / "quarantine-clean"), str(tmp_path / "quarantine-crashed")
    run(clean, tmp_path / "clean.log", [])
    run(crashed, tmp_path / "crashed.log", CRASHES.values(), restarts_hub=True)
    expected, actual = commits_of(clean), commits_of(crashed)
    assert sorted(actual) == sorted(expected) == list(range(STEPS + 1))
    assert trained_rows(crashed) == trained_rows(clean)
    for step in range(1, STEPS + 1):
        assert actual[step].metrics["train/loss"] == expected[step].metrics["train/loss"], f"step {step}"
        assert actual[step].weights_digest == expected[step].weights_digest, f"step {step}"
    for url, commits in ((clean, expected), (crashed, actual)):
        document = assert_closes(url)
        assert (document["groups"]["trained"], document["groups"]["quarantined"]) == (STEPS * 4, 16)
        assert len(document["quarantined"]) >= 4
        decided = {
            step: sorted(fate.group_id for fate in commit.fates if fate.fate == "quarantined")
            for step, commit in commits.items()
        }
        assert {step: groups for step, groups in decided.items() if groups} == QUARANTINED
        assert all(step.weights_match for step in replay_run(url, None, None))
    assert [expected[step].metrics["train/quarantined_groups"] for step in range(1, STEPS + 1)] == [0, 4, 8, 4]
    check_objects(clean)


def check_objects(url):
    """The stored rows are those of the try, gc keeps them, and the audit misses a removed object."""
    store, config = open_store(url), open_run(url).config
    keys = sorted(store.list("quarantined"))
    rows = {key: [row for part in from_segment(store.get(key)) for row in decode_batch(part)] for key in keys}
    assert [sorted({row.rollout.group_id for row in step_rows}) for step_rows in rows.values()] == [
        [4, 5, 6, 7], [12, 13, 14, 15], [16, 17, 18, 19], [24, 25, 26, 27],
    ]  # fmt: skip
    assert all(
        math.isfinite(row.advantage) for step_rows in rows.values() for row in step_rows
    )  # as before the learner
    removed = collect(store, config, with_rollouts=True, dry_run=False, now=True)
    assert not any(key.startswith("quarantined/") for names in removed.values() for key in names)
    assert_closes(url)
    store.delete([keys[0]])
    with pytest.raises(AssertionError, match=r"groups \[\(4, 0\), .* are quarantined"):
        assert_closes(url)


def test_three_failures_in_a_row_end_the_run_and_a_resume_goes_on(tmp_path, monkeypatch, prepared_model):
    monkeypatch.setenv("PIPELINERL_TOKEN", TOKEN)
    url, log, stop = str(tmp_path / "quarantine-three"), tmp_path / "three.log", threading.Event()
    make_run(url, *SIX_STEPS, *BIT_FOR_BIT, "trainer.steps=2")
    try:
        with role("hub", url, log), role("actor", url, log, "--name", "actor-0") as actor:
            with pytest.raises(TrainingDiverged, match=r"3 tries in a row .* continues after step 0"):
                train(url, Fate(None), stop, bad_groups=range(100))
            assert sorted(commits_of(url)) == [0]
            train(url, Fate(None), stop, bad_groups=())
            assert actor.wait(timeout=60) == 0
    finally:
        stop.set()
        shutil.rmtree(shm_directory(Path(url).name), ignore_errors=True)
    # The hub lived on, so the groups of the first two tries are decided; the third try returned its groups.
    assert assert_closes(url)["groups"] == {"trained": 8, "quarantined": 8}
    assert len(open_store(url).list("quarantined")) == 3
