"""Segments to a store, for `bench stream`: SegmentWriter as actors use it, to `rclone serve s3` and to the disk.

Two actors, each a thread that appends groups and one that seals what is due, as in an actor. Every group has random
tokens of its own, as compression would make too little of equal ones. Beside it the same objects through a bare
fsspec filesystem, one after the other: what the server and the client library alone are capable of.
"""

import contextlib
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import fsspec
import pyarrow as pa

from pipelinerl_core.bench.stream_rows import ACTOR_EPOCH, GROUP_SIZE, RUN_ID, Rows, group_ref
from pipelinerl_core.data.segments import SegmentWriter
from pipelinerl_core.errors import ConfigError
from pipelinerl_core.interfaces import ObjectStore
from pipelinerl_core.messages import Lease
from pipelinerl_core.storage.object_store import open_store
from pipelinerl_core.types import GroupRef, Prompt

NUM_TOKENS = 512
NUM_WRITERS = 2
SEGMENT_BYTES = 16_000_000
"""store.segment_bytes of a run."""
_BUCKET = "bucket"
_KEYS = ("bench-access-key", "bench-secret-key")
_START_SECONDS = 20.0

Groups = Sequence[tuple[pa.RecordBatch, GroupRef]]


def measure_segments(num_groups: int) -> list[dict[str, Any]]:
    """Megabytes per second of each way. Raises ConfigError, in one line, when there is no rclone."""
    groups = [_groups(f"actor-{index}", num_groups) for index in range(NUM_WRITERS)]
    with tempfile.TemporaryDirectory(prefix="bench-stream-") as directory:
        found = [_measure("disk", open_store(f"{directory}/run"), groups)]
        with _rclone(Path(directory)) as endpoint:
            found.append(_measure("rclone serve s3", open_store(f"s3://{_BUCKET}/run"), groups))
            found.append(_bare_put(endpoint, open_store(f"{directory}/run")))
    return found


def _measure(target: str, store: ObjectStore, groups: Sequence[Groups]) -> dict[str, Any]:
    """Rows and objects, in bytes per second of wall and of CPU time, until everything is sealed."""
    row_bytes = sum(batch.get_total_buffer_size() for one in groups for batch, _ in one)
    with _clock() as clock:
        _all_at_once([lambda one=one: _write(store, one) for one in groups])  # type: ignore[misc]
    sizes = [len(store.get(key)) for key in store.list("rollouts")]
    return {
        "target": target,
        "row_bytes": row_bytes,
        "object_bytes": sum(sizes),
        "objects": len(sizes),
        "row_bytes_per_second": row_bytes / clock["wall"],
        "object_bytes_per_second": sum(sizes) / clock["wall"],
        "row_bytes_per_cpu_second": row_bytes / clock["cpu"],
    }


def _write(store: ObjectStore, groups: Groups) -> None:
    actor = groups[0][1].actor
    writer = SegmentWriter(store, actor, ACTOR_EPOCH, RUN_ID, max_seconds=1.0, max_bytes=SEGMENT_BYTES)
    is_done = threading.Event()

    def append() -> None:
        for batch, ref in groups:
            writer.append(batch, ref)
        is_done.set()

    appending = threading.Thread(target=append)
    appending.start()
    while not is_done.is_set():
        if writer.seal_due() is None:
            is_done.wait(0.005)
    appending.join()
    writer.seal()


def _bare_put(endpoint: str, source: ObjectStore) -> dict[str, Any]:
    """The segments that were written to the disk, as bytes."""
    settings = {"request_checksum_calculation": "when_required", "s3": {"addressing_style": "path"}}
    fs: Any = fsspec.filesystem("s3", endpoint_url=endpoint, config_kwargs=settings, skip_instance_cache=True)
    objects = {key: source.get(key) for key in source.list("rollouts")}
    with _clock() as clock:
        for key, data in objects.items():
            fs.pipe_file(f"{_BUCKET}/bare/{key}", data)
    num_bytes = sum(map(len, objects.values()))
    return {
        "target": "rclone serve s3, bare fsspec",
        "object_bytes": num_bytes,
        "objects": len(objects),
        "object_bytes_per_second": num_bytes / clock["wall"],
    }


def _groups(actor: str, num_groups: int) -> Groups:
    column = pa.array([actor] * GROUP_SIZE)
    prompt = Prompt(prompt_id="00", source="sums", env="sums", text="")
    found = []
    for group_id in range(num_groups):
        lease = Lease(
            group_id=group_id,
            attempt=0,
            lease_id=f"{group_id}.0.boot",
            deadline_seconds=0.0,
            group_size=GROUP_SIZE,
            prompt=prompt,
        )
        found.append((Rows(NUM_TOKENS, seed=group_id).of(lease, column, 0), group_ref(lease, actor, NUM_TOKENS)))
    return found


def _all_at_once(tasks: Sequence[Callable[[], None]]) -> None:
    threads = [threading.Thread(target=task) for task in tasks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


@contextlib.contextmanager
def _clock() -> Iterator[dict[str, float]]:
    """Seconds of wall and of this process's CPU time, known at the end."""
    clock = {"wall": -time.perf_counter(), "cpu": -time.process_time()}
    yield clock
    clock["wall"] += time.perf_counter()
    clock["cpu"] += time.process_time()


@contextlib.contextmanager
def _rclone(directory: Path) -> Iterator[str]:
    """A server over an empty directory, to which the AWS_* variables point meanwhile."""
    beside = Path(sys.executable).parent / "rclone"
    binary = str(beside) if beside.exists() else shutil.which("rclone")
    if binary is None:
        raise ConfigError("S3: no rclone beside this interpreter or on PATH; `make install` installs it")
    (directory / "s3" / _BUCKET).mkdir(parents=True)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    command = [binary, "serve", "s3", str(directory / "s3"), "--addr", address, "--config", os.devnull]
    server = subprocess.Popen([*command, "--auth-key", ",".join(_KEYS)], stderr=subprocess.DEVNULL)
    try:
        _await_port(server, address)
        with _variables(f"http://{address}"):
            yield f"http://{address}"
    finally:
        server.kill()
        server.wait(timeout=10)


def _await_port(server: subprocess.Popen[bytes], address: str) -> None:
    host, _, port = address.rpartition(":")
    deadline = time.monotonic() + _START_SECONDS
    while True:
        try:
            socket.create_connection((host, int(port)), timeout=1).close()
            return
        except OSError:
            if server.poll() is not None or time.monotonic() > deadline:
                raise ConfigError(f"S3: rclone does not answer at {address}") from None
            time.sleep(0.05)


@contextlib.contextmanager
def _variables(endpoint: str) -> Iterator[None]:
    names = ("AWS_ENDPOINT_URL_S3", "AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_DEFAULT_REGION")
    before = {name: os.environ.get(name) for name in names}
    os.environ.update(zip(names, (endpoint, *_KEYS, "us-east-1"), strict=True))
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name)
            if value is not None:
                os.environ[name] = value
