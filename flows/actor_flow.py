"""The flow of one actor on a work pool; the train flow starts it as the deployment actor/actor."""

from typing import Annotated, Any

from prefect import flow
from prefect.client.schemas.objects import State
from pydantic import Field

from pipelinerl.flows.parameters import RunUrl, described
from pipelinerl.tasks.pooled import run_pooled

Name = Annotated[str, Field(description="Name of the actor in the run, unique among its actors.")]


@flow(name="actor", persist_result=False)
@described
def actor(run_url: RunUrl, name: Name = "actor-0") -> State[Any] | None:
    """Generate rollouts for a live run until the run ends. Any number of actors may join, leave or die."""
    return run_pooled(run_url, name)
