"""The compare flow: one run per arm and seed, evaluated after training; the result is one table and one figure."""

import time
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

from prefect import flow, get_run_logger
from prefect.runtime import flow_run
from prefect.task_runners import ThreadPoolTaskRunner
from pydantic import Field

from pipelinerl.flows.parameters import described
from pipelinerl.flows.train_flow import Overrides, Preset, Root, open_at, run_roles
from pipelinerl.tasks.notifications import MLFLOW_LABEL, REPORT_LABEL, URL_LABEL, label_flow_run
from pipelinerl.tasks.placement import RunRoles
from pipelinerl.tasks.report import write_comparison, write_reports
from pipelinerl.tasks.run_watch import RunWatch
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
from pipelinerl_core.comparison.results import HTML_KEY, Results, RunsFailed
from pipelinerl_core.config import RunConfig
from pipelinerl_core.config.arm import Arm
from pipelinerl_core.errors import ConfigError, PipelineRLError
from pipelinerl_core.report.html import duration
from pipelinerl_core.run.locate import root_url, run_url
from pipelinerl_core.run.mlflow_run import closing
from pipelinerl_core.storage.object_store import open_store
from pipelinerl_core.telemetry.mlflow import PARENT_TAG

Arms = Annotated[
    dict[str, list[str]],
    Field(description='Arm name -> settings of the arm, for example {"four": ["schedule.kind=conventional"]}.'),
]
Seeds = Annotated[list[int], Field(description="Every arm runs once with each seed.")]
Target = Annotated[float, Field(description="Held-out accuracy; the comparison measures the time of each arm to it.")]
Margin = Annotated[
    float, Field(description="A run stops when its training reward exceeds the target by this margin.")
]
Minutes = Annotated[
    float, Field(description="Time budget in minutes; seeds that do not fit are left out, the last seed first.")
]
Reference = Annotated[str, Field(description="Arm that the other arms are compared with. Empty: the first arm.")]
Name = Annotated[str, Field(description="Name of the comparison. Empty: the name of the preset.")]


@flow(name="compare", task_runner=ThreadPoolTaskRunner(), persist_result=False)  # type: ignore[arg-type]
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
    )
    return compare_runs(plan_comparison(wanted), root)


def compare_runs(plan: Plan, root: str, *, checked: str = "") -> dict[str, Any]:
    """The body of the compare flow; returns and raises as `compare`.

    checked: id of the run whose configuration the caller has checked; empty: none.
    """
    results = Results(plan, root)
    labels = {"preset": plan.wanted.source, "comparison": plan.name}
    tracker, parent = open_comparison(plan.runs[0].config, root_url(root), plan.key, labels, str(flow_run.id))
    run_labels = {**labels, PARENT_TAG: parent} if parent else labels
    label_flow_run({URL_LABEL: results.store.url, MLFLOW_LABEL: tracker.page})
    with closing(tracker):
        dropped = run_all(plan, results, root, run_labels, checked)
        document: dict[str, Any] = write_comparison(results, dropped)
        log_comparison(tracker, results.store, document)
    label_flow_run({REPORT_LABEL: f"{results.store.url}/{HTML_KEY}"})
    if results.failed:
        reasons = "; ".join(f"{run}: {reason}" for run, reason in results.failed.items())
        raise RunsFailed(f"{reasons}. The comparison of the other runs is in {results.store.url}")
    return document


def run_all(
    plan: Plan, results: Results, root: str, labels: Mapping[str, str], checked: str = ""
) -> list[PlannedRun]:
    """Run the planned runs that are not complete and fit into the budget; returns the runs that were left out.

    A run that fails is noted in `results.failed`, and the next run follows; a ConfigError is raised.
    labels: MLflow tags of every run. checked: see `compare_runs`.
    """
    pending = incomplete_runs(plan, root)
    begun = {run.seed for run in plan.runs if run not in pending} | {plan.runs[0].seed}
    budget = Budget(plan.wanted.budget_minutes * 60, results.spent(), begun=begun)
    num_ended = len(plan.runs) - len(pending)
    logger = get_run_logger()
    logger.info("%d runs, %d of them already done", len(plan.runs), num_ended)
    while pending := trimmed(budget, pending, len(plan.wanted.arms)):
        run, *pending = pending
        expected = budget.expected_seconds([run, *pending])
        remaining = f", about {duration(expected)} left" if expected is not None else ""
        logger.info("run %d of %d: %s, seed %d%s", num_ended + 1, len(plan.runs), run.arm, run.seed, remaining)
        begun_at = time.monotonic()
        try:
            run_to_target(plan, run, run_url(root, run.run_id), labels, is_checked=run.run_id == checked)
        except ConfigError:
            raise
        except PipelineRLError as error:
            logger.exception("%s failed", run.run_id)
            results.failed[run.run_id] = f"{type(error).__name__}: {error}".splitlines()[0]
        num_ended += 1
        seconds = time.monotonic() - begun_at
        budget.note(run.arm, seconds)
        results.add_seconds(run, seconds)
        write_comparison(results, budget.dropped)
    return budget.dropped


def run_to_target(
    plan: Plan, run: PlannedRun, url: str, labels: Mapping[str, str], *, is_checked: bool = False
) -> None:
    """Train and evaluate a planned run until it has reached the target, is at its last step, or is drained.

    url: of the run. labels, is_checked: see `run_arm`.
    """
    for enough_reward in plan.rewards_to_stop():
        is_enough = run_arm.with_options(flow_run_name=run.run_id)(
            url, run.config, plan.wanted.target, enough_reward, {**labels, "arm": run.arm}, is_checked
        )
        if not is_enough or is_complete(open_store(url), plan, run):  # not enough: at the last step, or drained
            return
        get_run_logger().info("%s: below the target at reward %.2f", run.run_id, enough_reward)


def trimmed(budget: Budget, pending: Sequence[PlannedRun], num_arms: int) -> list[PlannedRun]:
    """The pending runs that fit into the budget; logs a warning if this call leaves out runs."""
    num_dropped = len(budget.dropped)
    kept = budget.trim(pending)
    if len(budget.dropped) > num_dropped:
        get_run_logger().warning("%s", "; ".join(dropped_lines(budget.dropped, num_arms)))
    return kept


@flow(name="compared-run", task_runner=ThreadPoolTaskRunner(), persist_result=False)  # type: ignore[arg-type]
@described
def run_arm(
    url: str,
    config: RunConfig,
    target: float,
    enough_reward: float,
    labels: dict[str, str],
    is_checked: bool = False,
) -> bool:
    """One run of a comparison: train until the mean reward of ten steps reaches `enough_reward`, evaluate, report.

    Returns whether the reward has reached `enough_reward`. target: accuracy that two evaluated versions must reach;
    later versions are not evaluated. labels: MLflow tags. is_checked: the caller has checked the configuration.
    """
    run, tracker = open_at(url, config, labels, is_checked=is_checked)
    with RunWatch(run, tracker) as watch:

        def is_enough() -> bool:
            return has_reached(rewards_of(watch.commits), enough_reward)

        if watch.committed_step < run.config.trainer.steps and not is_enough():
            run_roles(run, watch, evaluates=False, is_enough=is_enough)
        roles = RunRoles(run)
        try:
            roles.evaluate("all", enough=target)
        finally:
            roles.stop()
        watch.finish(write_reports(run))
        return is_enough()
