"""The compare flow: one run per arm and seed, some at the same time; the result is one table and one figure.

Each run is a subflow: in a thread of the flow's process, or the flow run of a deployment on a work pool.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from threading import Event
from typing import Annotated, Any

from prefect import flow, get_client, get_run_logger, task
from prefect.cache_policies import NO_CACHE
from prefect.exceptions import ObjectNotFound, Pause
from prefect.runtime import flow_run
from pydantic import Field

from pipelinerl.flows.parameters import described
from pipelinerl.flows.train_flow import Override, Overrides, Preset, Root, open_at, run_roles, train_opened
from pipelinerl.tasks.notifications import MLFLOW_LABEL, REPORT_LABEL, URL_LABEL, label_flow_run
from pipelinerl.tasks.outage import SERVER_SECONDS, await_store, crashed_by_outage, schedule_again, server_answers
from pipelinerl.tasks.placement import RUN_THREAD, DeployedRole, LocalRole, Role, RunRoles, RunThread, request_stop
from pipelinerl.tasks.report import show_comparison, write_comparison, write_reports
from pipelinerl.tasks.run_watch import RunWatch
from pipelinerl.tasks.suspension import Inquiry, await_earlier_start, hold
from pipelinerl_core.comparison.analysis import has_reached, rewards_of
from pipelinerl_core.comparison.budget import Budget, dropped_lines
from pipelinerl_core.comparison.mlflow_run import log_comparison, open_comparison
from pipelinerl_core.comparison.plan import (
    BUDGET_MINUTES,
    MARGIN,
    Plan,
    PlannedRun,
    Wanted,
    incomplete_runs,
    is_complete,
    plan_comparison,
)
from pipelinerl_core.comparison.results import HTML_KEY, JSON_KEY, Results, RunsFailed
from pipelinerl_core.config import RunConfig
from pipelinerl_core.config.arm import Arm
from pipelinerl_core.errors import ConfigError, DeadlineExceeded, PipelineRLError
from pipelinerl_core.report.html import duration
from pipelinerl_core.run.locate import root_url, run_url
from pipelinerl_core.run.mlflow_run import closing
from pipelinerl_core.run.records import RUN_KEY
from pipelinerl_core.storage.object_store import open_store
from pipelinerl_core.supervision.checks import check_root, space_lines
from pipelinerl_core.supervision.process_groups import kill_tools
from pipelinerl_core.telemetry.mlflow import PARENT_TAG
from pipelinerl_core.telemetry.redact import redact_text

STOP_SECONDS = 60.0
"""Deadline for the end of the runs after a stop."""
WAIT_SECONDS = 90 * 86_400.0
"""Deadline for the end of the next run; runs of a deployment may wait for a free worker before."""
_POLL_SECONDS = 1.0

Arms = Annotated[
    dict[str, list[Override]],
    Field(description='Arm name -> settings of the arm, for example {"four": ["schedule.kind=conventional"]}.'),
]
Seeds = Annotated[list[int], Field(description="Every arm runs once with each seed.")]
Target = Annotated[
    float,
    Field(
        description="Held-out accuracy; the time of each arm to the target is measured. 0: each run ends at "
        "trainer.steps.",
        json_schema_extra={"minimum": 0, "maximum": 1},
    ),
]
Margin = Annotated[
    float, Field(description="A run stops when its training reward exceeds the target by this margin.")
]
Minutes = Annotated[
    float, Field(description="Time budget in minutes; seeds that do not fit are left out, the last seed first.")
]
Reference = Annotated[str, Field(description="Arm that the other arms are compared with. Empty: the first arm.")]
Name = Annotated[str, Field(description="Name of the comparison. Empty: the name of the preset.")]
Limit = Annotated[
    int, Field(description="Most runs of this flow run at the same time.", json_schema_extra={"minimum": 1})
]
Deployment = Annotated[
    str,
    Field(
        description="Deployment that carries out each run on its work pool, such as compared-run/compared-run. "
        "Empty: the process of this flow run."
    ),
]


@flow(name="compare", persist_result=False)
@described
def compare(
    arms: Arms,
    preset: Preset = "quickstart",
    overrides: Overrides = (),
    seeds: Seeds = [0, 1, 2],  # noqa: B006 (Prefect copies the parameters of a flow run)
    target: Target = 0.5,
    margin: Margin = MARGIN,
    budget_minutes: Minutes = BUDGET_MINUTES,
    reference: Reference = "",
    name: Name = "",
    limit: Limit = 1,
    deployment: Deployment = "",
    root: Root = "",
) -> dict[str, Any]:
    """Measure the time of every arm to the same accuracy. The same parameters continue an interrupted comparison.

    Returns the comparison (comparison.json). Raises RunsFailed if a run failed, after the other runs were compared.
    """
    wanted = Wanted(
        source=preset,
        arms=tuple(Arm(arm, tuple(settings)) for arm, settings in arms.items()),
        overrides=tuple(overrides),
        seeds=tuple(seeds),
        target=target,
        margin=margin,
        budget_minutes=budget_minutes,
        reference=reference,
        name=name,
        limit=limit,
        deployment=deployment,
    )
    return compare_runs(plan_comparison(wanted), root)


def compare_runs(plan: Plan, root: str, *, checked: str = "") -> dict[str, Any]:
    """The body of the flows `compare` and `sweep`; returns comparison.json, and raises as `compare`.

    checked: id of the run whose configuration the caller has checked; empty: none.
    """
    check_deployment(plan.wanted.deployment)
    results = Results(plan, root)  # waits for a store that does not answer
    if not results.store.exists(JSON_KEY):
        check_root(root_url(root))  # creates the directory in which MLflow may have its files
    labels = {"preset": plan.wanted.source, "comparison": plan.name}
    stores = [open_store(run_url(root, run.run_id)) for run in incomplete_runs(plan, root)]
    is_new = not all(store.exists(RUN_KEY) for store in stores)  # a damaged run fails later, without the others
    tracker, parent = open_comparison(
        plan.runs[0].config, root_url(root), plan.key, labels, str(flow_run.id), is_required=is_new
    )
    run_labels = {**labels, PARENT_TAG: parent} if parent else labels
    label_flow_run({URL_LABEL: results.store.url, MLFLOW_LABEL: tracker.page})
    with closing(tracker):
        dropped = run_all(plan, results, root, run_labels, checked)
        document: dict[str, Any] = write_comparison(results, dropped)
        log_comparison(tracker, results.store, document)
    show_comparison(document)
    label_flow_run({REPORT_LABEL: f"{results.store.url}/{HTML_KEY}"})
    if results.failed:
        reasons = "; ".join(f"{run}: {reason}" for run, reason in results.failed.items())
        raise RunsFailed(
            f"{len(results.failed)} of {len(plan.runs)} runs failed. {reasons}. The comparison of the other runs is "
            f"in {results.store.url}"
        )
    return document


def check_deployment(name: str) -> None:
    """Raise ConfigError if the deployment is not on the server, or if its runs would wait for this flow run."""
    if not name:
        return
    with get_client(sync_client=True) as client:
        try:
            pool_name = client.read_deployment_by_name(name).work_pool_name
        except (ObjectNotFound, ValueError):
            raise ConfigError(f"deployment {name}: not on the Prefect server. Call `pipelinerl deploy`") from None
        own = client.read_flow_run(flow_run.id).work_pool_name if flow_run.id else None
        if pool_name and pool_name == own and client.read_work_pool(pool_name).concurrency_limit == 1:
            raise ConfigError(
                f"deployment {name}: the work pool {pool_name} has the concurrency limit 1, which this flow run uses "
                "up. Set a limit of 2 or more"
            )


@dataclass(slots=True)
class _Child:
    """A run that has been started."""

    run: PlannedRun
    role: Role
    seconds: float = 0.0
    """For which the run was running."""


def run_all(
    plan: Plan, results: Results, root: str, labels: Mapping[str, str], checked: str = ""
) -> list[PlannedRun]:
    """Run the planned runs that are not complete and fit into the budget; returns the runs that were left out.

    A run that fails is noted in `results.failed`, and the others go on. If the wait is interrupted, all runs stop.
    Raises Pause after they have stopped if the flow run is suspended or deleted.
    labels: MLflow tags of every run. checked: see `compare_runs`.
    """
    limit, logger = plan.wanted.limit, get_run_logger()
    pending = incomplete_runs(plan, root)
    begun = {run.seed for run in plan.runs if run not in pending} | {plan.runs[0].seed}
    budget = Budget(plan.wanted.budget_minutes * 60, results.spent(), begun=begun, limit=limit)
    num_started = len(plan.runs) - len(pending)
    logger.info("%d runs, %d of them already done", len(plan.runs), num_started)
    for line in space_lines([run.config for run in pending], root_url(root)):
        logger.warning("%s", line)
    children: list[_Child] = []
    inquiry = Inquiry()
    changed, looked_at = Event(), time.monotonic()
    deadline = looked_at + WAIT_SECONDS
    try:
        while True:
            while len(children) < limit and (pending := trimmed(budget, pending, len(plan.wanted.arms))):
                remaining = _remaining(budget, pending)
                run, *pending = pending
                num_started += 1
                logger.info("run %d of %d: %s, seed %d%s", num_started, len(plan.runs), run.arm, run.seed, remaining)
                role_of = partial(_role_of, plan, run, root, {**labels, "arm": run.arm}, changed)
                _begin(run, partial(role_of, is_checked=run.run_id == checked), children, results)
            if not children:
                return budget.dropped
            running = [child for child in children if child.role.is_running()]
            changed.wait(_POLL_SECONDS)
            changed.clear()
            if reason := inquiry.why_drain():
                logger.info("%s: the runs stop", reason)
                break
            looked_at, passed = time.monotonic(), time.monotonic() - looked_at
            for child in running:
                child.seconds += passed
            budget.ends_at += 0.0 if running else passed
            for child in [child for child in children if child.role.has_ended()]:
                children.remove(child)
                _note_end(child, results, budget, run_url(root, child.run.run_id), plan.wanted.target)
                deadline = time.monotonic() + WAIT_SECONDS
            if time.monotonic() > deadline:
                raise DeadlineExceeded(f"no run has ended for {WAIT_SECONDS / 86_400:.0f} days; stopping all runs")
    finally:
        _stop([child.role for child in children])
    hold(f"{num_started - len(children)} of {len(plan.runs)} runs")


def _remaining(budget: Budget, pending: Sequence[PlannedRun]) -> str:
    expected = budget.expected_seconds(pending)
    return f", about {duration(expected)} left" if expected is not None else ""


def _begin(run: PlannedRun, role_of: Callable[[], Role], children: list[_Child], results: Results) -> None:
    """Start a run and add the run to `children`; a failure is noted in `results.failed`."""
    try:
        children.append(_Child(run, role_of()))
        children[-1].role.begin()
    except Exception as error:  # noqa: BLE001 (for example of the Prefect server: the other runs go on)
        children[:] = [child for child in children if child.run is not run]
        _note_failure(run.run_id, error, results, "; the same command continues the run")


def _role_of(
    plan: Plan, run: PlannedRun, root: str, labels: Mapping[str, str], changed: Event, *, is_checked: bool
) -> Role:
    """What carries out a planned run: a flow run of a deployment, or a thread."""
    wanted = plan.wanted
    parameters = {
        "run_url": run_url(root, run.run_id),
        "config": run.config.model_dump(mode="json"),
        "labels": labels,
        "target": wanted.target,
        "rewards": plan.rewards_to_stop(),
    }
    if wanted.deployment:
        return DeployedRole(wanted.deployment, parameters, "run", run.config.placement.max_restarts)
    server_answers(SERVER_SECONDS)  # otherwise one run after the other would fail during an outage
    await_store(root_url(root))  # the same
    local = {**parameters, "is_checked": is_checked}
    return LocalRole(lambda stop: run_here.submit(run.run_id, local, RunThread(stop, wanted.limit == 1)), changed)


@task(name="run", task_run_name="{name}", persist_result=False, cache_policy=NO_CACHE)
def run_here(name: str, parameters: dict[str, Any], thread: RunThread) -> None:
    """Carry out a run in this thread.

    Only the subflows of a task are new in a retry; Prefect identifies others by their order, which may change.
    """
    RUN_THREAD.set(thread)
    compared_run.with_options(flow_run_name=name)(**parameters)


def _note_end(child: _Child, results: Results, budget: Budget, url: str, target: float) -> None:
    run_id = child.run.run_id
    if child.seconds:  # it was seen while it was running
        budget.note(child.run.arm, child.seconds)
        results.add_seconds(child.run, child.seconds)
    try:
        child.role.check()
        if not is_complete(open_store(url), child.run.config, target):
            raise Pause
    except Pause:
        results.failed[run_id] = "stopped before its end; the same command continues the run"
    except Exception as error:  # noqa: BLE001 (whatever a run raises, the others go on)
        _note_failure(run_id, error, results)
    write_comparison(results, budget.dropped, return_state=True)  # Prefect logs an error; the runs go on


def _note_failure(run_id: str, error: Exception, results: Results, remedy: str = "") -> None:
    get_run_logger().exception("%s failed", run_id)
    results.failed[run_id] = redact_text(f"{type(error).__name__}: {error}").splitlines()[0] + remedy


def _stop(roles: Sequence[Role]) -> None:
    request_stop(roles)
    deadline = time.monotonic() + STOP_SECONDS
    while time.monotonic() < deadline and not all(role.has_ended() for role in roles):
        kill_tools()
        time.sleep(_POLL_SECONDS / 4)


def trimmed(budget: Budget, pending: Sequence[PlannedRun], num_arms: int) -> list[PlannedRun]:
    """The pending runs that fit into the budget; logs a warning if this call leaves out runs."""
    num_dropped = len(budget.dropped)
    kept = budget.trim(pending)
    if len(budget.dropped) > num_dropped:
        get_run_logger().warning("%s", "; ".join(dropped_lines(budget.dropped, num_arms)))
    return kept


@flow(name="compared-run", persist_result=False)
@described
def compared_run(
    run_url: Annotated[str, Field(description="Path or URL of the run.")],
    config: Annotated[RunConfig, Field(description="The whole configuration of the run, as in run.json.")],
    labels: Annotated[dict[str, str], Field(description="Tags of the run in MLflow.")] = {},  # noqa: B006 (see `seeds`)
    target: Target = 0.0,
    rewards: Annotated[
        list[float],
        Field(
            description="With a target: training rewards at which the run is stopped and evaluated, one after the "
            "other until the target is reached."
        ),
    ] = [],  # noqa: B006
    is_checked: Annotated[bool, Field(description="The caller has checked the configuration.")] = False,
) -> None:
    """One run of a comparison or a sweep, which starts it; the same parameters continue the run."""
    thread = RUN_THREAD.get()
    if thread is None:  # a flow run of its own, which may replace a flow run that only seemed to crash
        await_store(run_url.rpartition("/")[0])
        await_earlier_start(run_url)
    try:
        _carry_out(run_url, config, labels, target, rewards, is_checked=is_checked)
    except PipelineRLError as error:
        crashed = crashed_by_outage(run_url, error)
        if crashed is None:
            raise
        if thread is None:
            schedule_again(crashed)
            raise
        await_store(run_url.rpartition("/")[0], thread.stop)
        if thread.stop.is_set():
            raise
        _carry_out(run_url, config, labels, target, rewards, is_checked=is_checked)


def _carry_out(
    url: str,
    config: RunConfig,
    labels: Mapping[str, str],
    target: float,
    rewards: Sequence[float],
    *,
    is_checked: bool,
) -> None:
    if not target:
        train_opened(*open_at(url, config, labels, is_checked=is_checked))
    for enough_reward in rewards if target else ():
        is_enough = train_to(url, config, labels, target, enough_reward, is_checked=is_checked)
        if not is_enough or is_complete(open_store(url), config, target):  # not enough: at the last step, or drained
            return
        get_run_logger().info("below the target at reward %.2f", enough_reward)


def train_to(
    url: str, config: RunConfig, labels: Mapping[str, str], target: float, enough_reward: float, *, is_checked: bool
) -> bool:
    """Train until the mean reward of ten steps reaches `enough_reward`, evaluate, report.

    Returns whether the reward has reached `enough_reward`. target: accuracy that two evaluated versions must reach;
    later versions are not evaluated. labels: MLflow tags. is_checked: the caller has checked the configuration.
    """
    run, tracker = open_at(url, config, labels, is_checked=is_checked)
    with RunWatch(run, tracker) as watch:

        def is_enough() -> bool:
            return has_reached(rewards_of(watch.commits), enough_reward)

        if watch.committed_step < run.config.trainer.steps and not is_enough():
            run_roles(run, watch, evaluates=False, is_enough=is_enough)
        if watch.is_held:
            watch.is_complete()  # reads the steps that the drain has committed
            hold(f"step {watch.committed_step}")
        roles = RunRoles(run, on_wait=watch.look)
        try:
            roles.evaluate("all", enough=target)
        finally:
            roles.stop()
        watch.finish(write_reports(run))
        return is_enough()
