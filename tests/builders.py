"""Builders that tests of several folders share: records of a run, messages, groups, and clocks.

Builders take the fields that a test is about; the other fields have values that no test depends on.
"""

import asyncio
from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from pipelinerl_core.config import RunConfig
from pipelinerl_core.data.codec import encode_rollouts
from pipelinerl_core.interfaces import Engine, ObjectStore
from pipelinerl_core.messages import FateRecord, Lease, Reserved, Sync
from pipelinerl_core.models.resolve import build_config
from pipelinerl_core.rollouts.progress import Progress
from pipelinerl_core.run.processor import processor
from pipelinerl_core.run.records import RUN_KEY, Commit, EpochRecord, HubRecord, RunRecord, commit_key, epoch_key
from pipelinerl_core.types import Completion, EngineRequest, GroupRef, PartialRow, Sampler, WeightManifest, WeightSpan
from tests.rollout_rows import build_rollout
from tests.synthetic_run import put_record


class ManualClock:
    """Seconds that only a test moves."""

    def __init__(self, now: float = 1000.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now


def small_config(**changes: dict[str, Any]) -> RunConfig:
    """Steps of two groups and max_lag=1: at most four groups at once. `changes`: section -> values of its keys."""
    values: dict[str, dict[str, Any]] = {
        "rollouts": {"group_size": 4},
        "engine": {"concurrency": 8},
        "schedule": {"max_lag": 1},
        "trainer": {"groups_per_step": 2, "steps": 100},
        "placement": {"lease_seconds": 10.0},
    }
    for section, settings in changes.items():
        values[section] = {**values.get(section, {}), **settings}
    return build_config(values)


def weight_manifest(version: int, **values: Any) -> WeightManifest:
    """A manifest of weights that are stored nowhere."""
    fields = {"epoch": 1, "files": (), "key": None, "shm": None, "host": "here", "published_at": 0.0}
    return WeightManifest(version=version, **(fields | values))


def run_record(config: RunConfig | dict[str, Any] | None = None, **values: Any) -> RunRecord:
    """Without `config`, the configuration of the record is empty."""
    stored = config.model_dump(mode="json") if isinstance(config, RunConfig) else config or {}
    return RunRecord(**({"run_id": "run", "created_at": 0.0, "code_version": "test", "config": stored} | values))


def put_run(store: ObjectStore, config: RunConfig | dict[str, Any] | None = None, **values: Any) -> RunRecord:
    """Write run.json."""
    record = run_record(config, **values)
    put_record(store, RUN_KEY, record)
    return record


def epoch_record(epoch: int, role: str = "trainer", **values: Any) -> EpochRecord:
    """A record of an epoch that adopted nothing."""
    fields = {"parent": None, "adopted_through": -1, "started_at": 0.0, "host": "here", "pid": 1}
    return EpochRecord(epoch=epoch, role=role, **(fields | {"processor": processor()} | values))


def put_epoch(store: ObjectStore, epoch: int, role: str = "trainer", **values: Any) -> EpochRecord:
    """Write epochs/<epoch>.json."""
    record = epoch_record(epoch, role, **values)
    put_record(store, epoch_key(epoch), record)
    return record


def hub_record(**values: Any) -> HubRecord:
    """A record of a hub that is not on this host."""
    fields = {"url": "grpc://x:1", "boot_id": "boot", "host": "elsewhere", "pid": 1, "process_started_at": 0.0}
    return HubRecord(**(fields | {"beat": 0.0} | values))


def commit_record(step: int, epoch: int = 1, **values: Any) -> Commit:
    """A commit of a step that trained no rows and published nothing."""
    fields = {"run_id": "run", "batches": (), "weights_digest": "", "manifest": None, "checkpoint": None}
    times = {"reserved_at": 0.0, "computed_at": 0.0, "committed_at": 0.0}
    return Commit(step=step, epoch=epoch, **(fields | times | values))


def put_commit(store: ObjectStore, step: int, epoch: int = 1, **values: Any) -> str:
    """Write commits/<step>.<epoch>.json; its key."""
    key = commit_key(step, epoch)
    put_record(store, key, commit_record(step, epoch, **values))
    return key


def trained_by(answer: Reserved) -> dict[str, Any]:
    """Fields of a commit that trains the groups of a reservation."""
    trained = (
        FateRecord(group_id=ref.group_id, attempt=ref.attempt, fate="trained", num_tokens=ref.num_tokens)
        for ref in answer.groups
    )
    names = ("next_group_id", "open_groups", "low_water", "tokens", "actors", "retired_tokens")
    return {"fates": (*answer.fates, *trained), **{name: getattr(answer, name) for name in names}}


def sync_message(**values: Any) -> Sync:
    """The heartbeat of an idle actor that asks for nothing."""
    fields = {"boot_id": "boot", "engine_version": 0, "running": 0, "waiting": 0, "concurrency": 8, "want": 0}
    return Sync(**(fields | {"leases": (), "num_tokens": 0, "running_seconds": 0.0} | values))


def group_named(group_id: int, **values: Any) -> GroupRef:
    """The name of a group of two rollouts of five tokens each."""
    fields = {"attempt": 0, "actor": "actor-0", "actor_epoch": 1, "num_rollouts": 2, "num_tokens": 10}
    return GroupRef(group_id=group_id, **(fields | values))


def rows_of_lease(
    lease: Lease, rewards: tuple[float | None, ...] = (0.0, 1.0), **values: Any
) -> tuple[GroupRef, pa.RecordBatch]:
    """A finished group of two rollouts of five tokens each: its name and its rows."""
    ref = group_named(lease.group_id, attempt=lease.attempt, **values)
    rng = np.random.default_rng(lease.group_id)
    rollouts = [
        build_rollout(
            rng, group_id=lease.group_id, attempt=lease.attempt, rollout_index=index, group_size=2, num_tokens=5,
            actor=ref.actor, reward=reward,
        )
        for index, reward in enumerate(rewards)
    ]  # fmt: skip
    return ref, encode_rollouts("run", rollouts)


def engine_request(
    name: str = "a", *, prompt: Sequence[int] = (5, 6, 7), max_tokens: int = 24, prior: Completion | None = None,
    **sampler: Any,
) -> EngineRequest:  # fmt: skip
    """A request for one completion; `sampler`: fields of its Sampler."""
    return EngineRequest(
        request_id=name, prompt_token_ids=np.array(prompt, np.int32), max_tokens=max_tokens,
        sampler=Sampler(**sampler), prior=prior,
    )  # fmt: skip


async def completion_of(engine: Engine, request: EngineRequest) -> Completion:
    """Run a request to its end."""
    async for chunk in engine.generate(request):
        if chunk.completion is not None:
            return chunk.completion
    raise AssertionError(f"{request.request_id}: the engine ended without a completion")


async def partial_completion_of(engine: Engine, request: EngineRequest, num_tokens: int) -> Completion:
    """Cancel a request as soon as it has `num_tokens` tokens or more: its completion so far, as an actor keeps it."""
    progress = Progress(group_id=0, rollout_index=0, attempt=0)

    async def follow() -> None:
        async for chunk in engine.generate(request):
            progress.add(chunk)

    task = asyncio.create_task(follow())
    while progress.num_tokens < num_tokens:
        assert not task.done(), f"{request.request_id} ended before it had {num_tokens} tokens"
        engine.flush()
        await asyncio.sleep(0)
    task.cancel()
    await asyncio.wait([task])
    return progress.completion()


def partial_row(
    start: int = 0,
    num: int = 3,
    *,
    group_id: int = 5,
    index: int = 0,
    attempt: int = 0,
    version: int = 7,
    **more: Any,
) -> PartialRow:
    """A row of the log of open groups: `num` tokens of one rollout, from token `start` on."""
    return PartialRow(
        group_id=group_id,
        rollout_index=index,
        attempt=attempt,
        start=start,
        token_ids=np.arange(start, start + num, dtype=np.int32),
        rollout_logprobs=-np.arange(start, start + num, dtype=np.float32),
        weight_spans=(WeightSpan(version, start, start + num),) if num else (),
        **more,
    )
