"""Takeover of a trainer: the storage calls of an old trainer, its successors and a hub, in every order."""

import pytest

from pipelinerl_core.errors import Fenced, StoreUnavailable
from pipelinerl_core.messages import Committed, Register
from pipelinerl_core.roles.hub.recovery import read_stored_state
from pipelinerl_core.roles.hub.trainer_side import TrainerRequests
from pipelinerl_core.run import history
from pipelinerl_core.run.history import counting, take_epoch, take_over, write_commit
from pipelinerl_core.run.records import EpochRecord, commit_key, epoch_key, parse_commit_key
from pipelinerl_core.storage import exclusive
from tests.builders import commit_record, epoch_record, weight_manifest
from tests.unit.run.interleaving_case import History, HubGone, Objects, State, World


def commit_of(step, epoch):
    return commit_record(step, epoch, manifest=weight_manifest(step, epoch=epoch))


def json_of(record):
    return record.model_dump_json().encode()


@pytest.fixture
def model(monkeypatch):
    """A world in which a run has committed step 0 in epoch 1."""
    monkeypatch.setattr(history.time, "time", lambda: 0.0)
    monkeypatch.setattr(exclusive.time, "sleep", lambda seconds: None)
    monkeypatch.setattr(exclusive, "_ATTEMPTS", 1)
    monkeypatch.setattr(history, "_MAX_EPOCHS", 4)  # two writers may lose a number again and again
    first = State(
        objects=Objects.of({commit_key(0, 1): json_of(commit_of(0, 1)), epoch_key(1): json_of(epoch_record(1))}),
        histories=(), alive=(), boot=1, epoch=1, step=0, commits=((0, 1),),
    )  # fmt: skip

    def named(calls):
        monkeypatch.setattr(exclusive.uuid, "uuid4", lambda: Name(calls.name()))

    def make(*processes, **more):
        world = World(list(processes), is_final=is_final, patch=named, **more)
        histories = tuple(History() for _ in processes)
        return world, first._replace(histories=histories, alive=tuple(True for _ in processes))

    return make


class Name:
    def __init__(self, text):
        self.hex = text


_claims: dict[bytes, bool] = {}


def is_final(key, data):
    if key.startswith("epochs/") and data not in _claims:
        _claims[data] = EpochRecord.model_validate_json(data).is_claim
    return not _claims.get(data, False)


# ---- the processes -------------------------------------------------------------------------------------------------


class Link:
    """A trainer's link to the hub: it registers with each new hub, and repeats its request after the hub has died."""

    def __init__(self, calls, epoch):
        self._calls, self._epoch, self._boot = calls, epoch, None
        self.newest = None

    def connect(self):
        self._do(lambda requests: None)

    def announce(self):
        newest = self.newest
        message = Committed(step=newest.step, epoch=self._epoch, manifest=newest.manifest)
        self._do(lambda requests: requests.committed(message))

    def _do(self, request):
        while True:
            try:
                ledger = self._calls.hub()
                requests = TrainerRequests(ledger, self._calls)
                if ledger.boot != self._boot:
                    step = self.newest.step if self.newest else -1
                    requests.register(Register(role="trainer", name="t", epoch=self._epoch, committed_step=step))
                    self._boot = ledger.boot
                request(requests)
            except HubGone:
                continue
            return


def train(calls, link, epoch, steps):
    for step in steps:
        commit = commit_of(step, epoch.epoch)
        write_commit(calls, epoch, commit)
        link.newest = commit
        link.announce()


def old_trainer(calls):
    """It has registered with the first hub and commits step 1."""
    link = Link(calls, 1)
    link._boot, link.newest = 1, commit_of(0, 1)
    train(calls, link, epoch_record(1), [1])


def successor(calls):
    """It takes over, registers and commits one step."""
    epoch, commits = take_over(calls)
    calls.epoch = epoch.epoch
    calls.counted.update(commits.items())
    last = max(commits)
    link = Link(calls, epoch.epoch)
    link.newest = commit_of(last, parse_commit_key(commits[last])[1])
    link.connect()
    train(calls, link, epoch, [last + 1])


