"""Measure the channel: the real hub under simulated actors and a simulated trainer.

Run: `python -m benchmarks stream [--short] [--json]`. The rows of the table:

    actors      groups/s and the hub's CPU time per group; the hub's memory at the end of the work, and after the
                trainer has stood still for some seconds. One row has one actor that sends a group every 4 ms: the
                latency from the creation of the rows in the actor to the end of reading in the trainer
    segments    groups/s of one SegmentWriter to a disk and to `rclone serve s3`

Hub, actors and trainer share this machine. On a machine with few cores groups/s depends on all three, and the hub's
CPU time per group is the figure that can be compared with other machines.
"""

import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from benchmarks import report
from benchmarks.stream_actors import GROUP_SIZE, NUM_TOKENS, Cell
from benchmarks.stream_hub import HubUnderLoad, SimulatedTrainer
from benchmarks.stream_store import measure_segments
from pipelinerl_core.errors import ConfigError, PipelineRLError
from pipelinerl_core.roles.runtime.process import exit_codes, keep_freed_memory, limit_threads

STEP_DEADLINE_SECONDS = 60.0
_WARM_UP_SECONDS = 2.0
_SEGMENT_GROUPS = 1500


@dataclass(frozen=True, slots=True, kw_only=True)
class Extent:
    """The measurements and their duration."""

    cells: Sequence[Cell]
    seconds: float
    """Work of each cell."""
    stall_seconds: float
    """How long the trainer stands still at the end of each cell."""


# With these leases, syncs take little of the time, and the rows of all groups fit into the hub's memory. With many
# actors a step has more groups, because the hub announces every step to all actors.
_CELLS = (
    Cell(num_actors=1, groups_per_step=1, num_leases=64, pause_seconds=0.004),
    Cell(num_actors=1, groups_per_step=256, num_leases=64),
    Cell(num_actors=100, groups_per_step=1024, num_leases=32),
    Cell(num_actors=1000, groups_per_step=4096, num_leases=8),
)
FULL = Extent(cells=_CELLS, seconds=6.0, stall_seconds=10.0)
SHORT = Extent(cells=_CELLS[:3], seconds=2.0, stall_seconds=2.0)


def measure_cell(cell: Cell, seconds: float, stall_seconds: float) -> dict[str, Any]:
    """One row of the table: steps of the trainer for `seconds`, then none for `stall_seconds`."""
    with HubUnderLoad.open(cell) as load:
        trainer = SimulatedTrainer(load.hub_url(), load.token, cell.num_tokens)
        load.begin()
        _train(trainer, _WARM_UP_SECONDS)
        num_before, cpu_before = len(trainer.latencies), load.cpu_seconds()
        wall_seconds = _train(trainer, seconds)
        cpu_seconds, rss_bytes = load.cpu_seconds() - cpu_before, load.rss_bytes()
        latencies_ms = np.array(trainer.latencies[num_before:]) * 1e3
        time.sleep(stall_seconds)
        stalled_rss_bytes = load.rss_bytes()
        trainer.close()
        _, num_refused = load.finish()
    row = {
        "groups": len(latencies_ms),
        "groups_per_second": len(latencies_ms) / wall_seconds,
        "hub_us": cpu_seconds / len(latencies_ms) * 1e6,
        "hub_mb": rss_bytes / 1e6,
        "stalled_hub_mb": stalled_rss_bytes / 1e6,
        "refused": num_refused,
    }
    if cell.pause_seconds:  # otherwise groups wait for their step, which latency would consist of
        row |= {f"p{rank}_ms": float(np.percentile(latencies_ms, rank)) for rank in (50, 99)}
    return row


def _train(trainer: SimulatedTrainer, seconds: float) -> float:
    """Take steps for `seconds`, at least one; returns the wall time. Raises PipelineRLError if no step is ready."""
    started = stepped_at = time.perf_counter()
    while stepped_at == started or stepped_at - started < seconds:
        if trainer.take_step():
            stepped_at = time.perf_counter()
        elif time.perf_counter() - stepped_at > STEP_DEADLINE_SECONDS:
            raise PipelineRLError(f"no step within {STEP_DEADLINE_SECONDS:.0f} s; see the lines of the actors above")
    return stepped_at - started


def measure(extent: Extent) -> dict[str, Any]:
    """All rows in turn. `missing` has one line for each row that needs a program that is not installed."""
    rows: list[dict[str, Any]] = []
    missing: list[str] = []

    def add(label: str, part: Callable[..., dict[str, Any]], *arguments: Any) -> None:
        _log(label)
        try:
            rows.append({"what": label, **part(*arguments)})
        except ConfigError as error:
            _log(str(error))
            missing.append(str(error))

    for cell in extent.cells:
        pause = f", a group every {cell.pause_seconds * 1e3:g} ms" if cell.pause_seconds else ""
        add(f"actors: {cell.num_actors:,}{pause}", measure_cell, cell, extent.seconds, extent.stall_seconds)
    for target in ("disk", "S3"):
        add(f"segments: {target}", measure_segments, target, _SEGMENT_GROUPS)
    return {"rows": rows, "missing": missing, "pyarrow": pa.__version__, **report.machine()}


_COLUMNS = {
    "groups_per_second": ("groups/s", ",.0f"),
    "p50_ms": ("p50, ms", ".2f"),
    "p99_ms": ("p99, ms", ".2f"),
    "hub_us": ("hub, us per group", ".0f"),
    "hub_mb": ("hub, MB", ",.0f"),
    "stalled_hub_mb": ("hub, MB, trainer stalled", ",.0f"),
}


def table(result: dict[str, Any]) -> str:
    """The measurement as Markdown."""
    header = [f"groups of {GROUP_SIZE} x {NUM_TOKENS}", *(title for title, _ in _COLUMNS.values())]
    rows = [
        [row["what"], *(f"{row[key]:{style}}" if key in row else "" for key, (_, style) in _COLUMNS.items())]
        for row in result["rows"]
    ]
    lines = [*report.markdown(header, rows), "", f"{report.conditions(result)}, pyarrow {result['pyarrow']}"]
    return "\n".join([*lines, *(f"not measured: {line}" for line in result["missing"]), ""])


def _log(text: str) -> None:
    sys.stderr.write(f"bench stream: {text}\n")
    sys.stderr.flush()


@exit_codes
def main() -> int:
    """Print a table, or one JSON document with --json."""
    parser = report.parser(__doc__)
    parser.add_argument("--short", action="store_true", help="fewer rows and less time: half a minute")
    options = parser.parse_args()
    limit_threads(1)
    keep_freed_memory()
    result = measure(SHORT if options.short else FULL)
    report.write(result, table, as_json=options.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
