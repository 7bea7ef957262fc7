"""Measure the channel: the real hub under simulated actors and a simulated trainer, and others without one.

Run: `pipelinerl bench stream [--short] [--json] [--markdown] [--only PART,...] [--minutes N]`. Parts:

    throughput  groups/s for several lengths and numbers of actors; CPU time of the hub per group
    latency     from an actor's send to the trainer's read, one group every 4 ms
    memory      the hub's memory while the trainer stands still, then over N minutes of work
    peers       the same groups through Redis streams and JSON lines
    segments    SegmentWriter to `rclone serve s3`

Hub, actors (two processes) and trainer share this machine: where it has few cores, groups/s is what all of them leave
each other, and the hub's CPU time per group is the figure that carries over to another machine.
"""

import argparse
import json
import os
import platform
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pyarrow as pa

from pipelinerl_core.bench.stream_actors import Seal
from pipelinerl_core.bench.stream_hub import Cell, HubUnderLoad, SimulatedTrainer
from pipelinerl_core.bench.stream_peers import PEERS, measure_peer
from pipelinerl_core.bench.stream_rows import GROUP_SIZE
from pipelinerl_core.bench.stream_store import measure_segments
from pipelinerl_core.bench.stream_table import markdown, table
from pipelinerl_core.errors import ConfigError, PipelineRLError
from pipelinerl_core.roles.runtime.process import keep_freed_memory, limit_threads

TOKENS = (64, 512, 4096)
ACTORS = (1, 16, 100, 1000)
PARTS = ("throughput", "latency", "memory", "peers", "segments")
PAUSE_SECONDS = 0.004
WARM_UP_SAMPLES = 50
STEP_DEADLINE_SECONDS = 60.0
MAX_FREE_BYTES = 256 << 20
"""That the simulated trainer keeps for the next rows, as much as the hub does."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Extent:
    """How long everything takes."""

    tokens: Sequence[int]
    actors: Sequence[int]
    seconds: float
    """Of each cell of throughput, and of each peer."""
    samples: int
    """Of latency."""
    stalled_actors: int
    stall_seconds: float
    minutes: float
    """Of work after the stall."""
    segment_groups: int
    """Of each of two writers."""


FULL = Extent(
    tokens=TOKENS, actors=ACTORS, seconds=6.0, samples=1500, stalled_actors=1000, stall_seconds=30.0, minutes=10.0,
    segment_groups=6000,
)  # fmt: skip
SHORT = Extent(
    tokens=(512,), actors=(1, 100), seconds=2.0, samples=300, stalled_actors=100, stall_seconds=5.0, minutes=0.2,
    segment_groups=1500,
)  # fmt: skip


def throughput_cell(num_actors: int, num_tokens: int) -> Cell:
    """Leases enough that syncs do not dominate; the rows of all groups that may be ready fit into the hub's memory.

    A step has more groups than there are actors, as it would have: every step is announced to each of them.
    """
    num_leases, groups_per_step = {1: (64, 256), 16: (32, 256), 100: (32, 1024), 1000: (8, 4096)}[num_actors]
    if num_tokens > 1000:
        num_leases, groups_per_step = {1: (64, 256), 16: (16, 256), 100: (8, 256), 1000: (1, 512)}[num_actors]
    return Cell(num_actors=num_actors, num_tokens=num_tokens, num_leases=num_leases, groups_per_step=groups_per_step)


def measure_throughput(cell: Cell, seconds: float) -> dict[str, Any]:
    """One cell: from the third step on, for so long."""
    with HubUnderLoad.open(cell) as load:
        trainer = SimulatedTrainer(load.hub_url(), load.token, cell.num_tokens)
        load.begin()
        for _ in range(2):
            _step(trainer)
        first, begun = len(trainer.seen), time.perf_counter()
        (hub_before, actors_before), trainer_before = load.cpu_seconds(), time.process_time()
        while time.perf_counter() - begun < seconds:
            _step(trainer)
        wall_seconds, num_groups = time.perf_counter() - begun, len(trainer.seen) - first
        (hub_after, actors_after), trainer_after = load.cpu_seconds(), time.process_time()
        rss_bytes = load.rss_bytes
        counts = load.finish()
        trainer.close()
    return {
        "num_actors": cell.num_actors,
        "num_tokens": cell.num_tokens,
        "groups_per_step": cell.groups_per_step,
        "groups": num_groups,
        "seconds": wall_seconds,
        "groups_per_second": num_groups / wall_seconds,
        "tokens_per_second": num_groups * GROUP_SIZE * cell.num_tokens / wall_seconds,
        "hub_us": (hub_after - hub_before) / num_groups * 1e6,
        "hub_cores": (hub_after - hub_before) / wall_seconds,
        "actors_us": (actors_after - actors_before) / num_groups * 1e6,
        "trainer_us": (trainer_after - trainer_before) / num_groups * 1e6,
        "hub_rss_bytes": rss_bytes,
        "syncs_per_group": counts["syncs"] / max(1, counts["groups"]),
        "refused": counts["refused"],
    }


def measure_latency(num_tokens: int, samples: int) -> dict[str, Any]:
    """From the making of the rows in the actor, right before they are sent, to the trainer's numpy views of them."""
    cell = Cell(
        num_actors=1, num_tokens=num_tokens, groups_per_step=1, num_leases=64, burst=1, pause_seconds=PAUSE_SECONDS
    )
    with HubUnderLoad.open(cell) as load:
        trainer = SimulatedTrainer(load.hub_url(), load.token, num_tokens)
        load.begin()
        while len(trainer.latencies) < WARM_UP_SAMPLES + samples:
            _step(trainer)
        trainer.close()
    found = np.array(trainer.latencies[WARM_UP_SAMPLES:]) * 1e3
    return {
        "num_tokens": num_tokens,
        "samples": len(found),
        "p50_ms": float(np.percentile(found, 50)),
        "p99_ms": float(np.percentile(found, 99)),
        "max_ms": float(found.max()),
    }


