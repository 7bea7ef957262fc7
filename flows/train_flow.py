"""The train flow: hub and trainer, first evaluation, actors, until the last step; then evaluation and report."""

import logging
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Annotated, Any

from prefect import flow
from prefect.client.schemas.objects import State
from prefect.runtime import flow_run
from prefect.states import Completed
from prefect.task_runners import ThreadPoolTaskRunner
from pydantic import Field

from pipelinerl.flows.parameters import Settings, described
from pipelinerl.tasks.drain_request import clear_drain_request
from pipelinerl.tasks.placement import HUB, TRAINER, Crew, hub_token
from pipelinerl.tasks.preflight import preflight
from pipelinerl.tasks.report import write_reports
from pipelinerl.tasks.run_watch import RunWatch
from pipelinerl_core.config import RunConfig
from pipelinerl_core.run.context import RunContext, note_resume
from pipelinerl_core.run.drain import wants_drain
from pipelinerl_core.run.jobs import Job, new_job, resume_job
from pipelinerl_core.run.locate import (
    create_run,
    find_run,
    new_run_id,
    refuse_if_live,
    remember_latest,
    remove_shared_memory,
    run_url,
)
from pipelinerl_core.run.mlflow_run import RunTracker, open_tracker
from pipelinerl_core.run.records import eval_key
from pipelinerl_core.run.start_count import count_start

logger = logging.getLogger(__name__)

INITIAL_WEIGHTS_SECONDS = 600.0
"""Loading the model, or training again what followed the newest checkpoint, ends within this time."""
FOLLOW_SECONDS = 1.0

Preset = Annotated[
    str, Field(description="A shipped preset such as quickstart, or a TOML file on the machine that runs the flow.")
]
Overrides = Annotated[
    tuple[str, ...],
    Field(
        description='Any other settings, each "section.key=value", for example "learner.clip_norm=0.5"; '
        "`pipelinerl config --keys` lists them."
    ),
]
Changes = Annotated[Settings, Field(description="What differs from the preset; empty fields are as it says.")]
Root = Annotated[
    str, Field(description="Where runs are kept, a path or s3://bucket/prefix. Empty: $PIPELINERL_ROOT, then ./runs.")
]
Resume = Annotated[
    str,
    Field(
        description="Go on with this run instead (id under the root, `latest`, path or URL); its own configuration "
        "holds, preset and settings are not read; overrides may change what it runs on, such as trainer.ranks."
    ),
]


@flow(name="train", task_runner=ThreadPoolTaskRunner(), persist_result=False)  # type: ignore[arg-type]
@described
def train(
    preset: Preset = "quickstart",
    settings: Changes = Settings(),  # noqa: B008 (frozen)
    overrides: Overrides = (),
    root: Root = "",
    resume: Resume = "",
) -> dict[str, Any] | State[dict[str, Any]]:
    """Train a model: generation and training side by side, weights swapped in flight.

    A retry of this flow run resumes the same run. Returns the report (report.json); of a run that was drained, in a
    state of that name.
    """
    changes = (*settings.overrides(), *overrides)
    return train_run(resume_job(resume, changes, root) if resume else new_job(preset, changes, root))


def train_run(job: Job, *, is_checked: bool = False) -> dict[str, Any] | State[dict[str, Any]]:
    """The work of the train flow. is_checked: the configuration was checked where it was parsed."""
    run, tracker = open_job(job, is_checked=is_checked)
    logger.info("run %s", run.store.url)
    with RunWatch(run, tracker) as watch:
        if watch.committed_step < run.config.trainer.steps:
            run_roles(run, watch)
        report = write_reports(run)
        watch.finish(report)
    if watch.committed_step < run.config.trainer.steps:
        return Completed(
            name="Drained", message=f"stopped after step {watch.committed_step}; resume goes on", data=report
        )
    return report


def open_job(job: Job, *, is_checked: bool) -> tuple[RunContext, RunTracker]:
    """Start and resume are one path: a run whose run.json exists goes on, any other is created."""
    if job.run:
        note_resume(job.run.store, job.overrides)
        return open_at(job.run.store.url, job.config, {}, run=job.run, is_checked=is_checked)
    url = run_url(job.root, new_run_id(job.preset, str(flow_run.id)))
    return open_at(url, job.config, {"preset": job.preset}, is_checked=is_checked)


def open_at(
    url: str, config: RunConfig, labels: Mapping[str, str], *, run: RunContext | None = None, is_checked: bool = False
) -> tuple[RunContext, RunTracker]:
    """The run at a URL, created with this configuration if there is none; one that is there has its own.

    labels: tags of its MLflow run. run: the run, if it is open already. is_checked: the configuration was checked.
    """
    show_supervision()
    flow_run_id = str(flow_run.id)
    run = run or find_run(url)
    config = run.config if run else config
    refuse_if_live(url)
    count_start(url, flow_run_id, flow_run.run_count, config.placement.max_resumes)
    if not is_checked:
        preflight(config, url.rpartition("/")[0])
    tracker, mlflow = open_tracker(config, url, run.record if run else None, flow_run_id, labels)
    if run is None:
        run = create_run(url, config, flow_run_id=flow_run_id, mlflow=mlflow)
    clear_drain_request(run.store, flow_run_id)
    remember_latest(url)
    return replace(run, token=hub_token(run)), tracker


def show_supervision() -> None:
    """What the supervision says belongs to the flow run: Prefect sends it there, but not below the root's level."""
    for name in ("flows", "tasks"):
        logging.getLogger(name).setLevel(logging.INFO)


def run_roles(
    run: RunContext, watch: RunWatch, *, evaluates: bool = True, is_enough: Callable[[], bool] = lambda: False
) -> None:
    """From the first process to the last; whatever happens, none of them is left.

    evaluates: measure accuracy before the first and after the last step. is_enough: asked now and then, ends the run
    before its last step.
    """
    evaluates = evaluates and run.config.eval.num_prompts > 0
    crew = Crew(run)
    try:
        crew.start(HUB)
        crew.start(TRAINER)
        crew.wait_until(
            "initial weights (commits/00000000.*)", lambda: bool(run.store.list("commits")), INITIAL_WEIGHTS_SECONDS
        )
        if evaluates and not run.store.exists(eval_key(0)) and not wants_drain(run.store):
            crew.evaluate("first")
        if not crew.has_ended(TRAINER) and not wants_drain(run.store):  # drained meanwhile: no step is to be taken
            for index in range(run.config.placement.actors):
                crew.start(f"actor-{index}")
        follow(crew, watch, is_enough)
        crew.stop()
        if evaluates and not wants_drain(run.store):
            crew.evaluate("last")
    finally:
        try:
            crew.stop()
        finally:  # a second Ctrl-C may end the stop
            remove_shared_memory(run)


def follow(crew: Crew, watch: RunWatch, is_enough: Callable[[], bool] = lambda: False) -> None:
    """Until the trainer has taken its last step or it is enough; raises what made any role fail before."""
    while not crew.has_ended(TRAINER) and not is_enough():
        watch.poll()
        crew.wait(FOLLOW_SECONDS)
    watch.poll()
