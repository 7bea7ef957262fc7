"""The Prefect task that writes what a run came to: report.json, report.html, weights.parquet."""

from typing import Any

from prefect import task
from prefect.cache_policies import NO_CACHE

from pipelinerl_core.config.model_path import resolve_model_path
from pipelinerl_core.roles.context import RunContext
from pipelinerl_core.tracking.html import write_report
from pipelinerl_core.tracking.samples import token_decoder


@task(name="report", persist_result=False, cache_policy=NO_CACHE)
def write_reports(run: RunContext) -> dict[str, Any]:
    """Build the report from the run's objects alone, write it beside them, and return it."""
    model = resolve_model_path(run.config.model.path)
    return write_report(run.store, decode=token_decoder(str(model)) if model else None)