def measure_memory(num_actors: int, num_tokens: int, *, stall_seconds: float, minutes: float) -> dict[str, Any]:
    """The hub's memory: at rest, while the trainer stands still, and in the first and last part of the work."""
    cell = Cell(num_actors=num_actors, num_tokens=num_tokens, groups_per_step=512, num_leases=8, seal=Seal.NONE)
    with HubUnderLoad.open(cell) as load:
        trainer = SimulatedTrainer(load.hub_url(), load.token, num_tokens)
        at_rest = load.rss_bytes
        load.begin()
        stalled = _watch(load, stall_seconds, lambda: time.sleep(0.2))
        row_bytes = int(load.live()["row_bytes"])
        working = _watch(load, minutes * 60, lambda: _step(trainer))
        trainer.close()
        num_groups = len(trainer.seen)
    third = max(1, len(working) // 3)
    return {
        "num_actors": num_actors,
        "num_tokens": num_tokens,
        "budget_bytes": cell.config().placement.hub_bytes,
        "rest_rss_bytes": at_rest,
        "stalled_row_bytes": row_bytes,
        "stalled_max_rss_bytes": max(stalled),
        "minutes": minutes,
        "groups": num_groups,
        "working_max_rss_bytes": max(working),
        "working_first_rss_bytes": int(np.median(working[:third])),
        "working_last_rss_bytes": int(np.median(working[-third:])),
    }


def _watch(load: HubUnderLoad, seconds: float, act: Callable[[], object]) -> list[int]:
    found, until = [load.rss_bytes], time.monotonic() + seconds
    while time.monotonic() < until:
        act()
        found.append(load.rss_bytes)
    return found


def _step(trainer: SimulatedTrainer) -> None:
    deadline = time.monotonic() + STEP_DEADLINE_SECONDS
    while not trainer.take_step():
        if time.monotonic() > deadline:
            raise PipelineRLError(
                f"no step within {STEP_DEADLINE_SECONDS:.0f} s: the actors' lines above may say why"
            )


def measure(extent: Extent, parts: Sequence[str]) -> dict[str, Any]:
    """All parts in turn. What a part lacks is said in `missing`, one line each."""
    result: dict[str, Any] = {
        "throughput": [], "latency": [], "memory": None, "peers": [], "segments": [], "missing": [],
    }  # fmt: skip
    if "throughput" in parts:
        for num_tokens in extent.tokens:
            for num_actors in extent.actors:
                _say(f"throughput: {num_actors} actors, groups of {GROUP_SIZE} x {num_tokens}")
                cell = throughput_cell(num_actors, num_tokens)
                result["throughput"].append(measure_throughput(cell, extent.seconds))
    if "latency" in parts:
        for num_tokens in extent.tokens:
            _say(f"latency: groups of {GROUP_SIZE} x {num_tokens}")
            result["latency"].append(measure_latency(num_tokens, extent.samples))
    if "memory" in parts:
        _say(f"memory: {extent.stalled_actors} actors, {extent.stall_seconds:g} s stalled, {extent.minutes:g} min")
        result["memory"] = measure_memory(
            extent.stalled_actors, 4096, stall_seconds=extent.stall_seconds, minutes=extent.minutes
        )
    if "peers" in parts:
        for peer in PEERS:
            _or_missing(result, lambda peer=peer: _measure_peers(peer, extent, result))  # type: ignore[misc]
    if "segments" in parts:
        _or_missing(result, lambda: _measure_segments(extent, result))
    return result | {
        "cores": os.cpu_count(),
        "load_average": round(os.getloadavg()[0], 2),
        "pyarrow": pa.__version__,
        "machine": platform.machine(),
    }


def _measure_peers(peer: str, extent: Extent, result: dict[str, Any]) -> None:
    for num_tokens in extent.tokens:
        _say(f"{peer}: groups of {GROUP_SIZE} x {num_tokens}")
        result["peers"].append(measure_peer(peer, num_tokens, extent.seconds))


def _measure_segments(extent: Extent, result: dict[str, Any]) -> None:
    _say(f"segments: {extent.segment_groups} groups for each of two writers")
    result["segments"] = measure_segments(extent.segment_groups)


def _or_missing(result: dict[str, Any], part: Callable[[], None]) -> None:
    try:
        part()
    except ConfigError as error:
        _say(str(error))
        result["missing"].append(str(error))


def _say(text: str) -> None:
    sys.stderr.write(f"bench stream: {text}\n")
    sys.stderr.flush()


def main() -> None:
    """Print a table, Markdown with --markdown, or one JSON document with --json."""
    parser = argparse.ArgumentParser(prog="pipelinerl bench stream", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--short", action="store_true", help="fewer cells and less time: about a minute")
    parser.add_argument("--only", default="", help=f"parts with commas: {', '.join(PARTS)}")
    parser.add_argument("--minutes", type=float, help="of work after the trainer stood still (memory); default 10")
    parser.add_argument("--json", action="store_true", help="one JSON document on stdout")
    parser.add_argument("--markdown", action="store_true", help="the tables of docs/results.md on stdout")
    options = parser.parse_args()
    parts = tuple(filter(None, options.only.split(","))) or PARTS
    unknown = [part for part in parts if part not in PARTS]
    if unknown:
        sys.stderr.write(f"bench stream: --only {unknown[0]}: no such part; there are {', '.join(PARTS)}\n")
        sys.exit(2)
    limit_threads(1)
    keep_freed_memory(MAX_FREE_BYTES)
    extent = SHORT if options.short else FULL
    if options.minutes is not None:
        extent = replace(extent, minutes=options.minutes)
    try:
        result = measure(extent, parts)
    except PipelineRLError as error:
        sys.exit(f"bench stream: {error}")
    sys.stdout.write(
        json.dumps(result) + "\n" if options.json else markdown(result) if options.markdown else table(result)
    )


if __name__ == "__main__":
    main()
