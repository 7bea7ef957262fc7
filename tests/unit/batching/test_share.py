"""Sharing packs out among ranks."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipelinerl_core.batching.pack import pack, share


def test_the_example_of_the_docstring():
    assert share([4] * 6, 20, 2) == [[[0, 1, 2]], [[3, 4, 5]]]


def test_a_rank_without_work_gets_an_empty_pack():
    assert share([5], 20, 3) == [[[0]], [[]], [[]]]
    assert share([], 20, 2) == [[[]], [[]]]


@settings(deadline=None)
@given(
    st.lists(st.integers(1, 60), max_size=60),
    st.integers(1, 50),
    st.integers(1, 5),
    st.sampled_from(["sorted", "filled"]),
)
def test_every_sequence_once_and_equally_many_packs(lengths, pack_tokens, ranks, packing):
    shares = share(lengths, pack_tokens, ranks, packing)
    assert len(shares) == ranks
    assert len({len(packs) for packs in shares}) == 1
    assert sorted(index for packs in shares for chosen in packs for index in chosen) == list(range(len(lengths)))
    for packs in shares:
        for chosen in packs:
            assert sum(lengths[index] for index in chosen) <= pack_tokens or len(chosen) == 1
    # No rank computes more packs than its part of the fewest, rounded up.
    assert len(shares[0]) == max(1, -(-len(pack(lengths, pack_tokens, packing)) // ranks))


@pytest.mark.parametrize("ranks", [2, 4])
def test_tokens_are_about_equal_on_a_long_tail(ranks):
    lengths = [max(16, int(1000 * 0.97**index)) for index in range(200)]
    shares = share(lengths, 2048, ranks)
    tokens = [sum(lengths[index] for chosen in packs for index in chosen) for packs in shares]
    assert max(tokens) < 1.1 * min(tokens)
