"""The replay flow: train recorded batches again and compare the result with the recorded losses and weights."""

from typing import Annotated, Any

from prefect import flow
from pydantic import Field

from pipelinerl.flows.parameters import Root, Run, described
from pipelinerl_core.run.context import open_run
from pipelinerl_core.run.locate import locate_run
from pipelinerl_core.tools.replay_child import replay_run

Step = Annotated[
    int, Field(description="First or last step to train again; 0: the first or last step of the run.", ge=0)
]


@flow(name="replay", persist_result=False)
@described
def replay(run: Run = "latest", from_step: Step = 0, to_step: Step = 0, root: Root = "") -> dict[str, Any]:
    """Train recorded batches again to verify the run: fails if any loss or weight differs, bit for bit, from the
    recorded one."""
    return replay_run(open_run(locate_run(run, root)), from_step, to_step)
