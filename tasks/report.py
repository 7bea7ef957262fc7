"""The Prefect tasks that write the report of a run and the result of a comparison."""

import logging
from typing import Any

from prefect import task
from prefect.artifacts import create_markdown_artifact
from prefect.cache_policies import NO_CACHE

from pipelinerl_core.comparison.plan import PlannedRun
from pipelinerl_core.comparison.results import Results
from pipelinerl_core.comparison.table import markdown
from pipelinerl_core.report.html import write_report
from pipelinerl_core.run.context import RunContext
from pipelinerl_core.run.locate import plain_name

logger = logging.getLogger(__name__)


@task(name="report", task_run_name="report", persist_result=False, cache_policy=NO_CACHE)
def write_reports(run: RunContext) -> dict[str, Any]:
    """Write report.json, report.html and weights.parquet from the stored objects of the run; returns the report."""
    return write_report(run.store)


@task(name="comparison", task_run_name="comparison", persist_result=False, cache_policy=NO_CACHE)
def write_comparison(results: Results, dropped: list[PlannedRun]) -> dict[str, Any]:
    """Compare the finished runs and write the result. dropped: runs that the budget left out."""
    return results.write(dropped)


def show_comparison(document: dict[str, Any]) -> None:
    """Make an artifact of the table; an error is logged."""
    try:
        text = f"# {document['name']}\n\n{markdown(document)}\n\nTable, figure and runs: {document['url']}"
        create_markdown_artifact(
            text, key=f"{plain_name(document['name'])}-comparison", description=f"table of {document['name']}"
        )
    except Exception as error:  # noqa: BLE001 (the comparison does not depend on the Prefect server)
        logger.warning("artifact of the table failed: %s", error)
