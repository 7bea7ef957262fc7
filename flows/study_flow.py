"""The study flow: train the recorded rollouts of a run with the settings of several arms, and compare the arms."""

from collections.abc import Mapping
from typing import Annotated, Any

from prefect import flow, get_run_logger
from prefect.task_runners import ThreadPoolTaskRunner
from pydantic import Field

from pipelinerl.flows.parameters import described
from pipelinerl.flows.replay_flow import Root, Run, Step
from pipelinerl.tasks.study_arm import study_arm
from pipelinerl_core.comparison.whatif.limit import ESS_SHARE
from pipelinerl_core.comparison.whatif.study import WhatIf, plan_study
from pipelinerl_core.config.arm import Arm
from pipelinerl_core.errors import ConfigError, PipelineRLError
from pipelinerl_core.run.context import open_run
from pipelinerl_core.run.locate import locate_run

Arms = Annotated[
    dict[str, list[str]],
    Field(description='Arm name -> changed settings of loss and learner, for example {"ppo": ["loss.kind=ppo"]}.'),
]
Share = Annotated[
    float,
    Field(description="An arm is not ranked once its effective sample size is below this share of the recorded one."),
]


class StudyFailed(PipelineRLError):
    """At least one arm failed, or the recorded objective did not come out bit for bit."""


@flow(name="study", task_runner=ThreadPoolTaskRunner(), persist_result=False)  # type: ignore[arg-type]
@described
def study(
    arms: Arms,
    run: Run = "latest",
    from_step: Step = 0,
    to_step: Step = 0,
    ess_share: Share = ESS_SHARE,
    root: Root = "",
) -> dict[str, Any]:
    """Train the recorded rollouts with several settings. The same parameters continue an interrupted study.

    The recorded objective is always one arm and must come out bit for bit. Returns whatif.json.
    """
    wanted = [Arm(name, tuple(settings)) for name, settings in arms.items()]
    context = open_run(locate_run(run, root))
    document = study_arms(plan_study(context, wanted, from_step or None, to_step or None, ess_share))
    if reason := failure(document):
        raise StudyFailed(reason)
    return document


def study_arms(planned: WhatIf) -> dict[str, Any]:
    """The body of the study flow; returns whatif.json with the arms that failed."""
    logger, failed = get_run_logger(), {}
    done = sum(arm.is_trained for arm in planned.arms)
    logger.info("%d arms, %d of them already trained", len(planned.arms), done)
    for number, arm in enumerate(planned.arms, 1):
        logger.info("arm %d of %d: %s %s", number, len(planned.arms), arm.name, " ".join(arm.origin.overrides))
        try:
            study_arm.with_options(task_run_name=arm.name)(arm)
        except ConfigError:
            raise
        except PipelineRLError as error:
            logger.exception("%s failed", arm.name)
            failed[arm.name] = f"{type(error).__name__}: {error}".splitlines()[0]
        planned.write()
    return {**planned.write(), "failed": failed}


def failure(document: Mapping[str, Any]) -> str:
    """Why a study has failed; empty if it has not."""
    failed = "; ".join(f"{arm}: {reason}" for arm, reason in document["failed"].items())
    if failed:
        return f"{failed}. The other arms are in {document['url']}"
    if not document["exact"]:
        step = document["arms"]["recorded"].get("first_difference")
        return f"the recorded objective differs from the run from step {step} on, so nothing is ranked"
    return ""
