"""The flow of one actor on a work pool; the train flow starts it as the deployment actor/actor."""

import socket
from typing import Annotated, Any

from prefect import flow
from prefect.client.schemas.objects import State
from prefect.runtime import flow_run
from pydantic import Field

from pipelinerl.flows.parameters import RunUrl, described
from pipelinerl.tasks.pooled import run_pooled
from pipelinerl_core.run.locate import plain_name

Name = Annotated[
    str,
    Field(description="Name of the actor in the run, unique among its actors. Empty: a new name of the host."),
]


@flow(name="actor", persist_result=False)
@described
def actor(run_url: RunUrl, name: Name = "") -> State[Any] | None:
    """Generate rollouts for a live run until the run ends. Any number of actors may join, leave or die."""
    return run_pooled(run_url, name or f"{plain_name(socket.gethostname())}-{str(flow_run.id)[-8:]}")
