"""How a hub starts beside another one of its run."""

import time

import pytest

from pipelinerl_core.config import build_config
from pipelinerl_core.errors import PipelineRLError
from pipelinerl_core.roles.hub import main
from pipelinerl_core.run.context import RunContext
from pipelinerl_core.run.records import HUB_KEY
from pipelinerl_core.testing.synthetic_run import put_record
from tests.builders import hub_record, run_record


def test_a_hub_that_comes_up_while_another_one_reads_the_past_is_not_fenced_by_it(store, monkeypatch):
    read_stored_state = main.read_stored_state
    record = run_record()
    context = RunContext(store=store, record=record, config=build_config({}), token="a-token-for-tests")
    other = hub_record(beat=time.time() + 3600)

    def read_while_another_starts(*arguments):
        put_record(store, HUB_KEY, other)
        return read_stored_state(*arguments)

    monkeypatch.setattr(main, "read_stored_state", read_while_another_starts)
    with pytest.raises(PipelineRLError, match="this run is live"):
        main.start_hub(context)
    assert store.list("epochs") == []
