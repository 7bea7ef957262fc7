"""Shared by `compare`, `sweep` and the benchmark `learning`. Prefect is imported after the checks."""

from collections.abc import Sequence
from typing import Any

from pipelinerl.flows.cli.console import answer, say
from pipelinerl_core.comparison.plan import Plan
from pipelinerl_core.comparison.results import HTML_KEY
from pipelinerl_core.comparison.table import markdown
from pipelinerl_core.config.arm import Arm, parse_arm, read_arms
from pipelinerl_core.report.query.database import check_alarm_query
from pipelinerl_core.run.locate import find_run, root_url, run_url
from pipelinerl_core.supervision.checks import check_all, check_root


def split_source(source: str, overrides: Sequence[str]) -> tuple[str, tuple[str, ...]]:
    """(preset, overrides); if the first argument is a setting, the preset is quickstart."""
    return ("quickstart", (source, *overrides)) if "=" in source else (source, tuple(overrides))


def arms_of(texts: Sequence[str], path: str) -> tuple[Arm, ...]:
    """The arms of the file `path` (may be empty), then the arms of --arm."""
    return (*(read_arms(path) if path else ()), *map(parse_arm, texts))


def carry_out(plan: Plan, root: str) -> dict[str, Any]:
    """Check the first run and run the flow, which checks every other run at its start; returns comparison.json.

    With a deployment, the hosts of the runs check all of them.
    """
    if not plan.wanted.deployment:
        first = plan.runs[0]
        check_root(root_url(root))
        run = find_run(run_url(root, first.run_id))
        if run is None:
            check_alarm_query(first.config)
        for line in check_all(first.config, root_url(root), run=run):
            say(line)
    from pipelinerl.flows.cli.launch import run_comparison

    return run_comparison(plan, root)


def show(document: dict[str, Any], *, as_json: bool) -> None:
    """Print the result of a comparison."""
    page = f"{document['url'].removeprefix('file://')}/{HTML_KEY}"
    answer(document, [markdown(document), "", f"page: {page}"], as_json=as_json)
