"""The compare flow: arms x seeds, each a run of its own, accuracy measured after it, one table and one figure."""

import time
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

from prefect import flow, get_run_logger
from prefect.runtime import flow_run
from prefect.task_runners import ThreadPoolTaskRunner
from pydantic import Field

from pipelinerl.flows.parameters import described
from pipelinerl.flows.train_flow import Overrides, Preset, Root, open_at, run_roles
from pipelinerl.tasks.placement import Crew
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
    plan_comparison,
    unsettled,
)
from pipelinerl_core.comparison.results import Results, RunsFailed
from pipelinerl_core.config import RunConfig
from pipelinerl_core.config.arm import Arm
from pipelinerl_core.errors import ConfigError, PipelineRLError
from pipelinerl_core.report.html import duration
from pipelinerl_core.run.locate import root_url, run_url
from pipelinerl_core.run.mlflow_run import closing
from pipelinerl_core.telemetry.mlflow import PARENT_TAG

Arms = Annotated[
    dict[str, list[str]],
    Field(description='Settings of each arm by name, for example {"four": ["schedule.kind=conventional"]}.'),
]
Seeds = Annotated[list[int], Field(description="Every arm runs once with each.")]
Target = Annotated[float, Field(description="Held-out accuracy that the arms are timed to.")]
Margin = Annotated[
    float, Field(description="A run is stopped when its training reward is this far above the target.")
]
Minutes = Annotated[
    float, Field(description="Seeds that do not fit into this time are left out, the last one first.")
]
Reference = Annotated[str, Field(description="Arm that the others are compared with. Empty: the first.")]
Name = Annotated[str, Field(description="Name of the comparison. Empty: that of the preset.")]


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
    """Time every arm to the same accuracy. The same parameters again find what is done and go on with the rest.

    Returns the comparison (comparison.json); raises RunsFailed when a run failed, after all others were compared.
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
    """The work of the compare flow. checked: id of the run whose configuration whoever planned has checked."""
    results = Results(plan, root)
    labels = {"preset": plan.wanted.source, "comparison": plan.name}
    tracker, parent = open_comparison(plan.runs[0].config, root_url(root), plan.key, labels, str(flow_run.id))
    with closing(tracker):
        dropped = run_all(plan, results, root, labels | ({PARENT_TAG: parent} if parent else {}), checked)
        document: dict[str, Any] = write_comparison(results, dropped)
        log_comparison(tracker, results.store, document)
    if results.failed:
        reasons = "; ".join(f"{run}: {reason}" for run, reason in results.failed.items())
        raise RunsFailed(f"{reasons}. The others are compared in {results.store.url}")
    return document


def run_all(
    plan: Plan, results: Results, root: str, labels: Mapping[str, str], checked: str = ""
) -> list[PlannedRun]:
    """Run whatever is left to do and fits into the budget; returns what did not. `labels`: tags of every run."""
    pending = unsettled(plan, root)
    begun = {run.seed for run in plan.runs if run not in pending} | {plan.runs[0].seed}
    budget = Budget(plan.wanted.budget_minutes * 60, results.spent(), begun=begun)
    num_done = len(plan.runs) - len(pending)
    logger = get_run_logger()
    logger.info("%d runs, %d of them done before", len(plan.runs), num_done)
    while pending := trimmed(budget, pending, len(plan.wanted.arms)):
        run, *pending = pending
        num_done += 1
        expected = budget.expected_seconds([run, *pending])
        left = f", about {duration(expected)} left" if expected is not None else ""
        logger.info("run %d of %d: %s, seed %d%s", num_done, len(plan.runs), run.arm, run.seed, left)
        begun_at = time.monotonic()
        try:
            run_arm.with_options(flow_run_name=run.run_id)(
                run_url(root, run.run_id),
                run.config,
                plan.wanted.target,
                plan.enough_reward,
                {**labels, "arm": run.arm},
                run.run_id == checked,
            )
        except ConfigError:
            raise
        except PipelineRLError as error:
            logger.exception("%s failed", run.run_id)
            results.failed[run.run_id] = f"{type(error).__name__}: {error}".splitlines()[0]
        seconds = time.monotonic() - begun_at
        budget.note(run.arm, seconds)
        results.add_seconds(run, seconds)
        write_comparison(results, budget.dropped)
    return budget.dropped


def trimmed(budget: Budget, pending: Sequence[PlannedRun], num_arms: int) -> list[PlannedRun]:
    """What of the pending runs fits, said when it is less than before."""
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
) -> None:
    """One run of a comparison: train until it is good enough, report, then measure the accuracy of its versions."""
    run, tracker = open_at(url, config, labels, is_checked=is_checked)
    with RunWatch(run, tracker) as watch:

        def is_enough() -> bool:
            return has_reached(rewards_of(watch.commits), enough_reward)

        if watch.committed_step < run.config.trainer.steps and not is_enough():
            run_roles(run, watch, evaluates=False, is_enough=is_enough)
        crew = Crew(run)
        try:
            crew.evaluate("all", enough=target)
        finally:
            crew.stop()
        watch.finish(write_reports(run))
