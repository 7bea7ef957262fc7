"""The train flow: starts hub, trainer and actors, evaluates before and after training, and writes the report."""

import logging
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Annotated, Any
from uuid import UUID

from prefect import flow
from prefect.client.schemas.objects import State
from prefect.exceptions import Pause
from prefect.runtime import deployment, flow_run
from prefect.states import Completed
from pydantic import Field

from pipelinerl.flows.parameters import Settings, described, override_pattern, preset_pattern
from pipelinerl.tasks.automations import ended_before_resume
from pipelinerl.tasks.drain_request import clear_earlier_drain_request
from pipelinerl.tasks.notifications import MLFLOW_LABEL, PAGE_LABEL, URL_LABEL, label_flow_run
from pipelinerl.tasks.outage import SERVER_SECONDS, await_store, crashed_by_outage, schedule_again, server_answers
from pipelinerl.tasks.placement import (
    EVALUATOR,
    HUB,
    TRAINER,
    RunRoles,
    hub_token,
    is_deployed,
    name_flow_run,
    run_tag,
    started_run,
)
from pipelinerl.tasks.preflight import preflight
from pipelinerl.tasks.report import write_reports
from pipelinerl.tasks.run_watch import RunWatch
from pipelinerl.tasks.suspension import await_earlier_start, hold
from pipelinerl_core.config import RunConfig
from pipelinerl_core.errors import ConfigError, Fenced, PipelineRLError, StoreUnavailable
from pipelinerl_core.models.hub import pinned
from pipelinerl_core.run.context import RunContext, note_resume
from pipelinerl_core.run.drain import wants_drain
from pipelinerl_core.run.history import is_complete
from pipelinerl_core.run.jobs import Job, new_job, resume_job
from pipelinerl_core.run.locate import (
    create_run,
    find_run,
    new_run_id,
    page_url,
    refuse_if_live,
    remember_latest,
    remove_shared_memory,
    root_url,
    run_url,
    user_name,
)
from pipelinerl_core.run.mlflow_run import RunTracker, open_tracker
from pipelinerl_core.run.records import RUN_KEY, eval_key
from pipelinerl_core.run.start_count import count_start
from pipelinerl_core.run.user_code import warn_of_changed_code
from pipelinerl_core.storage.object_store import open_store
from pipelinerl_core.supervision.checks import start_seconds

logger = logging.getLogger(__name__)

FOLLOW_SECONDS = 1.0

# The server refuses what does not match the patterns. pydantic does not check them: its message has no suggestion.
Preset = Annotated[
    str,
    Field(
        description="A shipped preset such as quickstart, or a TOML file on the machine that runs the flow.",
        json_schema_extra={"pattern": preset_pattern()},
    ),
]
Override = Annotated[str, Field(json_schema_extra={"pattern": override_pattern()})]
Overrides = Annotated[
    tuple[Override, ...],
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
        description="A path or s3://bucket/prefix below which runs are stored. Empty: $PIPELINERL_ROOT, else ./runs. "
        "The first start stores the location here, for retries."
    ),
]
Resume = Annotated[
    str,
    Field(
        description="Resume this run (id under the root, `latest`, path or URL) with its stored configuration; "
        "preset and settings are ignored. Overrides may change the placement of the run, such as trainer.ranks."
    ),
]


@flow(name="train", persist_result=False)
@described
def train(
    preset: Preset = "quickstart",
    settings: Changes = Settings(),  # noqa: B008 (frozen)
    overrides: Overrides = (),
    root: Root = "",
    resume: Resume = "",
) -> dict[str, Any] | State[dict[str, Any]]:
    """Train a model: generation and training side by side, weights swapped in flight.

    A retry of this flow run resumes the same run, on any worker that reaches the root of the first start. Returns the
    report (report.json). If the run was drained, the report is the data of a completed state named Drained. After an
    outage of the store that is longer than all restarts of the roles, a worker starts the flow run again, and the
    start waits for the store.
    """
    if flow_run.run_count > 1 and (ended := ended_before_resume(UUID(str(flow_run.id)))) is not None:
        logger.warning("the flow run had ended as %s before it was resumed; nothing is done", ended.name)
        return State(type=ended.type, name=ended.name, message=ended.message)
    changes = tuple(overrides) if resume else (*settings.overrides(), *overrides)
    run_id = started_run(resume)
    if flow_run.run_count > 1 or run_id:  # perhaps after an outage of the store
        await_store(resume if "/" in resume else root_url(root))
    job = None if resume else new_job(preset, changes, root)
    if run_id:
        url = resume if "/" in resume else run_url(root, run_id)
        refuse_lost_run(url)
        await_earlier_start(url)
    result = train_run(job or resume_job(resume, changes, root))
    if not server_answers(SERVER_SECONDS):
        raise Pause  # without heartbeats the flow run becomes Crashed, and its next start completes it
    return result


