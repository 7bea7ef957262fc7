"""Actor lives that have ended for good leave the commits; their tokens stay counted."""

import pytest

from pipelinerl_core.errors import Fenced
from pipelinerl_core.ledger import ActorKey, GroupSummary, Ledger, SealedGroup
from pipelinerl_core.ledger.retirement import RETIRE_COMMITS, RETIRE_SECONDS
from pipelinerl_core.messages import Reserved
from pipelinerl_core.types import GroupRef, Origin
from tests.builders import ManualClock, commit_record, small_config, sync_message, trained_by, weight_manifest

OTHER = ActorKey("actor-1", 1)


class Run:
    """A hub's ledger, whose lives sample tokens and whose trainer commits steps of two groups."""

    def __init__(self) -> None:
        self.clock = ManualClock()
        self.ledger = self.new_ledger(first_attempt=0)
        self.ledger.committed(0, (), weight_manifest(0))
        self.sampled: dict[ActorKey, int] = {}
        self.sealed: dict[ActorKey, int] = {}
        self.stored: list[SealedGroup] = []
        """The groups in segments of the store."""

    def new_ledger(self, first_attempt: int) -> Ledger:
        return Ledger(
            small_config(trainer={"steps": 1000}), clock=self.clock, boot_id="boot", first_attempt=first_attempt
        )

    def deliver(self, actor: ActorKey, origins: tuple[Origin, ...] = (), lost: int = 5) -> None:
        """The life samples and seals two groups of 10 tokens, and `lost` tokens that it does not deliver."""
        self.ledger.register_actor(actor)
        version = self.ledger.newest_version
        grants = self.ledger.sync(actor, sync_message(engine_version=version, want=2)).leases
        taken = sum(origin.num_tokens for origin in origins)
        self.sampled[actor] = self.sampled.get(actor, 0) + 20 - taken + lost
        held = tuple(grant.lease_id for grant in grants)
        self.ledger.sync(actor, sync_message(engine_version=version, leases=held, num_tokens=self.sampled[actor]))
        for index, grant in enumerate(grants):
            ref = GroupRef(
                group_id=grant.group_id, attempt=grant.attempt, actor=actor.name, actor_epoch=actor.epoch,
                num_rollouts=2, num_tokens=10, origins=origins if index == 0 else (),
            )  # fmt: skip
            given = GroupSummary(ref=ref, rewards=(0.0, 1.0), tokens_by_version={max(version, 0): 10})
            self.ledger.add_group(given, grant.lease_id)
            self.sealed[actor] = self.sealed.get(actor, -1) + 1
            self.ledger.sealed(actor, self.sealed[actor], [(grant.group_id, grant.attempt)])
            self.stored.append(SealedGroup(summary=given, seq=self.sealed[actor]))

    def commit(self) -> Reserved:
        step = self.ledger.committed_step + 1
        answer = self.ledger.reserve(step, epoch=2)
        assert answer.is_ready
        self.ledger.committed(step, answer.decided, weight_manifest(step))
        return answer

    def retire(self) -> list[ActorKey]:
        """What the hub does every few seconds."""
        self.ledger.expire()
        lives = self.ledger.lives_to_retire()
        self.ledger.retire(lives)
        return lives


def check_closes(tokens: dict[str, int]) -> None:
    assert tokens["generated"] == sum(number for name, number in tokens.items() if name != "generated"), tokens
    assert min(tokens.values()) >= 0, tokens


def test_a_commit_does_not_grow_with_the_number_of_lives():
    run, sizes = Run(), []
    for epoch in range(1, 301):
        run.deliver(ActorKey("actor-0", epoch))
        answer = run.commit()
        sizes.append(len(answer.model_dump_json()))
        assert max(len(answer.actors), len(answer.low_water)) <= RETIRE_COMMITS + 3
        run.retire()
        check_closes(run.ledger.tokens())
    assert sizes[-1] < 1.1 * sizes[20]
    tokens = run.ledger.tokens()
    assert (tokens["generated"], tokens["trained"]) == (300 * 25, 300 * 20)
    assert tokens["superseded"] == 299 * 5


def test_a_life_without_a_successor_is_retired_after_its_wait_and_then_refused():
    run = Run()
    lost = ActorKey("actor-0", 1)
    run.deliver(lost)
    for _ in range(RETIRE_COMMITS + 2):
        run.commit()
        run.deliver(OTHER)
        run.clock.now += 5
        assert run.retire() == []
    assert run.ledger.sync(lost, sync_message(num_tokens=25)).swaps == ()  # it was suspended and returns
    run.clock.now += 11
    assert run.retire() == []
    run.clock.now += RETIRE_SECONDS
    run.ledger.sync(OTHER, sync_message(num_tokens=run.sampled[OTHER]))
    assert run.retire() == []  # too few commits since its second end
    for _ in range(RETIRE_COMMITS):
        run.commit()
        run.deliver(OTHER)
    before = run.ledger.tokens()
    assert run.retire() == [lost]
    assert run.ledger.tokens() == before
    assert str(lost) not in run.commit().actors
    with pytest.raises(Fenced, match="epoch 1 was silent too long and is retired"):
        run.ledger.register_actor(lost)
    with pytest.raises(Fenced, match="retired"):
        run.ledger.sync(lost, sync_message(num_tokens=30))


