"""Segments to a store, for `bench stream`: one SegmentWriter, to a disk and to `rclone serve s3`."""

import contextlib
import os
import tempfile
import time
from pathlib import Path
from typing import Any
from unittest.mock import patch

from benchmarks.stream_actors import GROUP_SIZE, NUM_TOKENS, RUN_ID
from pipelinerl_core.config import RunConfig
from pipelinerl_core.data.codec import encode_rollouts
from pipelinerl_core.data.segments import SegmentWriter
from pipelinerl_core.storage.object_store import open_store
from tests.rollout_rows import build_group, group_ref
from tests.s3_server import BUCKET, aws_variables, start_rclone, stop_rclone


def measure_segments(target: str, num_groups: int) -> dict[str, Any]:
    """Groups per second to "disk" or to "S3", all sealed. Raises ConfigError if rclone is missing or does not start.

    Every group has its own random tokens: equal groups would compress too well.
    """
    built = [build_group(0, group_id=index, size=GROUP_SIZE, num_tokens=NUM_TOKENS) for index in range(num_groups)]
    groups = [(encode_rollouts(RUN_ID, rollouts), group_ref(rollouts)) for rollouts in built]
    with tempfile.TemporaryDirectory(prefix="bench-stream-") as directory, contextlib.ExitStack() as stack:
        url = f"{directory}/run"
        if target == "S3":
            server = start_rclone(Path(directory) / "s3")
            stack.callback(stop_rclone, server.process)
            stack.enter_context(patch.dict(os.environ, aws_variables(server.endpoint)))
            url = f"s3://{BUCKET}/run"
        max_bytes = RunConfig().store.segment_bytes
        writer = SegmentWriter(open_store(url), "actor-0", 0, RUN_ID, max_seconds=1.0, max_bytes=max_bytes)
        started = time.perf_counter()
        for batch, ref in groups:
            writer.append(batch, ref)
            writer.seal_due()
        writer.seal()
        return {"groups": num_groups, "groups_per_second": num_groups / (time.perf_counter() - started)}
