"""What `bench stream` prints, for people and as Markdown."""

from collections.abc import Mapping, Sequence
from typing import Any

_PEER_NAMES = {"redis": "Redis stream, pickled groups", "jsonl": "JSON lines"}

Row = tuple[str, str]
"""What, figure."""


def rows(result: Mapping[str, Any]) -> list[Row]:
    """Every figure of a measurement."""
    return [*_throughput(result), *_latency(result), *_memory(result), *_peers(result), *_segments(result)]


def table(result: Mapping[str, Any]) -> str:
    """For people."""
    found = rows(result)
    width = max((len(what) for what, _ in found), default=0)
    lines = [f"{what:<{width}}  {figure}" for what, figure in found]
    return "\n".join([_conditions(result), *lines, *_missing(result), ""])


def markdown(result: Mapping[str, Any]) -> str:
    """For docs/results.md."""
    lines = ["| what | figure |", "|---|--:|"]
    lines += [f"| {' | '.join(row)} |" for row in rows(result)]
    return "\n".join([*lines, "", _conditions(result) + ".", *_missing(result), ""])


def _conditions(result: Mapping[str, Any]) -> str:
    return (
        f"load average {result['load_average']} on {result['cores']} cores at the end, "
        f"pyarrow {result['pyarrow']}, "
        f"{result['machine']}"
    )


def _missing(result: Mapping[str, Any]) -> list[str]:
    return [f"not measured: {line}" for line in result["missing"]]


def _throughput(result: Mapping[str, Any]) -> list[Row]:
    return [(_constellation(cell), _speed(cell)) for cell in result["throughput"]]


def _constellation(cell: Mapping[str, Any]) -> str:
    return f"{_plural(cell['num_actors'], 'actor')}, groups of 8 x {cell['num_tokens']:,}"


def _speed(cell: Mapping[str, Any]) -> str:
    return (
        f"{cell['groups_per_second']:,.0f} groups/s, {cell['tokens_per_second'] / 1e6:.1f} M tokens/s; hub "
        f"{cell['hub_us']:.0f} us per group, {cell['hub_cores']:.2f} cores, {_mb(cell['hub_rss_bytes'])}"
    )


def _latency(result: Mapping[str, Any]) -> list[Row]:
    return [
        (
            f"send to the trainer's read, a group of 8 x {one['num_tokens']:,} every 4 ms",
            f"p50 {one['p50_ms']:.2f}, p99 {one['p99_ms']:.2f}, max {one['max_ms']:.1f} ms",
        )
        for one in result["latency"]
    ]


def _memory(result: Mapping[str, Any]) -> list[Row]:
    memory = result["memory"]
    if memory is None:
        return []
    stalled = (
        f"rows {_mb(memory['stalled_row_bytes'])} of {_mb(memory['budget_bytes'])}, "
        f"process at most {_mb(memory['stalled_max_rss_bytes'])} ({_mb(memory['rest_rss_bytes'])} at rest)"
    )
    working = (
        f"process {_mb(memory['working_first_rss_bytes'])} in the first third, "
        f"{_mb(memory['working_last_rss_bytes'])} in the last, at most {_mb(memory['working_max_rss_bytes'])}"
    )
    what = f"hub with {memory['num_actors']:,} actors of 8 x {memory['num_tokens']:,}, trainer stalled"
    then = f"then {memory['minutes']:g} minutes of work, {memory['groups']:,} groups"
    return [(what, stalled), (then, working)]


def _peers(result: Mapping[str, Any]) -> list[Row]:
    return [
        (
            f"{_PEER_NAMES[peer['peer']]}, groups of 8 x {peer['num_tokens']:,}",
            f"{peer['groups_per_second']:,.0f} groups/s{_ratios(peer, result['throughput'])}",
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
        found.append((what, figure))
    return found


def _mb(num_bytes: float) -> str:
    return f"{num_bytes / 1e6:,.0f} MB"


def _plural(number: int, noun: str) -> str:
    return f"{number:,} {noun}" + ("" if number == 1 else "s")
