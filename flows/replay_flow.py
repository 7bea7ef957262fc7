"""Recorded batches trained again, on the machine of a work pool or from any flow."""

from typing import Annotated, Any

from prefect import flow
from prefect.task_runners import ThreadPoolTaskRunner
from pydantic import Field

from pipelinerl.flows.parameters import described
from pipelinerl_core.run.context import open_run
from pipelinerl_core.run.locate import locate_run
from pipelinerl_core.tools.replay_child import replay_run

Run = Annotated[str, Field(description="Id under the root, `latest`, or the path or URL of a run.")]
Step = Annotated[int, Field(description="First or last step to train again; 0: of the run.", ge=0)]
Overrides = Annotated[
    tuple[str, ...],
    Field(description='Another loss or learner, for a study, for example "loss.ratio_max=2". Empty: prove the run.'),
]
Root = Annotated[str, Field(description="Where runs are kept. Empty: $PIPELINERL_ROOT, then ./runs.")]


@flow(name="replay", task_runner=ThreadPoolTaskRunner(), persist_result=False)  # type: ignore[arg-type]
@described
def replay(
    run: Run = "latest", from_step: Step = 0, to_step: Step = 0, overrides: Overrides = (), root: Root = ""
) -> dict[str, Any]:
    """The same losses and weights bit for bit, or what other settings of loss or learner make of the same data.

    Fails when a replay without overrides differs from what the run recorded.
    """
    return replay_run(open_run(locate_run(run, root)), from_step, to_step, overrides)
