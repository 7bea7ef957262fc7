"""What `bench stream` prints: each figure with what was asked of it, for people and as Markdown."""

from collections.abc import Mapping, Sequence
from typing import Any

ASKED_GROUPS_PER_SECOND = {(100, 512): 5000, (1000, 512): 1500}
"""(actors, tokens) -> groups per second."""
ASKED_TOKENS_PER_SECOND = {4096: 50e6}
"""Tokens of a completion -> tokens per second, with the number of actors that gives most."""
ASKED_P99_MS = 2.0
ASKED_OVER_PEER = {"redis": 4, "jsonl": 15}
"""Times their groups per second at 512 tokens."""
ASKED_SEGMENT_BYTES_PER_SECOND = 100e6
_PEER_NAMES = {"redis": "Redis stream, pickled groups", "jsonl": "JSON lines"}

Row = tuple[str, str, str]
"""What, figure, asked."""


def rows(result: Mapping[str, Any]) -> list[Row]:
    """Every figure of a measurement."""
    return [*_throughput(result), *_latency(result), *_memory(result), *_peers(result), *_segments(result)]


def table(result: Mapping[str, Any]) -> str:
    """For people."""
    found = rows(result)
    widths = [max(len(row[column]) for row in found) for column in range(2)] if found else [0, 0]
    lines = [_conditions(result)]
    lines += [f"{what:<{widths[0]}}  {figure:<{widths[1]}}  {asked}".rstrip() for what, figure, asked in found]
    return "\n".join([*lines, *_missing(result), ""])


def markdown(result: Mapping[str, Any]) -> str:
    """For docs/results.md."""
    lines = ["| what | figure | asked |", "|---|--:|--:|"]
    lines += [f"| {' | '.join(row)} |" for row in rows(result)]
    return "\n".join([*lines, "", _conditions(result) + ".", *_missing(result), ""])


def _conditions(result: Mapping[str, Any]) -> str:
    return (
        f"carrier {result['carrier']}, load average {result['load_average']} on {result['cores']} cores at the end, "
        f"pyarrow {result['pyarrow']}, "
        f"{result['machine']}"
    )


def _missing(result: Mapping[str, Any]) -> list[str]:
    return [f"not measured: {line}" for line in result["missing"]]


def _throughput(result: Mapping[str, Any]) -> list[Row]:
    cells: Sequence[Mapping[str, Any]] = result["throughput"]
    return [(_constellation(cell), _speed(cell), _asked_of(cell, cells)) for cell in cells]


def _constellation(cell: Mapping[str, Any]) -> str:
    return f"{_plural(cell['num_actors'], 'actor')}, groups of 8 x {cell['num_tokens']:,}"


def _speed(cell: Mapping[str, Any]) -> str:
    return (
        f"{cell['groups_per_second']:,.0f} groups/s, {cell['tokens_per_second'] / 1e6:.1f} M tokens/s; hub "
        f"{cell['hub_us']:.0f} us per group, {cell['hub_cores']:.2f} cores, {_mb(cell['hub_rss_bytes'])}"
    )


def _asked_of(cell: Mapping[str, Any], cells: Sequence[Mapping[str, Any]]) -> str:
    asked = ASKED_GROUPS_PER_SECOND.get((cell["num_actors"], cell["num_tokens"]))
    if asked is not None:
        return f"{asked:,} groups/s"
    tokens = ASKED_TOKENS_PER_SECOND.get(cell["num_tokens"])
    alike = [other["tokens_per_second"] for other in cells if other["num_tokens"] == cell["num_tokens"]]
    return f"{tokens / 1e6:.0f} M tokens/s" if tokens and cell["tokens_per_second"] == max(alike) else ""


def _latency(result: Mapping[str, Any]) -> list[Row]:
    return [
        (
            f"send to the trainer's read, a group of 8 x {one['num_tokens']:,} every 4 ms",
            f"p50 {one['p50_ms']:.2f}, p99 {one['p99_ms']:.2f}, max {one['max_ms']:.1f} ms",
            f"p99 {ASKED_P99_MS:g} ms",
        )
        for one in result["latency"]
    ]


def _memory(result: Mapping[str, Any]) -> list[Row]:
    memory = result["memory"]
    if memory is None:
        return []
    stalled = (
        f"rows {_mb(memory['stalled_row_bytes'])}, process at most {_mb(memory['stalled_max_rss_bytes'])} "
        f"({_mb(memory['rest_rss_bytes'])} at rest)"
    )
    working = (
        f"process {_mb(memory['working_first_rss_bytes'])} in the first third, "
        f"{_mb(memory['working_last_rss_bytes'])} in the last, at most {_mb(memory['working_max_rss_bytes'])}"
    )
    what = f"hub with {memory['num_actors']:,} actors of 8 x {memory['num_tokens']:,}, trainer stalled"
    then = f"then {memory['minutes']:g} minutes of work, {memory['groups']:,} groups"
    return [(what, stalled, f"rows within {_mb(memory['budget_bytes'])}"), (then, working, "flat")]


def _peers(result: Mapping[str, Any]) -> list[Row]:
    return [
        (
            f"{_PEER_NAMES[peer['peer']]}, groups of 8 x {peer['num_tokens']:,}",
            f"{peer['groups_per_second']:,.0f} groups/s{_ratios(peer, result['throughput'])}",
            f"ours {ASKED_OVER_PEER[peer['peer']]} times that" if peer["num_tokens"] == 512 else "",
        )
        for peer in result["peers"]
    ]


def _ratios(peer: Mapping[str, Any], cells: Sequence[Mapping[str, Any]]) -> str:
    ours = [
        f"{cell['groups_per_second'] / peer['groups_per_second']:.1f} with {_plural(cell['num_actors'], 'actor')}"
        for cell in cells
        if cell["num_tokens"] == peer["num_tokens"]
    ]
    return f"; ours is {', '.join(ours)} times that" if ours else ""


def _segments(result: Mapping[str, Any]) -> list[Row]:
    found = []
    for one in result["segments"]:
        what, figure = f"the same objects, {one['target']}", f"{_mb(one['object_bytes_per_second'])}/s of objects"
        if "row_bytes" in one:
            what = f"segments, 2 writers, to {one['target']}"
            figure = (
                f"{_mb(one['row_bytes_per_second'])}/s of rows, {figure}; "
                f"{_mb(one['row_bytes_per_cpu_second'])} of rows per CPU second"
            )
        asked = f"{_mb(ASKED_SEGMENT_BYTES_PER_SECOND)}/s" if one["target"] == "rclone serve s3" else ""
        found.append((what, figure, asked))
    return found


def _mb(num_bytes: float) -> str:
    return f"{num_bytes / 1e6:,.0f} MB"


def _plural(number: int, noun: str) -> str:
    return f"{number:,} {noun}" + ("" if number == 1 else "s")