def refuse_lost_run(url: str) -> None:
    """Raise ConfigError if an earlier start of this flow run has created the run at `url`, and no run is there."""
    if run_tag(url.rpartition("/")[2]) in flow_run.tags and not open_store(url).exists(RUN_KEY):
        raise ConfigError(
            f"{url}: an earlier start of this flow run has created this run, but host {socket.gethostname()} has no "
            f"{RUN_KEY} there. Retry on a worker that reaches the run, or start a new flow run"
        )


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
        crashed = crashed_by_outage(run.store.url, error)
        if crashed is None:
            raise
        schedule_again(crashed)
        return crashed


def train_opened(run: RunContext, tracker: RunTracker) -> dict[str, Any] | State[dict[str, Any]]:
    """Train an opened run to its end, or until it is drained. Raises Pause if its flow run was suspended or deleted.

    If the report of a complete run cannot be written, returns its id and number of steps only.
    """
    logger.info("run %s", run.store.url)
    report = None
    with RunWatch(run, tracker) as watch:
        try:
            if not watch.is_complete():
                run_roles(run, watch)
            else:
                evaluate_complete(run, watch)
            if watch.is_held:
                raise Pause
        except Pause:  # also of Prefect, at the start of a task after the flow run was suspended
            watch.is_complete()  # reads the steps that the drain has committed
            hold(f"step {watch.committed_step}")
        with unless_complete(watch, "the report", f"`pipelinerl report {run.run_id}` writes it"):
            report = write_reports(run)
        watch.finish(report)
    if watch.committed_step < run.config.trainer.steps:
        return Completed(
            name="Drained",
            message=f"stopped after step {watch.committed_step}; continue with `pipelinerl resume`",
            data=report,
        )
    return report or {"run_id": run.run_id, "steps": watch.committed_step}


@contextmanager
def unless_complete(watch: RunWatch, work: str, remedy: str) -> Iterator[None]:
    """Raise an error of the block only if steps are missing; if the run is complete, name the error in the log.

    Errors that start the flow run or its successor again are raised: an outage of the store on a worker, and a newer
    start of the run, which completes the run.
    """
    try:
        yield
    except Exception as error:
        is_repeated = isinstance(error, Fenced) or (isinstance(error, StoreUnavailable) and is_deployed())
        if is_repeated or not watch.is_complete():
            raise
        line = f"{type(error).__name__}: {error}".splitlines()[0]
        logger.error("all steps are committed, but %s failed; %s. %s", work, remedy, line)


def open_job(job: Job, *, is_checked: bool) -> tuple[RunContext, RunTracker]:
    """Create the run of a job, or open it if its run.json exists."""
    if job.run:
        url = job.run.store.url
        return open_at(
            url,
            job.config,
            {},
            run=job.run,
            is_checked=is_checked,
            parameters={"resume": url},
            overrides=job.overrides,
        )
    root = root_url(job.root)
    # An earlier start of this flow run has named the run; the name in a file may have changed since.
    url = run_url(root, started_run() or new_run_id(job.name, str(flow_run.id)))
    return open_at(url, job.config, {"preset": job.preset}, is_checked=is_checked, parameters={"root": root})


