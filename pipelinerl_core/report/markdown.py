"""Markdown: the report of a run as a table, and replacing a section of a page."""

from collections.abc import Mapping
from typing import Any


def report_markdown(report: Mapping[str, Any]) -> str:
    """The report as a table: nested figures as `lag.mean`; figures that are None, and the list of evaluations, are
    left out."""
    flat = _flat({name: value for name, value in report.items() if name != "evaluations"})
    rows = [f"| {name} | {_figure(value)} |" for name, value in flat if value is not None]
    return "\n".join([f"# {report['run_id']}", "", "| figure | value |", "| --- | ---: |", *rows])


def _flat(values: Mapping[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    flat: list[tuple[str, Any]] = []
    for key, value in values.items():
        flat += _flat(value, f"{prefix}{key}.") if isinstance(value, Mapping) else [(f"{prefix}{key}", value)]
    return flat


def _figure(value: Any) -> str:
    return f"{value:,.4g}" if isinstance(value, float) else f"{value:,}" if isinstance(value, int) else str(value)


def replace_section(page: str, name: str, text: str) -> str:
    """The page with `text` between the comments <!-- name --> and <!-- /name -->, which are appended if missing."""
    start, end = f"<!-- {name} -->", f"<!-- /{name} -->"
    before, found, rest = page.partition(start)
    _, is_closed, after = rest.partition(end)
    section = f"{start}\n{text.strip()}\n{end}"
    return before + section + after if found and is_closed else f"{page.rstrip()}\n\n{section}\n"
