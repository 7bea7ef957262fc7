"""The code inside vLLM's processes: a weight-transfer engine that loads a staged, verified file or a broadcast.

Registered by the entry point `vllm.general_plugins`, which vLLM calls in its engine core and in every worker. This
module verifies nothing: an update that fails half-way leaves the engine core with unknown weights, so the caller must
have checked names, shapes and checksum before.
"""

import contextlib
import functools
import os
import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from safetensors import safe_open
from torch import distributed as dist
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.distributed.weight_transfer.nccl_common import NCCLWeightTransferInitInfo
from vllm.distributed.weight_transfer.nccl_engine import NCCLWeightTransferEngine, NCCLWeightTransferUpdateInfo
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

from pipelinerl_core.engine.vllm.names import FileNames, file_shapes
from pipelinerl_core.interfaces import GO, member_key
from pipelinerl_core.parent_death import die_with_parent

BACKEND = "pipelinerl"
"""Name of the weight-transfer backend."""
DIE_WITH_PARENT = "PIPELINERL_VLLM_DIES_WITH_PARENT"
"""Set in the environment of an engine core that must not outlive the process that started it."""


@dataclass
class GroupInit(WeightTransferInitInfo):  # type: ignore[misc]
    """The broadcast group to join (interfaces.BroadcastGroup)."""

    host: str
    port: int
    nccl_id: str
    first_rank: int
    """Rank of the first worker of this engine."""
    world_size: int
    deadline_seconds: float


@dataclass
class Update(WeightTransferUpdateInfo):  # type: ignore[misc]
    """One update: the path of a safetensors file that every worker can read, or the layout of a broadcast."""

    path: str = ""
    names: list[str] = field(default_factory=list)
    dtype_names: list[str] = field(default_factory=list)
    shapes: list[list[int]] = field(default_factory=list)


Load = Callable[[Iterable[tuple[str, torch.Tensor]]], None]


class Membership:
    """One worker's place in a broadcast group. The worker joins on a thread and generates meanwhile."""

    def __init__(self, init: GroupInit, rank: int, load: Load, connect_nccl: Callable[[], Any]) -> None:
        """load: loads tensors into the model. connect_nccl: returns vLLM's own receiver, connected."""
        self._init = init
        self._rank = rank
        self._load = load
        self._connect_nccl = connect_nccl
        self._gloo: Any = None
        self._nccl: Any = None
        self._error: Exception | None = None
        self._is_left = False
        self._thread = threading.Thread(target=self._join, name="join-group", daemon=True)
        self._thread.start()

    def _join(self) -> None:
        """Wait until all members are there, and connect: connecting to members that are missing cannot be ended."""
        init, deadline = self._init, timedelta(seconds=self._init.deadline_seconds)
        try:
            store: Any = dist.TCPStore(  # type: ignore[attr-defined]
                init.host, init.port, init.world_size, is_master=False, timeout=deadline
            )
            store.set(member_key("here", self._rank), "")
            store.wait([GO], deadline)
            try:
                if init.nccl_id:
                    self._nccl = self._connect_nccl()
                else:
                    self._gloo = dist.ProcessGroupGloo(store, self._rank, init.world_size, deadline)
            except Exception:
                with contextlib.suppress(RuntimeError):  # the trainer has given the group up
                    store.set(member_key("failed", self._rank), "")
                raise
            store.set(member_key("joined", self._rank), "")
        except Exception as error:  # noqa: BLE001 - told by the first broadcast, which the trainer then never sends
            self._error = error
        if self._is_left:
            self.leave()

    def receive(self, update: Update) -> None:
        """Receive a broadcast into the model. Raises RuntimeError if the worker has not joined."""
        self._thread.join(self._init.deadline_seconds)
        if self._gloo is not None:
            self._load(self._tensors(update))
        elif self._nccl is not None:
            names, dtypes, shapes = update.names, update.dtype_names, update.shapes
            self._nccl.receive_weights(NCCLWeightTransferUpdateInfo(names=names, dtype_names=dtypes, shapes=shapes))
        else:
            reason = self._error or "it still waits"
            raise RuntimeError(f"the worker has not joined the group of the broadcast: {reason}")

    def _tensors(self, update: Update) -> Iterator[tuple[str, torch.Tensor]]:
        """Each tensor as it arrives over gloo, from weights.broadcast.GlooSender."""
        for name, dtype_name, shape in zip(update.names, update.dtype_names, update.shapes, strict=True):
            tensor = torch.empty(shape, dtype=getattr(torch, dtype_name))
            self._gloo.broadcast([tensor], dist.BroadcastOptions()).wait()
            yield name, tensor

    def leave(self) -> None:
        """Free sockets and communicator, at once or when the join has ended."""
        self._is_left = True
        self._gloo = None
        nccl, self._nccl = self._nccl, None
        if nccl is not None:
            nccl.shutdown()