def open_at(
    url: str,
    config: RunConfig,
    labels: Mapping[str, str],
    *,
    run: RunContext | None = None,
    is_checked: bool = False,
    parameters: Mapping[str, str] | None = None,
    overrides: Sequence[str] = (),
) -> tuple[RunContext, RunTracker]:
    """Open the run at a URL; if there is none, create the run with this configuration.

    A run that exists keeps its stored configuration. labels: tags of the MLflow run. run: the run, if the caller has
    opened it. is_checked: the caller has checked the configuration. parameters: of the flow run, by which a retry
    finds the run. overrides: of a resume, stored for the roles once nothing refuses the start.
    """
    show_supervision()
    flow_run_id = str(flow_run.id)
    run = run or find_run(url)
    config = run.config if run else config
    refuse_if_live(url)
    is_new = run is None
    count_start(url, flow_run_id, flow_run.run_count, config.placement.max_resumes)
    needs_start = run is None or not is_complete(run.store, config.trainer.steps)  # else neither GPU nor space
    if needs_start and not is_checked:
        preflight(config, url.rpartition("/")[0], run=run)
    if run:
        note_resume(run, overrides)
    config = config if run else with_tags_of_flow_run(pinned(config))
    tracker, mlflow = open_tracker(config, url, run.record if run else None, flow_run_id, labels)
    if run is None:
        run = create_run(url, config, flow_run_id=flow_run_id, mlflow=mlflow, preset=labels.get("preset", ""))
    name_flow_run(run.run_id, parameters or {}, run.config.tracking.tags, is_new=is_new)
    label_flow_run({URL_LABEL: url, PAGE_LABEL: page_url(run.run_id), MLFLOW_LABEL: tracker.page})
    warn_of_changed_code(run)
    clear_earlier_drain_request(run.store, flow_run_id)
    is_by_user = not is_new and not deployment.id  # `pipelinerl resume`, perhaps of another user's run
    remember_latest(url, user_name() if is_by_user else run.record.owner)
    return replace(run, token=hub_token(run)), tracker


def with_tags_of_flow_run(config: RunConfig) -> RunConfig:
    """The configuration with the tags that a user has given the flow run, beside its own."""
    given = [tag for tag in flow_run.tags or () if not tag.startswith("pipelinerl")]
    tags = tuple(dict.fromkeys((*config.tracking.tags, *given)))
    return config.model_copy(update={"tracking": config.tracking.model_copy(update={"tags": tags})})


def show_supervision() -> None:
    """Let INFO lines of the supervision reach the flow run in the UI; the root logger's level would drop them."""
    for name in ("pipelinerl", "pipelinerl_core.run", "pipelinerl_core.supervision", "pipelinerl_core.tools"):
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
    watch.waits_for_machine = roles.wait_for_machine
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
        with unless_complete(watch, "a role", "no step is missing"):
            follow(roles, watch, is_enough)
        with unless_complete(watch, *_evaluation(run)):
            roles.stop(keep_evaluator=evaluates and watch.is_complete())
            if evaluates and not wants_drain(run.store):
                roles.evaluate("last")
    finally:
        try:
            roles.stop()
        finally:  # a second Ctrl-C may interrupt the stop
            remove_shared_memory(run)


def evaluate_complete(run: RunContext, watch: RunWatch) -> None:
    """Evaluate the last version of a complete run, unless an earlier start has."""
    with unless_complete(watch, *_evaluation(run)):
        if run.config.eval.num_prompts > 0 and not run.store.exists(eval_key(run.config.trainer.steps)):
            roles = RunRoles(run, on_wait=watch.look)
            try:
                roles.evaluate("last")
            finally:
                roles.stop()


def _evaluation(run: RunContext) -> tuple[str, str]:
    """What `unless_complete` says of the last evaluation."""
    return "the last evaluation", f"`pipelinerl resume {run.run_id}` repeats it"


def follow(roles: RunRoles, watch: RunWatch, is_enough: Callable[[], bool] = lambda: False) -> None:
    """Wait until the trainer has ended or `is_enough` returns True; raises the error of any role that fails."""
    while not roles.has_ended(TRAINER) and not is_enough():
        watch.poll()
        roles.wait(FOLLOW_SECONDS)
    watch.poll()
