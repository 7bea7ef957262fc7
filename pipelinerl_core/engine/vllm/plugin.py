"""The code inside vLLM's processes: a weight-transfer engine that loads a staged, verified file or a broadcast.

Registered by the entry point `vllm.general_plugins`, which vLLM calls in its engine core and in every worker. This
module verifies nothing: an update that fails half-way leaves the engine core with unknown weights, so the caller must
have checked names, shapes and checksum before.
"""

import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import timedelta
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

from pipelinerl_core.parent_death import die_with_parent

BACKEND = "pipelinerl"
"""Name of the weight-transfer backend."""
DIE_WITH_PARENT = "PIPELINERL_VLLM_DIES_WITH_PARENT"
"""Set in the environment of an engine core that must not outlive the process that started it."""


@dataclass
class GroupInit(WeightTransferInitInfo):  # type: ignore[misc]
    """The broadcast group to join (interfaces.BroadcastGroup)."""

    ticket: str
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


class GlooReceiver:
    """Receives the broadcasts of weights.broadcast.GlooSender."""

    def __init__(self, init: GroupInit, rank: int) -> None:
        host, _, port = init.ticket.removeprefix("gloo:").rpartition(":")
        deadline = timedelta(seconds=init.deadline_seconds)
        self._store: Any = dist.TCPStore(  # type: ignore[attr-defined]
            host, int(port), init.world_size, is_master=False, timeout=deadline
        )
        self._store.set(f"here/{rank}", "")  # weights.broadcast.gloo_receiver_key
        self._group: Any = dist.ProcessGroupGloo(self._store, rank, init.world_size, deadline)

    def tensors(self, update: Update) -> Iterator[tuple[str, torch.Tensor]]:
        """Each tensor as it arrives."""
        for name, dtype_name, shape in zip(update.names, update.dtype_names, update.shapes, strict=True):
            tensor = torch.empty(shape, dtype=getattr(torch, dtype_name))
            self._group.broadcast([tensor], dist.BroadcastOptions()).wait()
            yield name, tensor


class TransferEngine(WeightTransferEngine[GroupInit, Update]):  # type: ignore[misc]
    """Loads weights in checkpoint format, layer by layer: from a file, from gloo, or by vLLM's own NCCL engine.

    `model.load_weights` alone fails on the CPU backend, which repacks weights once they are loaded and frees the
    originals; the layerwise reload restores the parameters of one layer at a time, loads and repacks it.
    """

    init_info_cls = GroupInit
    update_info_cls = Update
    _gloo: GlooReceiver | None = None
    _nccl: Any = None

    def init_transfer_engine(self, init_info: GroupInit) -> None:
        """Leave the previous broadcast group and join a new one."""
        self.shutdown()
        if init_info.ticket.startswith("gloo:"):
            parallel = self.parallel_config
            worker = parallel.data_parallel_index * parallel.world_size + parallel.rank
            self._gloo = GlooReceiver(init_info, init_info.first_rank + worker)
            return
        nccl = NCCLWeightTransferEngine(self.config, self.vllm_config, self.device, self.model)
        nccl.init_transfer_engine(
            NCCLWeightTransferInitInfo(
                nccl_unique_id_b64=init_info.ticket.removeprefix("nccl:"),
                rank_offset=init_info.first_rank,
                world_size=init_info.world_size,
                packed=True,
            )
        )
        self._nccl = nccl

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
            self.model.load_weights(_tensors(update_info.path, self.device))
        elif self._gloo is not None:
            self.model.load_weights(self._gloo.tensors(update_info))
        elif self._nccl is not None:
            names, dtypes, shapes = update_info.names, update_info.dtype_names, update_info.shapes
            self._nccl.receive_weights(NCCLWeightTransferUpdateInfo(names=names, dtype_names=dtypes, shapes=shapes))
        else:
            raise RuntimeError("a broadcast was announced to a worker that is in no broadcast group")

    def finish_weight_update(self) -> None:
        """Finish the layers that wait for tensors of other layers."""
        finalize_layerwise_reload(self.model, self.model_config)
        if self.device.type == "cpu":
            _repack_heads(self.model)

    def shutdown(self) -> None:
        """Leave the broadcast group."""
        self._gloo = None
        nccl, self._nccl = self._nccl, None
        if nccl is not None:
            nccl.shutdown()


def _repack_heads(model: torch.nn.Module) -> None:
    """Repack the weights of the heads again; on a CPU a head computes with a repacked copy of its weight.

    The layerwise reload skips a head that is tied to the embedding, because the head's weight is the embedding's.
    Without this function the repacked copy would silently keep the old version.
    """
    for layer in model.modules():
        if isinstance(layer, ParallelLMHead):
            layer.quant_method.process_weights_after_loading(layer)


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
