"""The train flow: starts hub, trainer and actors, evaluates before and after training, and writes the report."""

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
from pipelinerl.tasks.drain_request import clear_earlier_drain_request
from pipelinerl.tasks.outage import await_store, crashed_by_outage, schedule_again
from pipelinerl.tasks.placement import EVALUATOR, HUB, TRAINER, RunRoles, hub_token, name_flow_run
from pipelinerl.tasks.preflight import preflight
from pipelinerl.tasks.report import write_reports
from pipelinerl.tasks.run_watch import RunWatch
from pipelinerl_core.config import RunConfig
from pipelinerl_core.config.hub_models import pinned
from pipelinerl_core.errors import PipelineRLError
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
    root_url,
    run_url,
)
from pipelinerl_core.run.mlflow_run import RunTracker, open_tracker
from pipelinerl_core.run.records import eval_key
from pipelinerl_core.run.start_count import count_start
from pipelinerl_core.run.user_code import warn_of_changed_code
from pipelinerl_core.supervision.checks import start_seconds

logger = logging.getLogger(__name__)

FOLLOW_SECONDS = 1.0

Preset = Annotated[
    str, Field(description="A shipped preset such as quickstart, or a TOML file on the machine that runs the flow.")
]
Overrides = Annotated[
    tuple[str, ...],
    Field(
        description='Further settings, each "section.key=value", for example "learner.clip_norm=0.5"; '
        "`pipelinerl config --keys` lists them."
    ),
]
Changes = Annotated[
    Settings, Field(description="Settings that differ from the preset; an empty field keeps the value of the preset.")
]
Root = Annotated[
    str,
    Field(
        description="A path or s3://bucket/prefix below which runs are stored. Empty: $PIPELINERL_ROOT, else ./runs."
    ),
]
Resume = Annotated[
    str,
    Field(
        description="Resume this run (id under the root, `latest`, path or URL) with its stored configuration; "
        "preset and settings are ignored. Overrides may change the placement of the run, such as trainer.ranks."
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

    A retry of this flow run resumes the same run. Returns the report (report.json). If the run was drained, the
    report is the data of a completed state named Drained. After an outage of the store that is longer than all
    restarts of the roles, a worker starts the flow run again, and the start waits for the store.
    """
    if flow_run.run_count > 1:  # perhaps after an outage of the store
        await_store(resume if "/" in resume else root_url(root))
    changes = (*settings.overrides(), *overrides)
    return train_run(resume_job(resume, changes, root) if resume else new_job(preset, changes, root))


def train_run(
    job: Job, *, is_checked: bool = False, on_open: Callable[[RunContext], None] = lambda run: None
) -> dict[str, Any] | State[dict[str, Any]]:
    """The body of the train flow; the state Crashed after an outage of the store that is longer than all restarts, if
    no worker has started the flow run.

    is_checked: the caller has checked the configuration. on_open: called with the run.
    """
    run, tracker = open_job(job, is_checked=is_checked)
    on_open(run)
    try:
        return train_opened(run, tracker)
    except PipelineRLError as error:
        crashed = crashed_by_outage(run, error)
        if crashed is None:
            raise
        schedule_again(crashed)
        return crashed


def train_opened(run: RunContext, tracker: RunTracker) -> dict[str, Any] | State[dict[str, Any]]:
    """Train an opened run to its end, or until it is drained."""
    name_flow_run(run.run_id)
    logger.info("run %s", run.store.url)
    with RunWatch(run, tracker) as watch:
        if watch.committed_step < run.config.trainer.steps:
            run_roles(run, watch)
        report = write_reports(run)
        watch.finish(report)
    if watch.committed_step < run.config.trainer.steps:
        return Completed(
            name="Drained",
            message=f"stopped after step {watch.committed_step}; continue with `pipelinerl resume`",
            data=report,
        )
    return report


def open_job(job: Job, *, is_checked: bool) -> tuple[RunContext, RunTracker]:
    """Create the run of a job, or open it if its run.json exists."""
    if job.run:
        note_resume(job.run.store, job.overrides)
        return open_at(job.run.store.url, job.config, {}, run=job.run, is_checked=is_checked)
    url = run_url(job.root, new_run_id(job.preset, str(flow_run.id)))
    return open_at(url, job.config, {"preset": job.preset}, is_checked=is_checked)


def open_at(
    url: str, config: RunConfig, labels: Mapping[str, str], *, run: RunContext | None = None, is_checked: bool = False
) -> tuple[RunContext, RunTracker]:
    """Open the run at a URL; if there is none, create the run with this configuration.

    A run that exists keeps its stored configuration. labels: tags of the MLflow run. run: the run, if the caller has
    opened it. is_checked: the caller has checked the configuration.
    """
    show_supervision()
    flow_run_id = str(flow_run.id)
    run = run or find_run(url)
    config = run.config if run else config
    refuse_if_live(url)
    count_start(url, flow_run_id, flow_run.run_count, config.placement.max_resumes)
    if not is_checked:
        preflight(config, url.rpartition("/")[0], run=run)
    config = config if run else pinned(config)
    tracker, mlflow = open_tracker(config, url, run.record if run else None, flow_run_id, labels)
    if run is None:
        run = create_run(url, config, flow_run_id=flow_run_id, mlflow=mlflow)
    warn_of_changed_code(run)
    clear_earlier_drain_request(run.store, flow_run_id)
    remember_latest(url)
    return replace(run, token=hub_token(run)), tracker


def show_supervision() -> None:
    """Let INFO lines of the supervision reach the flow run in the UI; the root logger's level would drop them."""
    for name in ("pipelinerl", "pipelinerl_core.run", "pipelinerl_core.supervision"):
        logging.getLogger(name).setLevel(logging.INFO)


def run_roles(
    run: RunContext, watch: RunWatch, *, evaluates: bool = True, is_enough: Callable[[], bool] = lambda: False
) -> None:
    """Start the roles, wait for the last step and stop all roles, also after an error.

    evaluates: measure accuracy before the first and after the last step. is_enough: polled about once a second; if it
    returns True, the run ends before its last step.
    """
    config = run.config
    evaluates = evaluates and config.eval.num_prompts > 0
    has_evaluator = evaluates and config.eval_steps > 0 and not config.evaluates_on_actors
    roles = RunRoles(run, on_wait=watch.look)
    try:
        roles.start(HUB)
        roles.start(TRAINER)
        if has_evaluator:
            roles.start(EVALUATOR)
        roles.wait_until(
            "initial weights (commits/00000000.*)", lambda: bool(run.store.list("commits")), start_seconds(config)
        )
        if evaluates and not run.store.exists(eval_key(0)) and not wants_drain(run.store):
            roles.evaluate("first")
        if not roles.has_ended(TRAINER) and not wants_drain(run.store):  # drained meanwhile: no further step
            for index in range(config.placement.actors):
                roles.start(f"actor-{index}")
        follow(roles, watch, is_enough)
        is_complete = watch.committed_step >= config.trainer.steps
        roles.stop(keep_evaluator=evaluates and is_complete)
        if evaluates and not wants_drain(run.store):
            roles.evaluate("last")
    finally:
        try:
            roles.stop()
        finally:  # a second Ctrl-C may interrupt the stop
            remove_shared_memory(run)


def follow(roles: RunRoles, watch: RunWatch, is_enough: Callable[[], bool] = lambda: False) -> None:
    """Wait until the trainer has ended or `is_enough` returns True; raises the error of any role that fails."""
    while not roles.has_ended(TRAINER) and not is_enough():
        watch.poll()
        roles.wait(FOLLOW_SECONDS)
    watch.poll()
