"""`bench trainer` in miniature: that it measures what it says. Never how fast it is."""

from benchmarks.trainer import measure, table


def test_the_parts_that_are_left_are_some_of_the_parts_of_release_0_1_0():
    measurement = measure(num_groups=2, num_tokens=16, ranks=2, rounds=1)
    assert measurement["rollouts"] == 16
    assert 0 < measurement["now"] < sum(measurement["seconds"].values())
    assert "| between two steps |" in table(measurement)
