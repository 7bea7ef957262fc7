"""What the actor and trainer flows of a work pool do: supervise one role by the same task as a local run."""

import logging
import time
from dataclasses import replace
from typing import Any
from uuid import UUID

from prefect import get_client
from prefect.client.schemas.objects import State
from prefect.exceptions import ObjectNotFound
from prefect.runtime import flow_run
from prefect.states import Cancelled

from pipelinerl.tasks.placement import TRAINER, Crew, load_token
from pipelinerl_core.config import RunConfig
from pipelinerl_core.run.context import open_run
from pipelinerl_core.run.locate import remove_shared_memory

logger = logging.getLogger(__name__)

FOLLOW_SECONDS = 1.0
STATE_SECONDS = 10.0
"""How often the flow run looks whether it was ended on the server."""


def run_pooled(run_url: str, name: str) -> State[Any] | None:
    """Run one role of a live run on this machine until it ends; call it in a flow, and return what it returns.

    A worker signals a flow run that is cancelled. One whose worker was killed gets no signal, and ends by itself:
    a second trainer that lives on would take the run away from the one in its place.
    """
    run = open_run(run_url)
    crew = Crew(replace(run, token=load_token(run.run_id), config=_on_this_host(run.config)))
    looked_at, end = time.monotonic(), None
    try:
        crew.start(name)
        while not crew.has_ended(name) and end is None:
            crew.wait(FOLLOW_SECONDS)
            if time.monotonic() - looked_at >= STATE_SECONDS:
                end = _ended_elsewhere()
                looked_at = time.monotonic()
    finally:
        try:
            crew.stop()
        finally:
            if name == TRAINER:  # the actors of this host may still read it
                remove_shared_memory(run)
    return end


def _ended_elsewhere() -> State[Any] | None:
    """The state in which this flow run was ended on the server; None while it runs there or cannot be asked for.

    It stays as it is: the train flow starts another one for a crashed one, and none for one that was cancelled.
    """
    try:
        with get_client(sync_client=True) as client:
            state = client.read_flow_run(UUID(str(flow_run.id))).state
    except ObjectNotFound:
        return Cancelled(message="the flow run was deleted")
    except Exception as error:  # noqa: BLE001 (whatever the client raises: the role does not depend on it)
        logger.debug("the state of this flow run could not be read: %s", error)
        return None
    if state is None or not (state.is_final() or state.is_cancelling()):
        return None
    logger.warning("this flow run is %s, and nobody has told its process: the role ends", state.name)
    if state.is_cancelling():
        return Cancelled(message="cancelled, without a signal from a worker")
    return State(type=state.type, name=state.name, message=state.message)


def _on_this_host(config: RunConfig) -> RunConfig:
    """The same configuration, with the role as a child of this flow."""
    return config.model_copy(update={"placement": config.placement.model_copy(update={"kind": "local"})})
