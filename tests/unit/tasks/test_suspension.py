"""Which flow runs must end because Prefect believes that they are dead."""

from contextlib import nullcontext
from types import SimpleNamespace
from unittest.mock import MagicMock
from uuid import uuid4

import pytest
from prefect.states import Cancelling, Crashed, Running

from pipelinerl.tasks import suspension


@pytest.mark.parametrize(
    ("flow_name", "state", "reason"),
    [
        ("compared-run", Crashed(), "the flow run is Crashed"),  # its comparison has started another flow run
        ("compared-run", Running(), ""),
        ("train", Crashed(), ""),  # until the flow run is started again
        ("replay", Crashed(), ""),
    ],
)
def test_a_crashed_flow_run_of_a_comparison_drains_its_run(monkeypatch, flow_name, state, reason):
    own = MagicMock(state_id=state.id)
    client = MagicMock()
    client.__enter__.return_value.read_flow_run.return_value = MagicMock(state=state)
    monkeypatch.setattr(suspension, "is_deployed", lambda: True)
    monkeypatch.setattr(suspension, "flow_run", SimpleNamespace(id=uuid4(), flow_name=flow_name))
    monkeypatch.setattr(suspension, "get_client", lambda **_: client)
    monkeypatch.setattr(suspension.FlowRunContext, "get", lambda: SimpleNamespace(flow_run=own))
    assert suspension.why_drain() == reason


@pytest.mark.parametrize(
    ("url", "parent", "state", "ends"),
    [
        ("http://server/api", None, Cancelling(), True),
        ("http://server/api", None, Running(), False),
        ("http://server/api", uuid4(), Cancelling(), False),  # a run of a comparison in this process
        ("", None, Cancelling(), False),  # no server that others reach
    ],
)
def test_cancel_interrupts_a_process_that_no_worker_has_started(monkeypatch, url, parent, state, ends):
    client = MagicMock()
    client.__enter__.return_value.read_flow_run.return_value = MagicMock(state=state)
    own = MagicMock(deployment_id=None, parent_task_run_id=parent)
    monkeypatch.setattr(suspension, "is_deployed", lambda: False)
    monkeypatch.setattr(suspension, "flow_run", SimpleNamespace(id=uuid4()))
    monkeypatch.setattr(suspension, "get_client", lambda **_: client)
    monkeypatch.setattr(suspension.FlowRunContext, "get", lambda: SimpleNamespace(flow_run=own))
    monkeypatch.setattr(suspension, "get_current_settings", lambda: SimpleNamespace(api=SimpleNamespace(url=url)))
    with pytest.raises(KeyboardInterrupt) if ends else nullcontext():
        assert suspension.why_drain() == ""
