"""The flow of the trainer on a work pool; the train flow starts it as the deployment trainer/trainer."""

from typing import Annotated, Any

from prefect import flow
from prefect.client.schemas.objects import State
from pydantic import Field

from pipelinerl.flows.parameters import RunUrl, described
from pipelinerl.tasks.placement import TRAINER
from pipelinerl.tasks.pooled import run_pooled
from pipelinerl.tasks.role_tasks import NODE_PREFIX

Node = Annotated[
    int,
    Field(
        description="Index of this host among the placement.trainer_nodes hosts of the trainer; host 0 has rank 0.",
        ge=0,
    ),
]


@flow(name="trainer", persist_result=False)
@described
def trainer(run_url: RunUrl, node: Node = 0) -> State[Any] | None:
    """Take the optimizer steps of a live run. With several nodes, each node runs a part of the ranks."""
    return run_pooled(run_url, f"{NODE_PREFIX}{node}" if node else TRAINER)
