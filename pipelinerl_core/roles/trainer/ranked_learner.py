"""The Learner of a trainer with several ranks: rank 0's side and the command loop of the other ranks.

Only rank 0 communicates with the hub and the store. Rank 0 divides the rows of a step into equally many packs per
rank, sends each rank its rows, and computes with the other ranks. If a rank fails, all ranks end; the step is not
committed then.
"""

from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, suppress
from typing import Any, Protocol

import torch
from torch import Tensor

from pipelinerl_core.algo.packed import PackedBatch
from pipelinerl_core.batching.collate import PackBatcher
from pipelinerl_core.config import RunConfig
from pipelinerl_core.data.codec import (
    decode_batch,
    decode_rollouts,
    encode_batch,
    encode_rollouts,
    from_message,
    to_message,
)
from pipelinerl_core.data.schema import BATCH_SCHEMA, ROLLOUT_SCHEMA
from pipelinerl_core.errors import PipelineRLError, RankLost, TrainingDiverged
from pipelinerl_core.interfaces import Learner, Rescorer, WeightLayout
from pipelinerl_core.models.resolve import build_config
from pipelinerl_core.roles.trainer.rank_channel import NO_BYTES, Payload, RankChannel, translate_rank_errors
from pipelinerl_core.roles.trainer.rank_files import RankFiles
from pipelinerl_core.run.records import checkpoint_prefix
from pipelinerl_core.training.base_learner import StepLogprobs, logprobs_by_row
from pipelinerl_core.training.live_state import LiveState
from pipelinerl_core.training.own_functions import load_own_functions
from pipelinerl_core.types import Float32Array, Rollout, TrainingRow

_DTYPES = {str(dtype): dtype for dtype in (torch.float32, torch.bfloat16, torch.uint8, torch.int64)}


class RankLearner(Learner, Protocol):
    """One rank's learner. All ranks call `load_state`, `adopt_weights` and `logprobs_of` at once, with the same
    arguments."""

    @property
    def is_sharded(self) -> bool:
        """Whether all ranks must call `weights` and `logprobs_of` at once. Then `state` has only the rank's part."""

    def step_packs(self, packs: Iterable[PackedBatch]) -> dict[str, float]:
        """One optimizer step, collective."""

    @property
    def step_vectors(self) -> list[Float32Array]:
        """[N] trainer_logprobs of each rank in the newest step; empty without store.trainer_logprobs."""


class RankedLearner:
    """All ranks as one Learner; an object of rank 0."""

    def __init__(
        self,
        local: RankLearner,
        channel: RankChannel,
        batcher: PackBatcher,
        *,
        files: RankFiles | None = None,
        epoch: int = 0,
    ) -> None:
        """files: of the other ranks; None: there is no other rank. epoch: of the trainer, in names of checkpoints."""
        self._local = local
        self._channel = channel
        self._batcher = batcher
        self._files = files
        self._epoch = epoch
        self.trainer_logprobs: StepLogprobs | None = None

    @property
    def version(self) -> int:
        return self._local.version

    def step(self, rows: Sequence[TrainingRow]) -> dict[str, float]:
        step = self.version + 1
        plan = self._batcher.plan(rows, self._channel.size)
        with self._channel.command(f"step {step}"):
            self._channel.send("step", payloads=[_rank_payload(rows, packs, step) for packs in plan[1:]])
            metrics = self._local.step_packs(self._batcher.planned(rows, plan[0]))
        if self._local.step_vectors:
            orders = [[index for pack in packs for index in pack] for packs in plan]
            self.trainer_logprobs = logprobs_by_row(rows, orders, self._local.step_vectors)
        return metrics

    def logprobs_of(self, rollouts: Sequence[Rollout]) -> list[Float32Array]:
        if not self._local.is_sharded:  # rank 0 alone, beside the heartbeats for the other ranks
            return self._local.logprobs_of(rollouts)
        with self._channel.command("scoring of rollouts"):
            data = to_message(encode_rollouts("", rollouts))
            self._channel.send("score", payloads=[({}, data)] * (self._channel.size - 1))
            return self._local.logprobs_of(rollouts)

    @property
    def rescorer(self) -> Rescorer | None:
        return self._local.rescorer

    def layout(self) -> WeightLayout:
        return self._local.layout()

    def weights(self, targets: Mapping[str, Tensor]) -> None:
        if not self._local.is_sharded:
            return self._local.weights(targets)
        with self._channel.command("gathering of weights"):
            self._channel.send("weights")
            self._local.weights(targets)

    def state(self) -> LiveState:
        """The state of rank 0; the other ranks begin to write theirs."""
        if not self._local.is_sharded:
            return self._local.state()
        with self._channel.command("state of the ranks"):
            self._channel.send("state", prefix=checkpoint_prefix(self.version, self._epoch))
            state = self._local.state()
        if self._files is not None:
            state.written_elsewhere = self._files.wait
        return state

    def load_state(self, files: Iterable[Mapping[str, Tensor]], values: Mapping[str, Any]) -> None:
        self._send_command("load", values=dict(values))
        with closing(self._sent(files)) as sent, translate_rank_errors("loading of a checkpoint"):
            self._local.load_state(sent, values)

    def adopt_weights(self, files: Iterable[Mapping[str, Tensor]]) -> None:
        self._send_command("adopt")
        with closing(self._sent(files)) as sent, translate_rank_errors("loading of committed weights"):
            self._local.adopt_weights(sent)

    def _send_command(self, command: str, **values: Any) -> None:
        with self._channel.command(command):
            self._channel.send(command, **values)

    def _sent(self, files: Iterable[Mapping[str, Tensor]]) -> Generator[Mapping[str, Tensor]]:
        """The files, each sent to the other ranks before it is used here. While rank 0 reads a file, the others get
        heartbeats."""
        try:
            for tensors in files:
                with self._channel.command("sending of tensors"):
                    shapes = {name: (str(tensor.dtype), list(tensor.shape)) for name, tensor in tensors.items()}
                    self._channel.send("tensors", shapes=shapes)
                    _broadcast(self._channel, tensors)
                yield tensors
                del tensors  # before the next file is read
        except BaseException:
            with suppress(RankLost):  # the cause is more useful
                self._send_command("incomplete")
            raise
        self._send_command("complete")


