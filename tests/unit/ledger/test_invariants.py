"""Whatever peers do in whatever order, the ledger closes and no group is lost or decided twice."""

from dataclasses import dataclass, field

import hypothesis.strategies as st
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from pipelinerl_core.errors import Fenced, StaleLease
from pipelinerl_core.ledger import ActorKey, Arrival, GroupSummary, Ledger
from pipelinerl_core.messages import Reserved
from pipelinerl_core.models.resolve import build_config
from pipelinerl_core.types import GroupRef, LengthTotals
from tests.builders import sync_message, weight_manifest

NUM_ACTORS = 3


@dataclass
class FakeActor:
    key: ActorKey
    leases: dict[str, tuple[int, int, int]] = field(default_factory=dict)  # lease_id -> group, attempt, version then
    version: int = 0
    num_tokens: int = 0
    sent: list[tuple[GroupSummary, str]] = field(default_factory=list)


def lengths(num_tokens: int, length: int) -> LengthTotals:
    """Tokens of completions of one length, the first half of them in first thirds, the others in last ones."""
    first = num_tokens // 2
    return LengthTotals(
        num_tokens=num_tokens, first_third=first, last_third=num_tokens - first, length_sum=num_tokens * length
    )


class LedgerMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.config = build_config(
            {
                "rollouts": {"group_size": 4, "filter_zero_variance": True},
                "engine": {"concurrency": 4},
                "schedule": {"max_lag": 2},
                "trainer": {"groups_per_step": 2, "steps": 1000},
            }
        )
        self.now = 0.0
        self.ledger = Ledger(self.config, clock=lambda: self.now)
        self.announce(0, Reserved(re=0, is_ready=True))
        self.actors = [self.registered(f"actor-{index}", 1) for index in range(NUM_ACTORS)]
        self.epoch = 1
        self.reserved: dict[int, Reserved] = {}
        self.fates: dict[int, str] = {}

    def registered(self, name: str, epoch: int) -> FakeActor:
        key = ActorKey(name, epoch)
        self.ledger.register_actor(key)
        return FakeActor(key)

    def announce(self, step: int, answer: Reserved) -> None:
        manifest = weight_manifest(step)
        self.ledger.committed(step, answer.decided, manifest)

    @rule(
        index=st.integers(0, NUM_ACTORS - 1), want=st.integers(0, 9), sampled=st.integers(0, 40), heard=st.booleans()
    )
    def sync(self, index: int, want: int, sampled: int, heard: bool) -> None:
        actor = self.actors[index]
        actor.num_tokens += sampled
        message = sync_message(
            engine_version=actor.version, want=want, leases=tuple(actor.leases), num_tokens=actor.num_tokens
        )
        result = self.ledger.sync(actor.key, message)
        if not heard:  # the answer is lost
            return
        for lease_id in result.stop_leases:
            del actor.leases[lease_id]
        for grant in result.leases:
            actor.leases[grant.lease_id] = (grant.group_id, grant.attempt, actor.version)
        actor.version = self.ledger.newest_version

    @rule(index=st.integers(0, NUM_ACTORS - 1), pick=st.integers(0, 20), old=st.integers(0, 9), new=st.integers(1, 9),
          rewards=st.lists(st.sampled_from([0.0, 1.0]), max_size=4), unscored=st.integers(0, 3))  # fmt: skip
    def deliver(self, index: int, pick: int, old: int, new: int, rewards: list[float], unscored: int) -> None:
        actor = self.actors[index]
        if not actor.leases:
            return
        lease_id = sorted(actor.leases)[pick % len(actor.leases)]
        group_id, attempt, version = actor.leases.pop(lease_id)
        tokens = {actor.version: new}
        tokens[version] = tokens.get(version, 0) + old
        tokens = {version: number for version, number in tokens.items() if number}
        ref = GroupRef(
            group_id=group_id, attempt=attempt, actor=actor.key.name, actor_epoch=actor.key.epoch, num_rollouts=4,
            num_tokens=sum(tokens.values()) + unscored,
        )  # fmt: skip
        summary = GroupSummary(
            ref=ref, rewards=tuple(rewards), tokens_by_version=tokens, lengths_unscored=lengths(unscored, new),
            lengths_by_version={version: lengths(number, new + old) for version, number in tokens.items()},
        )  # fmt: skip
        actor.sent.append((summary, lease_id))
        self.send(actor, -1)

    @rule(index=st.integers(0, NUM_ACTORS - 1), pick=st.integers(0, 20))
    def deliver_again(self, index: int, pick: int) -> None:
        actor = self.actors[index]
        if actor.sent:
            before = self.ledger.tokens()
            self.send(actor, pick % len(actor.sent))
            assert self.ledger.tokens() == before

    def send(self, actor: FakeActor, index: int) -> None:
        summary, lease_id = actor.sent[index]
        try:
            arrival = self.ledger.add_group(summary, lease_id)
        except StaleLease:
            return
        if arrival in (Arrival.FILTERED, Arrival.FAILED):
            self.decide(summary.ref.group_id, arrival.value)

    @rule(seconds=st.floats(0, 12))
    def wait(self, seconds: float) -> None:
        self.now += seconds
        self.ledger.expire()

    @rule(index=st.integers(0, NUM_ACTORS - 1), clean=st.booleans())
    def restart_actor(self, index: int, clean: bool) -> None:
        actor = self.actors[index]
        if clean:
            self.ledger.bye(actor.key)
        self.actors[index] = self.registered(actor.key.name, actor.key.epoch + 1)

    @precondition(lambda self: len(self.reserved) < 3)
    @rule()
    def reserve(self) -> None:
        step = self.ledger.committed_step + 1 + len(self.reserved)
        answer = self.ledger.reserve(step, self.epoch)
        assert self.ledger.reserve(step, self.epoch) == answer
        if not answer.is_ready:
            return
        assert len(answer.groups) == 2
        self.check(answer.tokens)
        self.check_lengths(answer.lengths, answer.tokens)
        self.reserved[step] = answer

    @precondition(lambda self: self.reserved)
    @rule(pick=st.integers(0, 9))
    def lose(self, pick: int) -> None:
        step = max(self.reserved)
        refs = self.reserved.pop(step).groups
        ref = refs[pick % len(refs)]
        answer = self.ledger.reserve(step, self.epoch, lost=[(ref.group_id, ref.attempt)])
        if answer.is_ready:
            assert (ref.group_id, ref.attempt) not in {(other.group_id, other.attempt) for other in answer.groups}
            self.reserved[step] = answer

    @precondition(lambda self: self.reserved)
    @rule()
    def quarantine(self) -> None:
        step = max(self.reserved)
        refs = self.reserved.pop(step).groups
        answer = self.ledger.reserve(step, self.epoch, quarantined=refs)
        assert self.ledger.reserve(step, self.epoch, quarantined=refs) == answer
        for ref in refs:
            self.decide(ref.group_id, "quarantined")
        if answer.is_ready:
            assert not {ref.group_id for ref in refs} & {ref.group_id for ref in answer.groups}
            fates = {fate.group_id: fate.fate for fate in answer.fates}
            assert all(fates[ref.group_id] == "quarantined" for ref in refs)
            self.reserved[step] = answer

    @precondition(lambda self: self.reserved)
    @rule(repeat=st.booleans())
    def commit(self, repeat: bool) -> None:
        step = min(self.reserved)
        answer = self.reserved.pop(step)
        for fate in answer.fates:
            self.decide(fate.group_id, fate.fate)
        for ref in answer.groups:
            assert ref.group_id not in self.fates
            self.decide(ref.group_id, "trained")
        for _ in range(1 + repeat):
            self.announce(step, answer)

    @rule()
    def restart_trainer(self) -> None:
        self.epoch += 1
        self.ledger.register_trainer(self.epoch)
        self.reserved.clear()
        try:
            self.ledger.reserve(self.ledger.committed_step + 1, self.epoch - 1)
        except Fenced:
            return
        raise AssertionError("the older trainer was not fenced")

    def decide(self, group_id: int, fate: str) -> None:
        assert self.fates.setdefault(group_id, fate) == fate, f"group {group_id} is {self.fates[group_id]} and {fate}"

    def check(self, tokens: dict[str, int]) -> None:
        assert tokens["generated"] == sum(number for name, number in tokens.items() if name != "generated")
        assert min(tokens.values()) >= 0

    def check_lengths(self, meter: dict[str, LengthTotals], tokens: dict[str, int]) -> None:
        classes = {name: totals for name, totals in meter.items() if name != "generated"}
        assert meter.get("generated", LengthTotals()) == sum(classes.values(), LengthTotals())
        for name in tokens.keys() - {"generated", "in_flight", "superseded"}:
            assert classes.get(name, LengthTotals()).num_tokens == tokens[name], name
        superseded = classes.get("superseded", LengthTotals()).num_tokens
        assert superseded <= tokens["superseded"]  # the rest was lost with its actor, and never arrived

    @invariant()
    def the_token_ledger_closes(self) -> None:
        self.check(self.ledger.tokens())

    @invariant()
    def the_length_meter_closes_like_the_ledger(self) -> None:
        self.check_lengths(self.ledger.lengths(), self.ledger.tokens())

    @invariant()
    def the_window_is_never_exceeded(self) -> None:
        assert self.ledger.counts.outstanding <= self.config.window_groups

    @invariant()
    def every_group_below_the_frontier_is_open_or_decided(self) -> None:
        num_open = sum(self.ledger.is_open(group_id) for group_id in range(self.ledger.next_group_id))
        places = self.ledger.counts.outstanding + self.ledger.num_queued
        assert num_open == places
        told = {ref.group_id for answer in self.reserved.values() for ref in answer.groups}
        for group_id, fate in self.fates.items():
            assert not self.ledger.is_open(group_id), f"group {group_id} is {fate} and open"
            assert group_id not in told

    @invariant()
    def no_group_is_in_two_reservations(self) -> None:
        groups = [ref.group_id for answer in self.reserved.values() for ref in answer.groups]
        assert len(groups) == len(set(groups))


LedgerMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=60, deadline=None, derandomize=True)
test_random_histories_keep_the_invariants = LedgerMachine.TestCase
