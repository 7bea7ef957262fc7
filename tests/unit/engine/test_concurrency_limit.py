"""The concurrency limit of an engine with a shared KV cache: up additively, down multiplicatively."""

from hypothesis import given, settings
from hypothesis import strategies as st

from pipelinerl_core.engine.concurrency_limit import ConcurrencyLimit


def load(running, kv_usage, *, queued=0, num_preemptions=0):
    return {"running": running, "queued": queued, "kv_usage": kv_usage, "num_preemptions": num_preemptions}


def after(limit, *loads, every=10.0, start=0.0):
    """The limit after each observation."""
    return [limit.update(**observation, now=start + (i + 1) * every) for i, observation in enumerate(loads)]


def test_the_limit_starts_at_the_ceiling_and_stays_there_while_there_is_room():
    assert after(ConcurrencyLimit(64, now=0), *[load(64, 0.5)] * 3) == [64, 64, 64]


def test_a_preemption_and_a_full_cache_cut_the_running_sequences_to_four_fifths():
    limit = ConcurrencyLimit(100, now=0)
    assert after(limit, load(100, 0.9, num_preemptions=1), load(80, 0.96, num_preemptions=1)) == [80, 64]
    assert after(ConcurrencyLimit(100, now=0), load(50, 0.99)) == [40]  # places that stood empty are no measure


def test_preemptions_before_the_controller_was_built_do_not_count():
    limit = ConcurrencyLimit(100, now=0, num_preemptions=3)
    assert after(limit, load(100, 0.5, num_preemptions=3), load(100, 0.5, num_preemptions=4)) == [100, 80]


def test_the_limit_grows_by_a_sixteenth_only_while_all_places_are_in_use_and_nothing_queues():
    limit = ConcurrencyLimit(64, now=0)
    after(limit, load(64, 1.0))  # 51
    assert after(limit, load(51, 0.5), load(54, 0.5), load(59, 0.5, queued=1), load(59, 0.9), start=10) == [
        55,
        55,
        55,
        55,
    ]
    assert after(limit, load(55, 0.5), load(59, 0.5), load(63, 0.5), load(64, 0.5), start=60) == [59, 63, 64, 64]


def test_the_limit_looks_once_a_second_and_waits_five_seconds_after_a_cut():
    limit = ConcurrencyLimit(100, now=0)
    assert limit.update(**load(100, 1.0), now=0.9) == 100
    assert limit.update(**load(100, 1.0), now=1.0) == 80
    assert limit.update(**load(100, 1.0), now=5.9) == 80
    assert limit.update(**load(80, 1.0), now=6.0) == 64


@settings(deadline=None)
@given(st.integers(1, 300), st.lists(st.tuples(st.floats(0, 1), st.integers(0, 3)), max_size=60))
def test_the_limit_stays_between_one_and_the_ceiling(ceiling, observations):
    limit, preemptions = ConcurrencyLimit(ceiling, now=0), 0
    for index, (usage, new) in enumerate(observations):
        preemptions += new
        number = limit.update(**load(limit.value, usage, num_preemptions=preemptions), now=index * 7.0)
        assert 1 <= number <= ceiling
