"""A store that lists fewer commits than exist: nobody goes on from there, unless a user accepts the loss."""

from contextlib import suppress

import pytest

from pipelinerl_core.errors import ConfigError, StoreUnavailable
from pipelinerl_core.roles.hub.recovery import read_stored_state
from pipelinerl_core.run.history import (
    accept_lost_commits,
    check_not_fenced,
    counted_commit_keys,
    lost_commits,
    read_epochs,
    take_epoch,
    take_over,
)
from pipelinerl_core.run.records import HUB_KEY, commit_key, epoch_key
from pipelinerl_core.tools.audit import Audit, lines
from pipelinerl_core.tools.gc import collect
from tests.builders import hub_record, put_commit, put_epoch, small_config
from tests.fakes import MemoryStore

STEPS = 22


class WrongOnce:
    """A store of which one listing is empty: the `number`-th of a folder, from 0."""

    def __init__(self, store, folder, number):
        self._store, self._folder, self._number = store, folder, number

    def __getattr__(self, name):
        return getattr(self._store, name)

    def list(self, prefix):
        keys = self._store.list(prefix)
        if prefix != self._folder:
            return keys
        self._number -= 1
        return [] if self._number == -1 else keys


@pytest.fixture
def run():
    store = MemoryStore()
    put_epoch(store, 1, "hub")
    put_epoch(store, 2)
    for step in range(STEPS + 1):
        put_commit(store, step, 2)
    return store


def collect_now(store):
    return collect(store, small_config(), with_rollouts=False, dry_run=False, now=True)


class WithoutNewest(WrongOnce):
    """A store that never lists the newest commits."""

    def list(self, prefix):
        keys = self._store.list(prefix)
        return keys[: -self._number] if prefix == self._folder else keys


@pytest.mark.parametrize("number", [1, 2, STEPS + 1])
def test_commits_that_the_hub_has_counted_are_missing_although_the_listing_has_no_gap(run, number):
    run.put(HUB_KEY, hub_record(live={"step": STEPS, "state": "done"}).model_dump_json().encode())
    store = WithoutNewest(run, "commits", number)
    for act in (take_over, read_stored_state, collect_now):
        with pytest.raises(StoreUnavailable, match=rf"no commit of step {STEPS + 1 - number}, but step {STEPS} was"):
            act(store)
    assert any(f"step {STEPS} was committed" in problem for problem in Audit(store, small_config()).run().problems)
    assert accept_lost_commits(store, is_final=False)["step"] == STEPS - number
    run.delete([commit_key(step, 2) for step in range(STEPS + 1 - number, STEPS + 1)])
    accept_lost_commits(run, is_final=True)
    assert take_over(run)[0].adopted_through == STEPS - number


@pytest.mark.parametrize("name", ["3.2", "00000003.02", "0000003.2", "000000003.2"])
def test_another_name_of_a_step_is_no_commit_and_no_garbage(run, name):
    run.put(f"commits/{name}.json", run.get(commit_key(3, 2)))
    assert counted_commit_keys(run)[3] == commit_key(3, 2)
    for _ in range(2):
        collect_now(run)
    assert {commit_key(3, 2), f"commits/{name}.json"} <= set(run.list("commits"))


@pytest.mark.parametrize("earlier", [False, True])
@pytest.mark.parametrize("number", range(4))
@pytest.mark.parametrize("folder", ["commits", "epochs"])
def test_one_wrong_listing_of_a_takeover_loses_no_step(run, folder, number, earlier):
    if earlier:
        put_epoch(run, 3, parent=2, adopted_through=STEPS)
    with suppress(StoreUnavailable):
        epoch, commits = take_over(WrongOnce(run, folder, number))
        assert (epoch.adopted_through, len(commits)) == (STEPS, STEPS + 1)
        assert epoch.parent == (3 if earlier else 2)
    assert len(counted_commit_keys(run)) == STEPS + 1
    assert take_over(run)[0].adopted_through == STEPS


@pytest.mark.parametrize("number", [0, 1])
def test_readers_of_a_claim_see_all_commits_after_one_wrong_listing_of_the_claimer(run, number):
    class Dies(WrongOnce):
        """The process ends after its claim."""

        def put(self, key, data, **options):
            self._store.put(key, data, **options)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        take_over(Dies(run, "commits", number))
    assert read_epochs(run)[-1].is_claim
    assert len(counted_commit_keys(run)) == STEPS + 1


def test_a_fenced_trainer_does_not_pass_with_an_empty_listing(run):
    [_, own] = read_epochs(run)
    with pytest.raises(StoreUnavailable, match=r"the store lists no epochs/000002\.json"):
        check_not_fenced(WrongOnce(run, "epochs", 0), own)
    check_not_fenced(run, own)


@pytest.mark.parametrize("number", [0, 1])
def test_a_hub_lists_again_and_then_refuses(run, number):
    assert read_stored_state(WrongOnce(run, "commits", number)).commit.step == STEPS
    put_epoch(run, 3, parent=2, adopted_through=STEPS)
    newest = run.get(commit_key(STEPS, 2))
    run.delete([commit_key(STEPS, 2)])
    with pytest.raises(StoreUnavailable, match=r"commits/00000022\.\*: .* step 22 was committed"):
        read_stored_state(run)
    run.put(commit_key(STEPS, 2), newest)
    run.delete([commit_key(7, 2)])
    with pytest.raises(StoreUnavailable, match=r"commits/00000007\.\*: .* step 22 was committed.*accept-loss"):
        read_stored_state(run)


