"""The Prefect task that writes what a run came to: report.json, report.html, weights.parquet."""

import json
from typing import Any

from prefect import task
from prefect.cache_policies import NO_CACHE

from pipelinerl_core.config.model_path import resolve_model_path
from pipelinerl_core.records import REPORT_HTML_KEY, REPORT_JSON_KEY
from pipelinerl_core.roles.context import RunContext
from pipelinerl_core.tracking.html import render_report
from pipelinerl_core.tracking.report import build_report, write_weights_table
from pipelinerl_core.tracking.samples import token_decoder


@task(name="report", persist_result=False, cache_policy=NO_CACHE)
def write_reports(run: RunContext) -> dict[str, Any]:
    """Build the report from the run's objects alone, write it beside them, and return it."""
    report = build_report(run.store)
    run.store.put(REPORT_JSON_KEY, json.dumps(report, indent=2).encode())
    write_weights_table(run.store)
    model = resolve_model_path(run.config.model.path)
    page = render_report(run.store, decode=token_decoder(str(model)) if model else None)
    run.store.put(REPORT_HTML_KEY, page.encode())
    return report