def writer(calls):
    """`old_trainer` without a hub."""
    write_commit(calls, epoch_record(1), commit_of(1, 1))
    calls.counted.add((1, commit_key(1, 1)))


def heir(calls):
    """`successor` without a hub."""
    epoch, commits = take_over(calls)
    calls.epoch = epoch.epoch
    calls.counted.update(commits.items())
    step = max(commits) + 1
    write_commit(calls, epoch, commit_of(step, epoch.epoch))
    calls.counted.add((step, commit_key(step, epoch.epoch)))


def claimer(calls):
    """An `heir` that stops after its claim."""
    calls.epoch = take_epoch(calls, "trainer", 0, is_claim=True).epoch


def hub_restart(calls):
    """The hub dies, and another one reads the store."""
    calls.call("kill hub")
    state = read_stored_state(calls)
    calls.call("start hub", state.commit.step, state.manifest.epoch)


# ---- what must hold ------------------------------------------------------------------------------------------------


class Judge:
    """Calls `check` in every state; `world.states` uses `see`."""

    def __init__(self, world):
        self._world, self._records, self._counts = world, {}, {}
        self.num_ends = 0

    def see(self, state):
        """What counts for a reader that reads the store at this moment."""
        if state.objects not in self._counts:
            records = [
                EpochRecord.model_validate_json(data)
                for key, data in sorted(state.objects.items())
                if key.startswith("epochs/")
            ]
            commits = [key for key in state.objects if key.startswith("commits/")]
            self._records[state.objects] = records
            self._counts[state.objects] = frozenset(counting(commits, records).items())
        return self._counts[state.objects]

    def check(self, state):
        told = {(step, commit_key(step, epoch)) for step, epoch in state.commits}
        everybody = state.counted | told
        assert len({step for step, _ in everybody}) == len(everybody), f"two commits of one step: {sorted(everybody)}"
        outcomes = self._world.outcomes(state)
        epochs = [outcome.epoch for outcome in outcomes if outcome.epoch is not None]
        assert len(set(epochs)) == len(epochs), f"two trainers have the same epoch: {epochs}"
        if not self._world.ends(state):
            return
        self.num_ends += 1
        errors = [outcome.error for outcome in outcomes if outcome.error is not None]
        assert all(isinstance(error, Fenced | StoreUnavailable) for error in errors), errors
        newest = self._records[state.objects][-1]
        if newest.is_claim:
            return
        assert everybody <= self.see(state), "a commit that counted for one reader no longer counts"
        if all(state.alive):
            assert newest.epoch in {parse_commit_key(key)[1] for _, key in everybody}, "the newest has committed"


def explore(world, start):
    judge = Judge(world)
    for state in world.states(start, judge.see):
        judge.check(state)
    assert judge.num_ends


@pytest.mark.parametrize(
    ("is_conditional", "restarts"),
    [
        (True, ()), (False, ()), (False, (hub_restart,)),
        pytest.param(True, (hub_restart,), marks=[pytest.mark.slow, pytest.mark.campaign]),
    ],
    ids=["conditional", "unconditional", "unconditional, hub restarts", "conditional, hub restarts"],
)  # fmt: skip
def test_a_commit_during_a_takeover_is_adopted_or_counts_for_nobody(model, is_conditional, restarts):
    explore(*model(old_trainer, successor, *restarts, is_conditional=is_conditional))


@pytest.mark.parametrize(
    "processes",
    [
        (writer, claimer, heir), (old_trainer, heir),
        pytest.param((writer, heir, heir), marks=[pytest.mark.slow, pytest.mark.campaign]),
    ],
)  # fmt: skip
def test_the_same_if_the_second_process_dies_at_any_time(model, processes):
    explore(*model(*processes, mortal=frozenset({1})))


@pytest.mark.parametrize("processes", [(claimer, claimer), (heir, heir), (writer, heir, claimer)])
def test_trainers_that_start_at_once_do_not_both_win_without_conditional_put(model, processes):
    explore(*model(*processes, is_conditional=False))
