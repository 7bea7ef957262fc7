"""The Learner of a trainer with several ranks, as rank 0 sees it, and what the other ranks do for it.

Rank 0 alone talks to the hub and to the store. It cuts the rows of a step into equally many packs for every rank,
sends each rank its rows, and computes with the others. A rank's failure ends all of them: the step was not committed.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, TypeVar

import pyarrow as pa
import torch
from torch import Tensor

from pipelinerl_core.algo.packed import PackedBatch
from pipelinerl_core.batching.collate import PackBatcher
from pipelinerl_core.config import RunConfig, build_config
from pipelinerl_core.data.codec import (
    decode_batch,
    decode_rollouts,
    encode_batch,
    encode_rollouts,
    from_segment,
    to_segment,
)
from pipelinerl_core.roles.trainer.rank_channel import RankChannel, translate_rank_errors
from pipelinerl_core.types import Float32Array, Rollout, TrainingRow

_T = TypeVar("_T")
_DTYPES = {str(dtype): dtype for dtype in (torch.float32, torch.bfloat16, torch.uint8, torch.int64)}


class RankLearner(Protocol):
    """One rank's learner; collective methods are called on all ranks at once."""

    version: int

    @property
    def is_sharded(self) -> bool:
        """Whether `weights` and `state` are collective."""
        ...

    def step_packs(self, packs: Sequence[PackedBatch]) -> dict[str, float]:
        """One optimizer step, collective."""
        ...

    def logprobs_of(self, rollouts: Sequence[Rollout]) -> list[Float32Array]:
        """See `interfaces.Learner`; collective, with the same rollouts on every rank."""
        ...

    def weights(self) -> dict[str, Tensor]:
        """See `interfaces.Learner`."""
        ...

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """See `interfaces.Learner`."""
        ...

    def load_state(self, tensors: Mapping[str, Tensor], values: Mapping[str, Any]) -> None:
        """See `interfaces.Learner`; collective, with the same tensors on every rank."""
        ...


class RankedLearner:
    """All ranks as one Learner; lives in rank 0."""

    def __init__(self, local: RankLearner, channel: RankChannel, batcher: PackBatcher) -> None:
        self._local = local
        self._channel = channel
        self._batcher = batcher

    @property
    def version(self) -> int:
        """See `interfaces.Learner`."""
        return self._local.version

    @version.setter
    def version(self, version: int) -> None:
        self._local.version = version

    def step(self, rows: Sequence[TrainingRow]) -> dict[str, float]:
        """See `interfaces.Learner`."""
        step = self.version + 1
        plan = self._batcher.plan(rows, self._channel.size)
        with translate_rank_errors(f"step {step}"), self._channel.command():
            self._channel.send("step", payloads=[_share(rows, packs, step) for packs in plan[1:]])
            return self._local.step_packs(self._batcher.planned(rows, plan[0]))

    def logprobs_of(self, rollouts: Sequence[Rollout]) -> list[Float32Array]:
        """See `interfaces.Learner`."""
        with translate_rank_errors("scoring of rollouts"), self._channel.command():
            if self._local.is_sharded:
                data = _segment(encode_rollouts("", rollouts))
                self._channel.send("score", payloads=[({}, data)] * (self._channel.size - 1))
            return self._local.logprobs_of(rollouts)

    def weights(self) -> dict[str, Tensor]:
        """See `interfaces.Learner`."""
        return self._gathered("weights", self._local.weights)

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """See `interfaces.Learner`."""
        return self._gathered("state", self._local.state)

    def load_state(self, tensors: Mapping[str, Tensor], values: Mapping[str, Any]) -> None:
        """See `interfaces.Learner`."""
        found = {name: tensor.contiguous() for name, tensor in tensors.items()}
        shapes = {name: [str(tensor.dtype), list(tensor.shape)] for name, tensor in found.items()}
        with translate_rank_errors("sending of a checkpoint"), self._channel.command():
            self._channel.send("load", tensors=shapes, values=dict(values))
            for tensor in found.values():
                self._channel.broadcast(tensor)
            self._local.load_state(found, values)

    def _gathered(self, command: str, gather: Callable[[], _T]) -> _T:
        with translate_rank_errors(f"gathering of {command}"), self._channel.command():
            if self._local.is_sharded:
                self._channel.send(command)
            return gather()


def serve(channel: RankChannel, build: Callable[[RunConfig], tuple[RankLearner, PackBatcher]]) -> None:
    """What a rank other than 0 does: as it is told, until it is told to stop."""
    learner: RankLearner | None = None
    batcher: PackBatcher | None = None
    while True:
        order, data = channel.receive()
        command = order["command"]
        if command == "stop":
            return
        if command == "build":
            learner, batcher = build(build_config(order["config"]))
        elif learner is None or batcher is None:
            raise ValueError(f"{command} before build")
        else:
            with translate_rank_errors(command):
                _execute(command, order, data, learner, batcher, channel)


def _execute(
    command: str,
    order: Mapping[str, Any],
    data: bytes,
    learner: RankLearner,
    batcher: PackBatcher,
    channel: RankChannel,
) -> None:
    match command:
        case "step":
            rows = [row for batch in from_segment(data) for row in decode_batch(batch)] if data else []
            learner.step_packs(batcher.planned(rows, order["packs"]))
        case "score":
            learner.logprobs_of([rollout for batch in from_segment(data) for rollout in decode_rollouts(batch)])
        case "weights":
            learner.weights()
        case "state":
            learner.state()
        case "load":
            tensors = {
                name: torch.empty(shape, dtype=_DTYPES[dtype]) for name, (dtype, shape) in order["tensors"].items()
            }
            for tensor in tensors.values():
                channel.broadcast(tensor)
            learner.load_state(tensors, order["values"])
        case _:
            raise ValueError(f"unknown command {command}")


def _share(rows: Sequence[TrainingRow], packs: Sequence[Sequence[int]], step: int) -> tuple[dict[str, Any], bytes]:
    """The packs of one rank as indices into its own rows, and these rows."""
    chosen = [index for indices in packs for index in indices]
    places = {index: place for place, index in enumerate(chosen)}
    own = {"packs": [[places[index] for index in indices] for indices in packs]}
    return own, _segment(encode_batch("", step, [rows[index] for index in chosen])) if chosen else b""


def _segment(batch: pa.RecordBatch) -> bytes:
    return to_segment([batch])
