"""Suspend and Resume in the Prefect UI: the run drains, and its flow run stays Suspended until a user resumes it.

    UI --state Suspended, with a deadline--> this flow run: asks the trainer to drain, waits for the roles
                                             --state Suspended, without a deadline--> Prefect; the process ends
    UI --Resume--> a worker starts the flow run again, which continues the run

The deadline of the UI's state is 300 s: if a user resumes later, Prefect makes the flow run Failed. The run drains,
too, if its flow run was deleted, or is not Running any more while its process lives: between two looks a user may
Suspend and Resume, or Suspend and Cancel.
"""

import logging
import threading
import time
import uuid
from contextlib import suppress
from functools import partial
from typing import NoReturn
from uuid import UUID

from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.objects import State
from prefect.context import FlowRunContext
from prefect.events import emit_event
from prefect.exceptions import ObjectNotFound, Pause
from prefect.runtime import flow_run
from prefect.settings import get_current_settings
from prefect.states import Suspended

from pipelinerl.tasks.automations import TAG
from pipelinerl.tasks.drain_request import BY_STATE
from pipelinerl.tasks.placement import is_deployed
from pipelinerl_core.errors import MissingObject, StoreUnavailable
from pipelinerl_core.run.drain import drained_by, wants_drain
from pipelinerl_core.run.hub_status import HubWatch
from pipelinerl_core.storage.object_store import open_store

logger = logging.getLogger(__name__)

LOOK_SECONDS = 5.0
"""Shortest time between two inquiries for the state of the flow run."""
AFTER_ERROR_SECONDS = 60.0
"""The same after an inquiry without an answer."""
NOTICE_SECONDS = 90.0
"""Within which an earlier start notices that the flow run has left it."""
END_SECONDS = 3600.0
"""Deadline of the wait for the end of an earlier start that drains."""
HELD_EVENT = "prefect.flow-run.held"
_POLL_SECONDS = 2.0


def why_drain() -> str:
    """Why this start of a flow run must end; "" while its state is Running.

    Asks the Prefect server. A state Suspended gets no deadline. Raises KeyboardInterrupt, as Ctrl-C, if the flow run
    was cancelled and has no deployment, so that no worker signals its process.
    """
    if not is_deployed():
        _interrupt_if_cancelled()
        return ""
    if flow_run.flow_name not in ("train", "compared-run", "compare", "sweep"):
        return ""
    with get_client(sync_client=True) as client:
        try:
            current = client.read_flow_run(UUID(str(flow_run.id)))
        except ObjectNotFound:
            return "the flow run was deleted"
        if _is_suspended(current.state):
            _suspend(client, "suspended, the run drains")
            return "the flow run is suspended"
    own = FlowRunContext.get()
    if current.state is None or own is None or own.flow_run is None:
        return ""
    # Resume does not count as a run of the flow run, but makes another state Running.
    if current.state.is_running() and current.state.id != own.flow_run.state_id:
        return "the flow run was started again"
    is_replaced = flow_run.flow_name == "compared-run" and current.state.is_crashed()  # by the comparison
    has_left = is_replaced or current.state.is_cancelled() or current.state.is_scheduled()
    return f"the flow run is {current.state.name}" if has_left else ""


class Inquiry:
    """`why_drain`, as often as LOOK_SECONDS allows."""

    def __init__(self) -> None:
        self._next = 0.0

    def why_drain(self) -> str:
        """As `why_drain`; "" also until the next inquiry is due, and if the server does not answer."""
        if time.monotonic() < self._next:
            return ""
        self._next = time.monotonic() + AFTER_ERROR_SECONDS
        try:
            reason = why_drain()
        except Exception as error:  # noqa: BLE001 (the run does not depend on the Prefect server, whatever the client raises)
            logger.warning("question for the state of the flow run: %s", error)
            return ""
        self._next = time.monotonic() + LOOK_SECONDS
        return reason


def _interrupt_if_cancelled() -> None:
    own = FlowRunContext.get()
    is_whole = own is not None and own.flow_run is not None and own.flow_run.parent_task_run_id is None
    if not is_whole or not get_current_settings().api.url:
        return
    with get_client(sync_client=True) as client:
        state = client.read_flow_run(UUID(str(flow_run.id))).state
    if state is not None and (state.is_cancelling() or state.is_cancelled()):
        logger.warning("the flow run is cancelled")
        raise KeyboardInterrupt


def hold(done: str) -> NoReturn:
    """End this process, and leave the flow run as it is, if it is Suspended without a deadline.

    done: for the message, such as "step 7". Raises Pause, on which Prefect ends the process.
    """
    flow_run_id = UUID(str(flow_run.id))
    try:
        with get_client(sync_client=True) as client:
            if _is_suspended(client.read_flow_run(flow_run_id).state):
                _suspend(client, f"suspended after {done}; Resume continues the run")
    except Exception as error:  # noqa: BLE001 (whatever the client raises, the process ends and the run is drained)
        logger.warning("the state of the flow run could not be set: %s", error)
    # An event after the last heartbeat: pipelinerl-unresponsive makes a flow run Crashed whose last event is a
    # heartbeat, and a heartbeat may follow the state. Python calls functions of `atexit` after Prefect's sender of
    # events has ended, and functions of `threading._register_atexit` before.
    threading._register_atexit(  # type: ignore[attr-defined]
        partial(
            emit_event,
            HELD_EVENT,
            resource={"prefect.resource.id": f"prefect.flow-run.{flow_run_id}"},
            related=[{"prefect.resource.id": f"prefect.tag.{TAG}", "prefect.resource.role": "tag"}],
        )
    )
    raise Pause


def _suspend(client: SyncPrefectClient, message: str) -> None:
    state: State[None] = Suspended(message=message, pause_key=uuid.uuid4().hex)
    client.set_flow_run_state(UUID(str(flow_run.id)), state, force=True)


def await_earlier_start(url: str) -> None:
    """Wait until no hub of the run at `url` is live, because the earlier start of this flow run may drain.

    Returns after NOTICE_SECONDS if the run does not drain because of a flow run's state, and after END_SECONDS.
    """
    store = open_store(url)
    hub, begun = HubWatch(store), time.monotonic()
    with suppress(StoreUnavailable, MissingObject):  # the start reports an outage; the drain request may be deleted
        while hub.find_live() is not None:
            drains = wants_drain(store) and drained_by(store).startswith(BY_STATE)
            if time.monotonic() - begun > (END_SECONDS if drains else NOTICE_SECONDS):
                return
            time.sleep(_POLL_SECONDS)


def _is_suspended(state: State[object] | None) -> bool:
    return state is not None and state.is_paused() and state.name == "Suspended"
