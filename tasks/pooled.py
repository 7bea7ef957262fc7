"""The body of the actor and trainer flows: supervises one role on a work pool with the task of a local run."""

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

from pipelinerl.tasks.outage import crashed_by_outage
from pipelinerl.tasks.placement import TRAINER, RunRoles, load_token
from pipelinerl_core.config import RunConfig
from pipelinerl_core.errors import ConfigError, StoreUnavailable
from pipelinerl_core.run.context import open_run
from pipelinerl_core.run.locate import remove_shared_memory

logger = logging.getLogger(__name__)

FOLLOW_SECONDS = 1.0
STATE_SECONDS = 10.0
"""Time between two reads of the state of this flow run on the server."""


def run_pooled(run_url: str, name: str) -> State[Any] | None:
    """Run one role of a live run on this machine until the role ends; a flow calls this and returns the result.

    A worker signals a flow run that is cancelled. If the worker was killed, there is no signal: this function then
    reads the state of the flow run and stops the role, because a second trainer would fence its replacement.
    """
    run = open_run(run_url)
    if run.config.placement.kind != "work_pools":
        raise ConfigError(
            f"{run_url}: its roles run on the host of its flow run (placement.kind={run.config.placement.kind}). "
            "`pipelinerl actor RUN` adds an actor there; with placement.kind=work_pools workers take roles"
        )
    roles = RunRoles(replace(run, token=load_token(run.store.url), config=_on_this_host(run.config)))
    checked_at, end = time.monotonic(), None
    try:
        roles.start(name)
        while not roles.has_ended(name) and end is None:
            roles.wait(FOLLOW_SECONDS)
            if time.monotonic() - checked_at >= STATE_SECONDS:
                end = _state_on_server()
                checked_at = time.monotonic()
    except StoreUnavailable as error:  # the train flow replaces a crashed flow run
        end = crashed_by_outage(run.store.url, error)
    finally:
        try:
            roles.stop()
        finally:
            if name == TRAINER:  # an actor leaves it to the other actors of this host
                remove_shared_memory(run)
    return end


def _state_on_server() -> State[Any] | None:
    """The final state of this flow run if the server has ended it; None if it runs or its state cannot be read.

    The state is kept, because the train flow replaces a crashed flow run but not a cancelled one.
    """
    try:
        with get_client(sync_client=True) as client:
            state = client.read_flow_run(UUID(str(flow_run.id))).state
    except ObjectNotFound:
        return Cancelled(message="the flow run was deleted")
    except Exception as error:  # noqa: BLE001 (the role does not depend on the Prefect server, whatever the client raises)
        logger.debug("could not read the state of this flow run: %s", error)
        return None
    if state is None or not (state.is_final() or state.is_cancelling()):
        return None
    logger.warning(
        "the server has set this flow run to %s, but no worker has signalled this process: the role stops", state.name
    )
    if state.is_cancelling():
        return Cancelled(message="cancelled, without a signal from a worker")
    return State(type=state.type, name=state.name, message=state.message)


def _on_this_host(config: RunConfig) -> RunConfig:
    """The configuration with placement.kind=local: this flow starts the role as a child process."""
    return config.model_copy(update={"placement": config.placement.model_copy(update={"kind": "local"})})