def _broadcast(channel: RankChannel, tensors: Mapping[str, Tensor]) -> None:
    for tensor in tensors.values():
        channel.broadcast(tensor.contiguous())


class IncompleteFiles(PipelineRLError):
    """Rank 0 could not read all files; it may send others."""


def _received(channel: RankChannel) -> Iterator[dict[str, Tensor]]:
    """What rank 0's `_sent` sends, on another rank."""
    while True:
        values, _ = channel.receive()
        if values["command"] == "complete":
            return
        if values["command"] == "incomplete":
            raise IncompleteFiles("rank 0 could not read all files")
        shapes: dict[str, tuple[str, list[int]]] = values["shapes"]
        tensors = {name: torch.empty(shape, dtype=_DTYPES[dtype]) for name, (dtype, shape) in shapes.items()}
        _broadcast(channel, tensors)
        yield tensors
        del tensors


def serve(
    channel: RankChannel,
    build: Callable[[RunConfig], tuple[RankLearner, PackBatcher]],
    write: Callable[[str, LiveState], None],
) -> None:
    """Command loop of a rank other than 0: execute commands of rank 0 until the command `stop`.

    write: begins to write a state below a prefix.
    """
    learner: RankLearner | None = None
    batcher: PackBatcher | None = None
    while True:
        values, data = channel.receive()
        command = values["command"]
        if command == "stop":
            return
        if command == "build":
            config = build_config(values["config"])
            load_own_functions(config.loss, values["code"])
            with translate_rank_errors("loading of the model"):
                learner, batcher = build(config)
        elif learner is None or batcher is None:
            raise ValueError(f"{command} before build")
        elif command == "state":
            write(values["prefix"], learner.state())
        else:
            with translate_rank_errors(command):
                _execute(command, values, data, learner, batcher, channel)


def _execute(
    command: str,
    values: Mapping[str, Any],
    data: memoryview,
    learner: RankLearner,
    batcher: PackBatcher,
    channel: RankChannel,
) -> None:
    match command:
        case "step":
            rows = decode_batch(from_message(data, BATCH_SCHEMA)) if data else []
            with suppress(TrainingDiverged):  # raised on all ranks; rank 0 decides what follows
                learner.step_packs(batcher.planned(rows, values["packs"]))
        case "score":
            learner.logprobs_of(decode_rollouts(from_message(data, ROLLOUT_SCHEMA)))
        case "weights":
            learner.weights({})
        case "load":
            with suppress(IncompleteFiles):
                learner.load_state(_received(channel), values["values"])
        case "adopt":
            with suppress(IncompleteFiles):
                learner.adopt_weights(_received(channel))
        case _:
            raise ValueError(f"unknown command {command}")


def _rank_payload(rows: Sequence[TrainingRow], packs: Sequence[Sequence[int]], step: int) -> Payload:
    """What one rank receives for a step: its packs as indices into its own rows, and these rows."""
    chosen = [index for indices in packs for index in indices]
    positions = {index: position for position, index in enumerate(chosen)}
    values = {"packs": [[positions[index] for index in indices] for indices in packs]}
    own = [rows[index] for index in chosen]
    return values, to_message(encode_batch("", step, own)) if own else NO_BYTES
