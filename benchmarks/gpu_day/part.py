"""What a part of `make gpu-day` prints: one JSON document with figures, a table, and the checks that failed."""

import json
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks import report

NO_CARD = "not run: no card"


def has_card() -> bool:
    """Whether torch has a GPU here."""
    import torch

    return torch.cuda.is_available()


def device_name() -> str:
    """`cuda` or `cpu`, as torch names it."""
    return "cuda" if has_card() else "cpu"


def figures_table(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Rows with equal keys as lines of Markdown; empty for no rows."""
    if not rows:
        return []
    return report.markdown([*rows[0]], [[_text(value) for value in row.values()] for row in rows])


def emit(*tables: Sequence[Mapping[str, Any]], problems: Sequence[str] = ()) -> int:
    """Print the document of a part; returns the exit code, 1 if there are problems.

    tables: each a list of rows with equal keys.
    """
    lines = [line for rows in tables for line in [*figures_table(rows), ""]]
    document = {"tables": tables, "problems": problems, "markdown": "\n".join(lines).strip()}
    sys.stdout.write(json.dumps(document) + "\n")
    return 1 if problems else 0


def _text(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value).replace("|", "/")
