"""Tokens per second in hub.json."""

from types import SimpleNamespace

import pytest

from pipelinerl_core.roles.hub import heartbeat


def test_tokens_that_an_actor_sampled_before_this_hub_heard_of_it_are_no_speed(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(heartbeat, "time", SimpleNamespace(monotonic=lambda: now[0]))
    builder = heartbeat.HubRecordBuilder.__new__(heartbeat.HubRecordBuilder)
    builder._sampled = heartbeat.deque()

    def speed(seconds, **sampled):
        now[0] += seconds
        return builder._speed({"actors": {name: {"num_sampled": number} for name, number in sampled.items()}})

    assert speed(0) == 0.0
    assert speed(2, a=1_000_000) == 0.0
    assert speed(2, a=1_000_400) == pytest.approx(100.0)
    assert speed(2, a=1_000_400, b=50) == pytest.approx(400 / 6)
    assert speed(2, b=250) == pytest.approx(200 / 8), "of an actor that has left nothing is known"
