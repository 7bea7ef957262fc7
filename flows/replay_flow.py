"""The replay flow: train recorded batches again and compare the result with the recorded losses and weights."""

from typing import Annotated, Any

from prefect import flow
from prefect.runtime import flow_run
from prefect.task_runners import ThreadPoolTaskRunner
from pydantic import Field

from pipelinerl.flows.parameters import described
from pipelinerl_core.comparison.whatif.document import replay_document
from pipelinerl_core.comparison.whatif.run_arm import run_arm
from pipelinerl_core.comparison.whatif.study import plan_replay
from pipelinerl_core.run.context import open_run
from pipelinerl_core.run.locate import locate_run
from pipelinerl_core.tools.replay_child import replay_run

Run = Annotated[str, Field(description="Id under the root, `latest`, or the path or URL of a run.")]
Step = Annotated[
    int, Field(description="First or last step to train again; 0: the first or last step of the run.", ge=0)
]
Overrides = Annotated[
    tuple[str, ...],
    Field(description='Settings of another loss or learner, for example "loss.ratio_max=2". Empty: verify the run.'),
]
Root = Annotated[
    str,
    Field(description="Directory or URL below which runs are stored. Empty: $PIPELINERL_ROOT if set, else ./runs."),
]


@flow(name="replay", task_runner=ThreadPoolTaskRunner(), persist_result=False)  # type: ignore[arg-type]
@described
def replay(
    run: Run = "latest", from_step: Step = 0, to_step: Step = 0, overrides: Overrides = (), root: Root = ""
) -> dict[str, Any]:
    """Train recorded batches again: without overrides to verify the run, with overrides to answer what-if.

    Without overrides the flow fails if any loss or weight differs, bit for bit, from the recorded one. With overrides
    the weights are kept beside the run, evaluated, and compared with the run (docs/what-if.md).
    """
    context = open_run(locate_run(run, root))
    if not overrides:
        return replay_run(context, from_step, to_step)
    planned = plan_replay(context, overrides, from_step or None, to_step or None)
    run_arm(planned.arms[0], flow_run_id=str(flow_run.id))
    return replay_document(planned.write())
