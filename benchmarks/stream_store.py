"""Segments to a store, for `bench stream`: one SegmentWriter, to a disk and to `rclone serve s3`."""

import contextlib
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

from benchmarks.stream_actors import GROUP_SIZE, NUM_TOKENS, RUN_ID
from pipelinerl_core.config import RunConfig
from pipelinerl_core.data.codec import encode_rollouts
from pipelinerl_core.data.segments import SegmentWriter
from pipelinerl_core.errors import ConfigError
from pipelinerl_core.storage.object_store import open_store
from tests.ports import free_port
from tests.rollout_rows import build_group, group_ref

_BUCKET = "bucket"
_KEYS = ("bench-access-key", "bench-secret-key")
_START_SECONDS = 20.0


def measure_segments(target: str, num_groups: int) -> dict[str, Any]:
    """Groups per second to "disk" or to "S3", all sealed. Raises ConfigError if rclone is missing or does not start.

    Every group has its own random tokens: equal groups would compress too well.
    """
    built = [build_group(0, group_id=index, size=GROUP_SIZE, num_tokens=NUM_TOKENS) for index in range(num_groups)]
    groups = [(encode_rollouts(RUN_ID, rollouts), group_ref(rollouts)) for rollouts in built]
    with tempfile.TemporaryDirectory(prefix="bench-stream-") as directory, contextlib.ExitStack() as stack:
        url = f"{directory}/run"
        if target == "S3":
            stack.enter_context(_rclone(Path(directory)))
            url = f"s3://{_BUCKET}/run"
        max_bytes = RunConfig().store.segment_bytes
        writer = SegmentWriter(open_store(url), "actor-0", 0, RUN_ID, max_seconds=1.0, max_bytes=max_bytes)
        started = time.perf_counter()
        for batch, ref in groups:
            writer.append(batch, ref)
            writer.seal_due()
        writer.seal()
        return {"groups": num_groups, "groups_per_second": num_groups / (time.perf_counter() - started)}


@contextlib.contextmanager
def serve(command: Sequence[str], port: int) -> Iterator[None]:
    """A server at a loopback port, from its first connection on. Raises ConfigError if the server does not start."""
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + _START_SECONDS
    try:
        while True:
            try:
                socket.create_connection(("127.0.0.1", port), timeout=1).close()
                break
            except OSError:
                if server.poll() is not None or time.monotonic() > deadline:
                    raise ConfigError(f"{command[0]} does not answer at port {port}") from None
                time.sleep(0.05)
        yield
    finally:
        server.kill()
        server.wait(timeout=10)


@contextlib.contextmanager
def _rclone(directory: Path) -> Iterator[None]:
    """A server of an empty bucket, to which the AWS_* variables point for the time of the context."""
    beside = Path(sys.executable).parent / "rclone"
    binary = str(beside) if beside.exists() else shutil.which("rclone")
    if binary is None:
        raise ConfigError("S3: no rclone beside this interpreter or on PATH; `make install` installs rclone")
    (directory / "s3" / _BUCKET).mkdir(parents=True)
    port = free_port()
    command = [binary, "serve", "s3", str(directory / "s3"), "--addr", f"127.0.0.1:{port}", "--config", os.devnull]
    names = ("AWS_ENDPOINT_URL_S3", "AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_DEFAULT_REGION")
    variables = dict(zip(names, (f"http://127.0.0.1:{port}", *_KEYS, "us-east-1"), strict=True))
    with serve([*command, "--auth-key", ",".join(_KEYS)], port), patch.dict(os.environ, variables):
        yield