class TransferEngine(WeightTransferEngine[GroupInit, Update]):  # type: ignore[misc]
    """Loads weights in checkpoint format, layer by layer: from a file, from gloo, or by vLLM's own NCCL engine.

    `model.load_weights` alone fails on the CPU backend, which repacks weights once they are loaded and frees the
    originals; the layerwise reload restores the parameters of one layer at a time, loads and repacks it.
    """

    init_info_cls = GroupInit
    update_info_cls = Update
    _membership: Membership | None = None

    def init_transfer_engine(self, init_info: GroupInit) -> None:
        """Leave the previous broadcast group and begin to join another one."""
        self.shutdown()
        parallel = self.parallel_config
        worker = parallel.data_parallel_index * parallel.world_size + parallel.rank

        loader: Any = SimpleNamespace(load_weights=self._load)

        def connect_nccl() -> NCCLWeightTransferEngine:
            torch.accelerator.set_device_index(self.device.index or 0)  # of this thread
            nccl = NCCLWeightTransferEngine(self.config, self.vllm_config, self.device, loader)
            nccl.init_transfer_engine(
                NCCLWeightTransferInitInfo(
                    nccl_unique_id_b64=init_info.nccl_id,
                    rank_offset=init_info.first_rank,
                    world_size=init_info.world_size,
                    packed=True,
                )
            )
            return nccl

        self._membership = Membership(init_info, init_info.first_rank + worker, self._load, connect_nccl)

    def start_weight_update(self) -> None:
        """Prepare every layer for loading."""
        initialize_layerwise_reload(self.model)

    def update_weights(self, update_info: dict[str, object]) -> None:
        """Load, and wait for the GPU if there is one (the base class also synchronizes a CPU, which fails)."""
        self.receive_weights(self.parse_update_info(update_info))
        if self.device.type != "cpu":
            torch.accelerator.synchronize()

    def receive_weights(self, update_info: Update) -> None:
        """Feed the tensors to the model's own loader, which shards, fuses and casts them."""
        if update_info.path:
            self._load(_tensors(update_info.path, self.device))
        elif self._membership is not None:
            self._membership.receive(update_info)
        else:
            raise RuntimeError("a broadcast was announced to a worker that is in no broadcast group")

    def _load(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Load tensors with the names of the learner or of the model's files."""
        self.model.load_weights(self._names.converted(tensors))

    @functools.cached_property
    def _names(self) -> FileNames:
        model = Path(self.vllm_config.model_config.model)
        return FileNames(model, file_shapes(model))

    def finish_weight_update(self) -> None:
        """Finish the layers that wait for tensors of other layers."""
        finalize_layerwise_reload(self.model, self.model_config)
        if self.device.type == "cpu":
            _repack(self.model)

    def shutdown(self) -> None:
        """Leave the broadcast group."""
        membership, self._membership = self._membership, None
        if membership is not None:
            membership.leave()


def _repack(model: torch.nn.Module) -> None:
    """Repack the weights of heads and experts again, which the layerwise reload does not do on a CPU.

    A head computes with a repacked copy of its weight; the reload skips a head that is tied to the embedding, because
    the head's weight is the embedding's. Experts are repacked in place at the first load only. Without this function
    tokens would silently be sampled with the old head, and with experts that are read in the wrong order.
    """
    for layer in model.modules():
        method = getattr(layer, "quant_method", None)
        if isinstance(layer, ParallelLMHead):
            layer.quant_method.process_weights_after_loading(layer)
        elif (kernel := getattr(method, "moe_kernel", None)) is not None:
            kernel.fused_experts.process_weights_after_loading(layer)


def _tensors(path: str, device: torch.device) -> Iterator[tuple[str, torch.Tensor]]:
    """Names and tensors of a file, memory-mapped."""
    with safe_open(path, framework="pt", device=str(device)) as file:
        for name in file.keys():  # noqa: SIM118 - not a dict
            yield name, file.get_tensor(name)


def register() -> None:
    """Entry point; vLLM calls it once in each of its processes, and may call it twice in one."""
    if BACKEND not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(BACKEND, TransferEngine)
    parent = os.environ.get(DIE_WITH_PARENT)
    if parent is not None and parent != str(os.getpid()):
        die_with_parent()
