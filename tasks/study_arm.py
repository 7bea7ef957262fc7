"""The Prefect task that carries out one arm of a study."""

from prefect import get_run_logger, task
from prefect.cache_policies import NO_CACHE
from prefect.runtime import flow_run

from pipelinerl_core.comparison.whatif.plan import PlannedArm
from pipelinerl_core.comparison.whatif.run_arm import run_arm
from pipelinerl_core.run.records import Commit

_PROGRESS_STEPS = 20


@task(name="arm", persist_result=False, cache_policy=NO_CACHE)
def study_arm(arm: PlannedArm) -> None:
    """One arm: train, evaluate, log to MLflow; a finished arm is left as it is."""
    logger = get_run_logger()

    def show(commit: Commit) -> None:
        if commit.step % _PROGRESS_STEPS == 0 or commit.step == arm.origin.last:
            logger.info("%s: step %d of %d", arm.name, commit.step, arm.origin.last)

    run_arm(arm, flow_run_id=str(flow_run.id), on_step=show)
