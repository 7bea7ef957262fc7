"""The learner of a run: alone in this process, or rank 0 of several that are started here and end with it."""

import logging
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from pipelinerl_core.batching.collate import PackBatcher
from pipelinerl_core.config import RunConfig
from pipelinerl_core.config.model_path import resolve_model_path
from pipelinerl_core.errors import ConfigError
from pipelinerl_core.interfaces import Learner
from pipelinerl_core.roles.device import model_device
from pipelinerl_core.roles.process import leave
from pipelinerl_core.roles.rank_channel import RankChannel, join_ranks
from pipelinerl_core.roles.ranked_learner import RankedLearner, RankLearner
from pipelinerl_core.training.deepspeed_learner import DeepSpeedLearner
from pipelinerl_core.training.learner import TorchLearner
from pipelinerl_core.training.model import checkpoint_activations, load_model, load_reference
from pipelinerl_core.training.ranks import ALONE, Ranks

logger = logging.getLogger(__name__)

HOST = "127.0.0.1"
# After a rank has ended, the others may still say why they cannot go on.
_GRACE_SECONDS = 5.0
_STOP_SECONDS = 5.0
_POLL_SECONDS = 0.5


@contextmanager
def open_learners(ranks: int) -> Iterator["Learners"]:
    """Builds learners; the other ranks, if there are any, are gone when this ends."""
    learners = Learners(ranks)
    try:
        yield learners
    finally:
        learners.close()


class Learners:
    """Builds learners on this process and, with several ranks, on processes that it starts."""

    def __init__(self, ranks: int) -> None:
        self._size = ranks
        self._channel: RankChannel | None = None
        self._processes: list[subprocess.Popen[bytes]] = []
        self._named: set[int] = set()
        self._closing = threading.Event()

    def build(self, config: RunConfig) -> Learner:
        """The learner on the run's starting model, version 0. Raises ConfigError for what cannot be loaded."""
        if self._size == 1 and config.learner.kind == "torch":
            return build_alone(config)
        if self._channel is None:
            self._channel = self._start(config)
        self._channel.tell("build", config=config.model_dump(mode="json"))
        local, batcher = build_rank(config, Ranks(0, self._size))
        return RankedLearner(local, self._channel, batcher)

    def close(self) -> None:
        """End the other ranks."""
        self._closing.set()
        if self._channel is None:
            return
        self._name_the_dead()
        if all(process.poll() is None for process in self._processes):
            with suppress(RuntimeError):  # they are on their way out already
                self._channel.close()
        deadline = time.monotonic() + _STOP_SECONDS
        for process in self._processes:
            with suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, deadline - time.monotonic()))
            process.kill()
            process.wait()
        self._channel = None
        dist.destroy_process_group()

    def _start(self, config: RunConfig) -> RankChannel:
        device = rank_device(config, 0, self._size)
        seconds = config.trainer.collective_seconds
        store = TCPStore(
            HOST, 0, self._size, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=seconds)
        )
        for rank in range(1, self._size):
            self._processes.append(_start_rank(rank, self._size, store.port, device, seconds))
        threading.Thread(target=self._watch, name="ranks", daemon=True).start()
        return join_ranks(0, self._size, store=store, device=device, collective_seconds=seconds)

    def _watch(self) -> None:
        """End this process soon after any of the others: without it no step can be taken."""
        while not self._closing.wait(_POLL_SECONDS):
            code = self._name_the_dead()
            if code is not None:
                if not self._closing.wait(_GRACE_SECONDS):
                    leave(code)
                return

    def _name_the_dead(self) -> int | None:
        """Log each rank that has ended, once; returns the exit code for this process, None while all live."""
        worst = None
        for rank, process in enumerate(self._processes, start=1):
            code = process.poll()
            if code is None:
                continue
            worst = max(code, 1)
            if rank not in self._named:
                self._named.add(rank)
                how = f"was killed by signal {-code}" if code < 0 else f"ended with code {code}"
                logger.error("rank %d of %d %s; the step in the making is not committed", rank, self._size, how)
        return worst


def _start_rank(rank: int, size: int, port: int, device: torch.device, seconds: float) -> subprocess.Popen[bytes]:
    # The kernel ends it with the thread that starts it: this is the main thread, which lives as long as the process.
    command = [sys.executable, "-m", "pipelinerl_core.roles.trainer_rank", "--rank", str(rank), "--size", str(size)]
    command += ["--host", HOST, "--port", str(port), "--device", device.type, "--seconds", str(seconds)]
    return subprocess.Popen([*command, "--parent-pid", str(os.getpid())], stdin=subprocess.DEVNULL)


def rank_device(config: RunConfig, rank: int, size: int) -> torch.device:
    """Each rank has a GPU of its own, where the learner is on one."""
    device = model_device(config)
    if device.type != "cuda" or size == 1:
        return device
    if torch.cuda.device_count() < size:
        raise ConfigError(
            f"trainer.ranks={size}: this host has {torch.cuda.device_count()} GPUs, and each rank needs one. Set "
            "trainer.ranks lower"
        )
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    return device


def build_alone(config: RunConfig) -> TorchLearner:
    """The torch learner of one process on the run's starting model."""
    return _build_torch(config, model_device(config), ALONE)[0]


def build_rank(config: RunConfig, ranks: Ranks) -> tuple[RankLearner, PackBatcher]:
    """The learner of one rank, and what cuts its rows into packs; torch's process group is there."""
    device = rank_device(config, ranks.rank, ranks.size)
    if config.learner.kind == "torch":
        return _build_torch(config, device, ranks)
    model, reference = _load(config, device)
    batcher = PackBatcher(config.trainer.pack_tokens, config.trainer.packing)
    return DeepSpeedLearner(model, config, batcher=batcher, ranks=ranks, reference=reference), batcher


def _build_torch(config: RunConfig, device: torch.device, ranks: Ranks) -> tuple[TorchLearner, PackBatcher]:
    model, reference = _load(config, device)
    threads = min(config.trainer_threads, os.cpu_count() or 1)  # any number gives the same bits
    threads = threads if device.type == "cpu" else 1
    batcher = PackBatcher(config.trainer.pack_tokens, config.trainer.packing)
    return TorchLearner(model, config, batcher=batcher, threads=threads, reference=reference, ranks=ranks), batcher


def _load(config: RunConfig, device: torch.device) -> tuple[object, object]:
    path = resolve_model_path(config.model.path)
    if path is None:
        raise ConfigError(f"model.path={config.model.path}: not built yet. Run `pipelinerl prepare`")
    model = load_model(Path(path), config.model.dtype, device)
    reference = load_reference(config.loss.ref_model or path, model) if config.loss.kl_coefficient else None
    if config.learner.activation_checkpointing:
        checkpoint_activations(model)
    return model, reference
