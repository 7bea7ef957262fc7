"""What all benchmarks share: options, the machine, Markdown tables, files, and a JSON document or a table on stdout.

Standard library only: the GPU day also uses it.
"""

import argparse
import json
import os
import platform
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any


def machine() -> dict[str, Any]:
    """Number of cores, load average over the last minute and processor architecture of this machine."""
    return {
        "cores": os.cpu_count(),
        "load_average": round(os.getloadavg()[0], 2),
        "machine": platform.machine(),
    }


def conditions(result: dict[str, Any]) -> str:
    """The values of `machine` in a result, as text."""
    return f"load average {result['load_average']} on {result['cores']} cores, {result['machine']}"


def markdown(header: Sequence[str], rows: Iterable[Sequence[object]], *, num_text_columns: int = 1) -> list[str]:
    """The lines of a Markdown table; the first `num_text_columns` columns are left-aligned, others right-aligned."""
    rule = ["---" if index < num_text_columns else "--:" for index in range(len(header))]
    return [f"| {' | '.join(map(str, header))} |", f"|{'|'.join(rule)}|"] + [
        f"| {' | '.join(map(str, row))} |" for row in rows
    ]


def parser(documentation: str | None) -> argparse.ArgumentParser:
    """The command line of a benchmark, with --json. documentation: of its module; --help shows the first line."""
    program, summary = Path(sys.argv[0]).stem, (documentation or "").splitlines()[0]
    own = argparse.ArgumentParser(prog=f"benchmarks {program}", description=summary)
    own.add_argument("--json", action="store_true", help="one JSON document on stdout")
    return own


def write(result: dict[str, Any], table: Callable[[dict[str, Any]], str], *, as_json: bool) -> None:
    """Print a result: as one JSON document, or as `table(result)`."""
    sys.stdout.write(json.dumps(result) + "\n" if as_json else table(result))


def write_file(path: Path, text: str) -> None:
    """Write a file atomically: a crash leaves the old text or the new text."""
    new = path.with_name(f".{path.name}.new")
    new.write_text(text, encoding="utf-8")
    new.replace(path)