def test_a_life_is_refused_from_its_selection_on_and_stays_selected_until_its_object_is_written():
    run = Run()
    first = ActorKey("actor-0", 1)
    run.deliver(first)
    run.deliver(OTHER)
    run.ledger.bye(first)
    for _ in range(RETIRE_COMMITS + 1):
        run.ledger.lives_to_retire()
        run.commit()
        run.deliver(OTHER)
    run.clock.now += RETIRE_SECONDS
    run.ledger.sync(OTHER, sync_message(num_tokens=run.sampled[OTHER]))
    assert run.ledger.lives_to_retire() == [first]  # writing the object fails
    with pytest.raises(Fenced):
        run.ledger.sync(first, sync_message(num_tokens=30))
    assert str(first) in run.commit().actors
    assert run.ledger.lives_to_retire() == [first]


def test_a_life_with_an_undecided_group_is_not_retired():
    run = Run()
    run.deliver(OTHER)
    run.ledger.bye(OTHER)
    for epoch in range(1, 8):
        run.clock.now += RETIRE_SECONDS
        run.deliver(ActorKey("actor-0", epoch))
        assert OTHER not in run.retire()
    assert run.ledger.committed_step == 0


def test_a_life_is_not_retired_while_a_ready_group_of_another_actor_has_its_tokens():
    run = Run()
    first = ActorKey("actor-0", 1)
    run.deliver(first, lost=50)
    run.commit()
    for epoch in range(2, 9):
        run.ledger.register_actor(ActorKey("actor-0", epoch))
        run.deliver(OTHER, origins=(Origin("actor-0", 1, 5),))
        assert first not in run.retire()
        run.commit()
    retired = []
    for _ in range(RETIRE_COMMITS + 1):
        retired += run.retire()
        run.deliver(OTHER)
        run.commit()
    assert first in retired


def test_tokens_that_another_actor_took_over_leave_superseded_when_they_arrive_after_the_retirement():
    run = Run()
    run.deliver(ActorKey("actor-0", 1), lost=30)
    for epoch in range(2, 9):
        run.commit()
        run.deliver(ActorKey("actor-0", epoch), lost=0)
        run.retire()
    before = run.ledger.tokens()
    run.commit()
    run.deliver(OTHER, origins=(Origin("actor-0", 1, 8),), lost=0)
    after = run.ledger.tokens()
    check_closes(after)
    assert before["superseded"] - after["superseded"] == 8
    assert after["generated"] - before["generated"] == 12


def restarted(run: Run, answer: Reserved, retired: list[ActorKey]) -> Ledger:
    """The ledger of a hub that starts after the commit of `answer`, and reads the segments that are needed."""
    record = commit_record(run.ledger.committed_step, 2, **trained_by(answer))
    new = run.new_ledger(first_attempt=5000)
    marks = answer.low_water
    sealed = [
        group
        for group in run.stored
        if group.summary.actor not in retired and group.seq >= marks.get(str(group.summary.actor), 0)
    ]
    new.restore(record, sealed, weight_manifest(run.ledger.committed_step), retired)
    return new


def test_a_hub_that_starts_counts_the_tokens_of_retired_lives_and_refuses_them():
    run, retired = Run(), []
    for epoch in range(1, 10):
        run.deliver(ActorKey("actor-0", epoch))
        answer = run.commit()
        if epoch < 9:
            retired += run.retire()
    assert len(retired) > 2
    new = restarted(run, answer, retired)
    check_closes(new.tokens())
    for name in ("generated", "trained"):
        assert new.tokens()[name] == run.ledger.tokens()[name]
    with pytest.raises(Fenced, match=r"replaced|retired"):
        new.register_actor(retired[0])


def test_a_life_whose_object_was_written_before_the_crash_and_which_the_commit_still_names_counts_once():
    run, retired = Run(), []
    for epoch in range(1, 10):
        run.deliver(ActorKey("actor-0", epoch))
        answer = run.commit()
        if epoch < 9:
            retired += run.retire()
    late = [actor for actor in map(ActorKey.parse, answer.actors) if actor.epoch < 9]
    assert late
    new = restarted(run, answer, [*retired, *late])
    check_closes(new.tokens())
    assert new.tokens()["generated"] == run.ledger.tokens()["generated"]
    assert new.actor_reports.samples.keys().isdisjoint(late)
