"""A drain request is read even if earlier reads have failed."""

import threading

import pytest

from pipelinerl_core.errors import StoreError
from pipelinerl_core.run import drain
from pipelinerl_core.run.drain import ask_to_drain, stop_when_drained
from tests.fakes import MemoryStore


@pytest.mark.parametrize("error", [StoreError("503"), PermissionError("a key has expired"), KeyError("Body")])
def test_a_drain_is_seen_after_looks_that_have_failed(error, monkeypatch, caplog):
    class Failing(MemoryStore):
        num_looks = 0

        def get(self, key):
            self.num_looks += 1
            if self.num_looks <= 2:
                raise error
            return super().get(key)

    monkeypatch.setattr(drain, "LOOK_SECONDS", 0.01)
    store, stop = Failing(), threading.Event()
    ask_to_drain(store, by="this test")
    stop_when_drained(store, stop)
    assert stop.wait(60)
    assert f"control.json could not be read: {type(error).__name__}" in caplog.text
