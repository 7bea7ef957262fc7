"""A simulated engine by hand: decode steps, slots, prefill, swaps and pauses."""

import math
from dataclasses import dataclass

import pytest

from pipelinerl_core.ledger import ActorKey, Grant
from pipelinerl_core.planning.simulated_engine import SimulatedEngine


@dataclass(frozen=True)
class OneSecondPerSequence:
    """A decode step of h sequences lasts h seconds."""

    def decode_seconds(self, num_running: int) -> float:
        return float(max(1, num_running))

    def train_seconds(self, num_tokens: int) -> float:
        return 1.0


def engine(*, slots: int = 2, prefill_seconds: float = 0.0, **values: float) -> SimulatedEngine:
    return SimulatedEngine(
        ActorKey("a", 1),
        slots=slots,
        group_size=2,
        speeds=OneSecondPerSequence(),
        prefill_seconds=prefill_seconds,
        **values,
    )


def grant(group_id: int = 0) -> Grant:
    return Grant(group_id=group_id, attempt=0, lease_id=f"{group_id}.0.0", deadline_seconds=0.0)


def test_a_step_is_shorter_when_fewer_sequences_run():
    """Lengths 3 and 5: three steps of 2 s, then two steps of 1 s."""
    simulated_engine = engine()
    simulated_engine.take(grant(), [3, 5])
    assert simulated_engine.next_end == 6
    simulated_engine.advance(6)
    assert simulated_engine.end_sequences() == []
    assert simulated_engine.next_end == 8
    simulated_engine.advance(8)
    (complete,) = simulated_engine.end_sequences()
    assert simulated_engine.tokens_by_version(complete) == {0: 8}
    assert (simulated_engine.num_tokens, simulated_engine.works, simulated_engine.next_end) == (8, {}, math.inf)
    assert simulated_engine.busy_slot_seconds == 2 * 6 + 2


def test_a_sequence_leaves_its_slot_and_the_cache_while_a_tool_works():
    """Turns of 2 and 2, and of 2 and 1 tokens, in one slot; the cache holds one sequence of 1 + 4 tokens."""
    simulated_engine = engine(
        slots=1, turns=2, tool_seconds=10.0, prefill_seconds=1.0, prompt_tokens=1, cache_tokens=5
    )
    simulated_engine.take(grant(), [4, 3])
    times = []
    while simulated_engine.works:
        times.append(simulated_engine.next_end)
        simulated_engine.advance(simulated_engine.next_end)
        complete = simulated_engine.end_sequences()
    # Prefill until 1, turn until 3; prefill until 4, turn until 6; the tools end at 13 and 16.
    assert times == [3, 6, 13, 15, 16, 17]
    assert simulated_engine.busy_slot_seconds == 6 + 2 + 1
    assert simulated_engine.num_tokens == 7
    assert simulated_engine.tokens_by_version(complete[0]) == {0: 7}


def test_turns_are_at_least_a_token_long():
    simulated_engine = engine(turns=3, tool_seconds=1.0)
    simulated_engine.take(grant(), [1, 2])
    assert simulated_engine.next_end == 2  # both have a turn of one token
    simulated_engine.advance(2)
    simulated_engine.end_sequences()
    assert (simulated_engine.num_running, simulated_engine.next_end) == (0, 3)
    simulated_engine.advance(3)
    assert simulated_engine.end_sequences() == []
    simulated_engine.advance(simulated_engine.next_end)
    (complete,) = simulated_engine.end_sequences()
    assert sorted(complete.sampled) == [(0.0, 1), (0.0, 1), (1.0, 1)]


def test_a_free_slot_takes_the_next_waiting_sequence():
    simulated_engine = engine()
    simulated_engine.take(grant(0), [1, 4])
    simulated_engine.take(grant(1), [1, 1])
    assert (simulated_engine.num_running, simulated_engine.num_waiting, simulated_engine.wanted_groups) == (2, 2, 0)
    simulated_engine.advance(simulated_engine.next_end)
    simulated_engine.end_sequences()
    assert (simulated_engine.num_running, simulated_engine.num_waiting, simulated_engine.wanted_groups) == (2, 1, 1)
    assert simulated_engine.next_end == 4
    assert simulated_engine.num_tokens == 2


def test_tokens_belong_to_the_version_that_sampled_them():
    """Swaps at 4 s and 8 s, each with a stop of 1 s, at steps of 2 s: 2, 1 and 2 of 5 tokens each."""
    simulated_engine = engine()
    simulated_engine.take(grant(), [5, 5])
    for version, at in ((1, 4.0), (2, 8.0)):
        simulated_engine.advance(at)
        simulated_engine.swap(version, 1.0)
    assert simulated_engine.next_end == 12
    simulated_engine.advance(12)
    (complete,) = simulated_engine.end_sequences()
    assert simulated_engine.tokens_by_version(complete) == {0: 4, 1: 2, 2: 4}


def test_prefill_stops_the_decode_steps():
    simulated_engine = engine(prefill_seconds=3.0)
    simulated_engine.take(grant(), [5, 5])
    assert simulated_engine.next_end == 2 * 3 + 10


def test_a_paused_engine_samples_nothing():
    simulated_engine = engine()
    simulated_engine.take(grant(), [5, 5])
    simulated_engine.advance(4)
    simulated_engine.set_paused(True)
    assert simulated_engine.next_end == math.inf
    simulated_engine.advance(100)
    simulated_engine.set_paused(False)
    assert simulated_engine.next_end == 106
    assert simulated_engine.num_tokens == pytest.approx(4)


def test_a_sequence_waits_until_the_cache_has_room_for_all_its_tokens():
    """10 tokens: the first two take (1 + 3) + (1 + 4); the third (1 + 4) waits until the first has ended at 6 s."""
    simulated_engine = engine(slots=4, prompt_tokens=1, cache_tokens=10)
    simulated_engine.take(grant(0), [3, 4])
    simulated_engine.take(grant(1), [4, 1])
    assert (simulated_engine.num_running, simulated_engine.num_waiting) == (2, 2)
    simulated_engine.advance(simulated_engine.next_end)
    assert simulated_engine.cache_wait_seconds == 6
    simulated_engine.end_sequences()
    assert (simulated_engine.num_running, simulated_engine.num_waiting) == (2, 1)
    assert simulated_engine.next_end == 8, "one token of the second sequence is left, at 2 s a step"


def test_an_engine_of_half_the_speed_takes_twice_the_time():
    simulated_engine = engine(speed=0.5)
    simulated_engine.take(grant(), [3, 5])
    assert simulated_engine.next_end == 12


def test_a_pace_is_added_to_each_step_and_a_restart_stops_all_steps():
    """Three steps of 2 s and a pause of 1 s each; the engine is down from 3 s to 8 s, after one step."""
    simulated_engine = engine()
    simulated_engine.set_pace(1.0)
    simulated_engine.take(grant(), [3, 5])
    assert simulated_engine.next_end == 9
    simulated_engine.advance(3)
    simulated_engine.stop(5)
    assert simulated_engine.next_end == 14


def test_a_pause_of_the_schedule_counts_as_idle():
    simulated_engine = engine()
    simulated_engine.take(grant(), [3, 5])
    simulated_engine.advance(2)
    simulated_engine.set_paused(True)
    simulated_engine.advance(12)
    assert simulated_engine.busy_slot_seconds == 2 * 2
    simulated_engine.set_paused(False)
    simulated_engine.advance(14)
    assert simulated_engine.busy_slot_seconds == 2 * 4
