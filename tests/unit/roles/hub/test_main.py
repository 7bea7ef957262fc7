"""How a hub starts beside another one of its run."""

import time
from types import SimpleNamespace

import pytest

from pipelinerl_core.errors import PipelineRLError
from pipelinerl_core.messages import ActorSample, Register
from pipelinerl_core.models.resolve import build_config, load_config
from pipelinerl_core.roles.hub import main, service
from pipelinerl_core.run.context import RunContext
from pipelinerl_core.run.records import HUB_KEY
from tests.builders import commit_record, hub_record, run_record, sync_message
from tests.synthetic_run import put_record


def test_a_hub_that_comes_up_while_another_hub_reads_the_past_is_not_fenced_by_that_hub(store, monkeypatch):
    read_stored_state = main.read_stored_state
    record = run_record()
    context = RunContext(store=store, record=record, config=build_config({}), token="a-token-for-tests")
    other = hub_record(beat=time.time() - 3600)

    def read_while_another_starts(*arguments):
        put_record(store, HUB_KEY, other)
        return read_stored_state(*arguments)

    monkeypatch.setattr(main, "read_stored_state", read_while_another_starts)
    with pytest.raises(PipelineRLError, match="this run is live"):
        main.start_hub(context)
    assert store.list("epochs") == []


class Clocks:
    """Both clocks of module time; the wall clock can be set."""

    def __init__(self, monkeypatch):
        self.now, self.offset = 100.0, 1e9
        clocks = SimpleNamespace(time=lambda: self.now + self.offset, monotonic=lambda: self.now)
        for module in (main, service):
            monkeypatch.setattr(module, "time", clocks)


@pytest.mark.parametrize("step_seconds", [-3600.0, 3600.0])
def test_leases_last_as_long_as_ever_although_the_clock_is_set(store, monkeypatch, step_seconds):
    clocks = Clocks(monkeypatch)
    config = load_config("quickstart", ["placement.lease_seconds=10"])
    hub, _ = main.start_hub(RunContext(store=store, record=run_record(), config=config, token="a-token-for-tests"))
    hub.connected("peer", lambda: None)

    def ask(message):
        ((answer, _),) = hub.handle("peer", message, None)
        return answer

    def pass_seconds(seconds):
        for _ in range(seconds):
            clocks.now += 1.0
            hub.tick()
        return hub.read(lambda ledger: {"leased": ledger.num_leased})["leased"]

    boot_id = ask(Register(role="actor", name="a", epoch=1)).boot_id
    assert len(ask(sync_message(boot_id=boot_id, want=1)).leases) == 1
    assert pass_seconds(4) == 1
    clocks.offset += step_seconds
    assert pass_seconds(5) == 1
    assert pass_seconds(2) == 0


@pytest.mark.parametrize("ahead_seconds", [0.0, 3600.0])
def test_the_clock_of_a_hub_begins_after_the_samples_of_an_earlier_hub(monkeypatch, ahead_seconds):
    clocks = Clocks(monkeypatch)
    sample = ActorSample(
        at=clocks.now + clocks.offset + ahead_seconds, engine_version=0, running=0, waiting=0, concurrency=1,
        num_tokens=0, running_seconds=0.0,
    )  # fmt: skip
    clock = main.steady_clock(commit_record(1, actors={"a/1": sample}))
    assert clock() >= sample.at
    before, clocks.offset = clock(), 0.0
    clocks.now += 1.0
    assert clock() - before == 1.0
