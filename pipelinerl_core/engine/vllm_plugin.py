"""What runs inside vLLM's processes: a weight-transfer engine that loads a staged, verified file.

Registered by the entry point `vllm.general_plugins`, which vLLM calls in its engine core and in every worker. Nothing
is verified here: an update that fails half-way leaves an engine core of unknown weights, so whoever calls it has
checked names, shapes and checksum before.
"""

import ctypes
import os
import signal
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from safetensors import safe_open
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

BACKEND = "pipelinerl"
"""Name of the weight-transfer backend."""
DIE_WITH_PARENT = "PIPELINERL_VLLM_DIES_WITH_PARENT"
"""Set in the environment of an engine core that must not outlive the process that started it."""
_PR_SET_PDEATHSIG = 1


@dataclass
class FileInit(WeightTransferInitInfo):  # type: ignore[misc]
    """Nothing to agree on: every update names its file."""


@dataclass
class FileUpdate(WeightTransferUpdateInfo):  # type: ignore[misc]
    """One update: a safetensors file that every worker can read."""

    path: str


class FileTransferEngine(WeightTransferEngine[FileInit, FileUpdate]):  # type: ignore[misc]
    """Loads a file in checkpoint format, layer by layer.

    `model.load_weights` alone fails on the CPU backend, which repacks weights once they are loaded and frees the
    originals; the layerwise reload restores the parameters of one layer at a time, loads and repacks it.
    """

    init_info_cls = FileInit
    update_info_cls = FileUpdate

    def init_transfer_engine(self, init_info: FileInit) -> None:
        """Nothing to set up."""

    def start_weight_update(self) -> None:
        """Make every layer ready to be loaded anew."""
        initialize_layerwise_reload(self.model)

    def update_weights(self, update_info: dict[str, object]) -> None:
        """Load, and wait for the device where there is one (the base class would ask the CPU, which refuses)."""
        self.receive_weights(self.parse_update_info(update_info))
        if self.device.type != "cpu":
            torch.accelerator.synchronize()

    def receive_weights(self, update_info: FileUpdate) -> None:
        """Feed the tensors of the file to the model's own loader, which shards, fuses and casts them."""
        self.model.load_weights(_tensors(update_info.path, self.device))

    def finish_weight_update(self) -> None:
        """Finish the layers that wait for others."""
        finalize_layerwise_reload(self.model, self.model_config)
        if self.device.type == "cpu":
            _repack_heads(self.model)

    def shutdown(self) -> None:
        """Nothing to release."""


def _repack_heads(model: torch.nn.Module) -> None:
    """Renew the copy of its weight that a head keeps on a CPU, repacked.

    The layerwise reload passes over a head that is tied to the embedding: its weight comes with the embedding, and
    the copy would stay that of the old version, without an error.
    """
    for layer in model.modules():
        if isinstance(layer, ParallelLMHead):
            layer.quant_method.process_weights_after_loading(layer)


def _tensors(path: str, device: torch.device) -> Iterator[tuple[str, torch.Tensor]]:
    """Memory-mapped: pages are read as they are copied."""
    with safe_open(path, framework="pt", device=str(device)) as file:
        for name in file.keys():  # noqa: SIM118 - not a dict
            yield name, file.get_tensor(name)


def register() -> None:
    """Entry point; vLLM calls it once in each of its processes, and may call it twice in one."""
    if BACKEND not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(BACKEND, FileTransferEngine)
    parent = os.environ.get(DIE_WITH_PARENT)
    if parent is not None and parent != str(os.getpid()):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