def test_a_user_may_accept_that_commits_are_lost(run):
    with pytest.raises(ConfigError, match="no commit is missing"):
        accept_lost_commits(run, is_final=True)
    run.delete([commit_key(step, 2) for step in (10, 11)])
    with pytest.raises(StoreUnavailable):
        take_over(run)
    told = accept_lost_commits(run, is_final=False)
    assert (told["step"], told["is_accepted"]) == (9, False)
    assert "lists no commit of step 10, but step 22 was committed" in told["reason"]
    with pytest.raises(StoreUnavailable):
        take_over(run)
    stale = ["weights/00000010.2/manifest.json", "evals/00000012.json", "partials/a/000001/00000000.arrow"]
    kept = ["weights/00000009.2/manifest.json", "evals/00000009.json"]
    for key in (*stale, *kept):
        run.put(key, b"{}")
    assert accept_lost_commits(run, is_final=True)["step"] == 9
    left = {*run.list("weights"), *run.list("evals"), *run.list("partials")}
    assert left == {*kept}, "the run makes the later versions again"
    run.delete(kept)
    assert list(counted_commit_keys(run)) == list(range(10))
    assert read_stored_state(run).commit.step == 9
    assert take_over(run)[0].adopted_through == 9
    collect(run, small_config(), with_rollouts=True, dry_run=False)
    audit = Audit(run, small_config()).run().document
    assert audit["accepted_losses"] == [9]
    assert not any("do not count" in problem for problem in audit["problems"])
    assert "accepted: the run went on after step 9 without lost commits" in lines(audit)


@pytest.mark.parametrize("number", [1, 2, 3])
def test_a_loss_is_accepted_as_the_user_was_told_or_not_at_all(run, number):
    run.delete([commit_key(step, 2) for step in (10, 11)])
    with suppress(StoreUnavailable):
        assert accept_lost_commits(WrongOnce(run, "commits", number), is_final=True)["step"] == 9
    assert len(counted_commit_keys(run)) >= 10


@pytest.mark.parametrize("number", [0, 1])
def test_one_wrong_listing_of_the_epochs_makes_no_hub_the_first(run, number):
    assert take_epoch(WrongOnce(run, "epochs", number), "hub", STEPS).parent == 1


def test_the_audit_fails_if_a_takeover_left_out_more_commits_than_a_fenced_trainer_writes_late(run):
    put_epoch(run, 3, parent=2, adopted_through=STEPS - 2)
    assert lost_commits(run.list("commits"), read_epochs(run)) == []
    put_epoch(run, 3, parent=2, adopted_through=-1)
    put_commit(run, 0, 3)
    problems = Audit(run, small_config()).run().problems
    assert "23 commits of epoch 2 do not count, steps 0 to 22: epoch 3 adopted only steps through -1" in problems
    assert accept_lost_commits(run, is_final=True)["step"] == 0
    document = Audit(run, small_config()).run().document
    assert (document["accepted_losses"], document["problems"]) == ([0], [])
    collect(run, small_config(), with_rollouts=True, dry_run=False)


def test_commits_that_a_claim_holds_back_are_adopted_by_the_next_start(run):
    """A trainer that listed them before a long stall has claimed the run after the last step, and failed."""
    put_epoch(run, 3, parent=2, adopted_through=STEPS - 4, is_claim=True)
    assert lost_commits(run.list("commits"), read_epochs(run)) == [
        "4 commits of epoch 2 do not count, steps 19 to 22: epoch 3 has not adopted them. If it has ended, the next "
        "start adopts them"
    ]
    assert max(take_over(run)[1]) == STEPS
    assert lost_commits(run.list("commits"), read_epochs(run)) == []


def test_commits_of_an_epoch_that_nobody_adopted_are_named(run):
    put_epoch(run, 3, parent=2, adopted_through=STEPS)
    put_epoch(run, 4, parent=2, adopted_through=STEPS)
    for step in range(STEPS + 1, STEPS + 5):
        put_commit(run, step, 3)
    assert lost_commits(run.list("commits"), read_epochs(run)) == [
        "4 commits of epoch 3 do not count, steps 23 to 26: epoch 4 adopted only steps through 22"
    ]


@pytest.mark.parametrize("name", ["commits/00000001.2.json~", "commits/a b.json", "epochs/000002 (copy).json"])
def test_a_foreign_file_is_named_once_and_left_out(run, name, caplog):
    run.put(name, b"{")
    assert len(counted_commit_keys(run)) == STEPS + 1
    assert read_stored_state(run).commit.step == STEPS
    assert take_over(run)[0].adopted_through == STEPS
    assert caplog.text.count(f"{run.url}/{name} is no object of a run and is left out") == 1
    assert name in {*run.list("commits"), *run.list("epochs")}
    assert epoch_key(2) in run.list("epochs")
