"""The report of a run as Markdown, for its artifact."""

from collections.abc import Mapping
from typing import Any


def report_markdown(report: Mapping[str, Any]) -> str:
    """The report as a table: nested figures as `lag.mean`; what is not known is left out."""
    rows = [f"| {name} | {_figure(value)} |" for name, value in _flat(report) if value is not None]
    return "\n".join([f"# {report['run_id']}", "", "| figure | value |", "| --- | ---: |", *rows])


def _flat(values: Mapping[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    flat: list[tuple[str, Any]] = []
    for key, value in values.items():
        flat += _flat(value, f"{prefix}{key}.") if isinstance(value, Mapping) else [(f"{prefix}{key}", value)]
    return flat


def _figure(value: Any) -> str:
    return f"{value:,.4g}" if isinstance(value, float) else f"{value:,}" if isinstance(value, int) else str(value)
