"""Builds the learner of a run: in this process alone, or as rank 0 of several ranks that this process starts."""

import os
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed import Store  # type: ignore[attr-defined]

from pipelinerl_core.algo.adapters import AdapterNote
from pipelinerl_core.batching.collate import PackBatcher
from pipelinerl_core.config import RunConfig
from pipelinerl_core.errors import ConfigError, RankLost
from pipelinerl_core.interfaces import Learner, ObjectStore
from pipelinerl_core.models.paths import require_model
from pipelinerl_core.roles.runtime.device import model_device
from pipelinerl_core.roles.runtime.process import leave
from pipelinerl_core.roles.trainer.rank_channel import RankChannel, join_ranks
from pipelinerl_core.roles.trainer.rank_files import RankFiles
from pipelinerl_core.roles.trainer.rank_processes import RANK_STOP_SECONDS, RankProcesses
from pipelinerl_core.roles.trainer.ranked_learner import RankedLearner, RankLearner
from pipelinerl_core.roles.trainer.rendezvous import announce_rendezvous, open_rendezvous, own_address, refusal_of
from pipelinerl_core.run.local_files import weights_digest
from pipelinerl_core.run.records import RendezvousRecord
from pipelinerl_core.training.deepspeed_learner import DeepSpeedLearner, divided_among
from pipelinerl_core.training.learner import TorchLearner
from pipelinerl_core.training.lora import add_adapters, published_weights, share_frozen
from pipelinerl_core.training.model import checkpoint_activations, load_model, load_reference
from pipelinerl_core.training.out_of_memory import explain_out_of_memory
from pipelinerl_core.training.own_functions import loaded_texts
from pipelinerl_core.training.ranks import ALONE, Ranks
from pipelinerl_core.weights.base import BaseWeights

# Time between the failure of a rank and the end of this process, in which the other ranks can log their errors.
_GRACE_SECONDS = 5.0
_POLL_SECONDS = 0.5
# A connection can break shortly before the exit of its process is visible.
_REAP_SECONDS = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Spread:
    """Ranks on several hosts; each host other than rank 0's runs roles/trainer/node.py."""

    nodes: int
    store: ObjectStore
    """The run's store, in which rank 0 publishes its address."""
    epoch: int
    """Epoch of the trainer."""


@contextmanager
def open_learners(run_url: str, ranks: int, spread: Spread | None = None) -> Iterator["Learners"]:
    """A builder of learners; the other ranks end with the block. Without `spread` all ranks are on this host, and no
    checkpoint can be written."""
    with TemporaryDirectory(prefix="pipelinerl-ranks-") as directory:
        epoch = 0 if spread is None else spread.epoch
        spread = spread if spread is not None and spread.nodes > 1 else None
        learners = Learners(ranks, spread, Path(directory), RankProcesses(run_url), epoch)
        try:
            yield learners
        except BaseException as error:
            learners.close(at_once=True)  # a rank that hangs cannot receive a command
            if isinstance(error, RankLost) and (reason := learners.refusal()):
                raise ConfigError(reason) from None
            raise
        learners.close()


class Learners:
    """Builds learners in this process and, with several ranks, in processes that it starts."""

    def __init__(
        self, ranks: int, spread: Spread | None, directory: Path, processes: RankProcesses, epoch: int = 0
    ) -> None:
        self._ranks = Ranks(0, ranks, None if spread is None else ranks // spread.nodes)
        self._spread = spread
        self._directory = directory
        self._channel: RankChannel | None = None
        self._rendezvous: Store | None = None
        self._processes = processes
        self._epoch = epoch
        self._closing = threading.Event()

    def build(self, config: RunConfig) -> Learner:
        """The learner on the run's starting model, version 0. Raises ConfigError if the model cannot be loaded."""
        if self._ranks.size == 1 and not config.learner.splits_state:
            return build_alone(config)
        if self._channel is None:
            self._channel = self._start(config)
        with self._channel.command("loading of the model"):
            self._channel.send("build", config=config.model_dump(mode="json"), code=loaded_texts())
            local, batcher = build_rank(config, self._ranks)
        files = None if self._rendezvous is None else RankFiles(self._rendezvous, self._ranks.size, self._is_ending)
        return RankedLearner(local, self._channel, batcher, files=files, epoch=self._epoch)

    def _is_ending(self) -> bool:
        return self._closing.is_set() or (self._channel is not None and self._channel.is_lost)

    def close(self, *, at_once: bool = False) -> None:
        """End the other ranks: by a stop command, or at once by killing them."""
        self._closing.set()
        if self._ranks.size > 1 and at_once:
            self._processes.log_failures(_REAP_SECONDS)
        if self._channel is not None and not at_once and self._processes.log_failures() is None:
            with suppress(RuntimeError):  # the ranks are already ending
                self._channel.close()
        self._processes.stop(0.0 if at_once else RANK_STOP_SECONDS)
        if self._channel is not None and not at_once:  # else this call would wait for ranks that have ended
            dist.destroy_process_group()
        self._channel = None

    def refusal(self) -> str:
        """The text of a ConfigError with which another rank has ended; empty if there is none."""
        return "" if self._rendezvous is None else refusal_of(self._rendezvous)

    def _start(self, config: RunConfig) -> RankChannel:
        ranks, spread, seconds = self._ranks, self._spread, config.trainer.collective_seconds
        device = rank_device(config, ranks)
        store, where = open_rendezvous(
            ranks.size, seconds, directory=self._directory, host=None if spread is None else own_address(config),
            sends_weights=config.weights.is_broadcast and config.placement.kind == "work_pools",
        )  # fmt: skip
        self._rendezvous = store
        rendezvous = RendezvousRecord(
            epoch=self._epoch, where=where, size=ranks.size, per_node=ranks.local_size,
            device=device.type, seconds=seconds,
        )  # fmt: skip
        if spread is not None:
            announce_rendezvous(spread.store, rendezvous)
        self._processes.start(range(1, ranks.local_size), rendezvous)
        threading.Thread(target=self._watch, name="ranks", daemon=True).start()
        return join_ranks(0, ranks.size, store=store, device=device, collective_seconds=seconds)

    def _watch(self) -> None:
        """End this process soon after any other rank has failed: no step can be trained without the rank."""
        while not self._closing.wait(_POLL_SECONDS):
            code = self._processes.log_failures()
            if code is not None:
                if not self._closing.wait(_GRACE_SECONDS):
                    if reason := self.refusal():  # the last line of the log is what the supervisor reports
                        print(reason, file=sys.stderr)  # noqa: T201
                    leave(code)
                return


def rank_device(config: RunConfig, ranks: Ranks) -> torch.device:
    """Device of this rank: one GPU per rank if the learner is on GPUs. Raises ConfigError if there are too few."""
    device = model_device(config)
    if device.type != "cuda" or ranks.size == 1:
        return device
    if torch.cuda.device_count() < ranks.local_size:
        raise ConfigError(
            f"trainer.ranks={ranks.size}: this host has {torch.cuda.device_count()} GPUs, and each of its "
            f"{ranks.local_size} ranks needs one. Set trainer.ranks lower, or placement.trainer_nodes higher"
        )
    device = torch.device("cuda", ranks.local_rank)
    torch.cuda.set_device(device)
    return device


def build_alone(config: RunConfig) -> RankLearner:
    """The learner of one process, without a process group, on the run's starting model."""
    return build_rank(config, ALONE)[0]


def build_rank(config: RunConfig, ranks: Ranks) -> tuple[RankLearner, PackBatcher]:
    """The learner of one rank and its pack batcher. Unless the rank is alone, torch's process group must exist."""
    device, batcher = rank_device(config, ranks), pack_batcher(config)
    build = LEARNERS[config.learner.kind]
    with explain_out_of_memory(config, "loading of the model"):
        models = _load(config, device, ranks)._asdict()
        return build(**models, config=config, batcher=batcher, ranks=ranks), batcher


def pack_batcher(config: RunConfig) -> PackBatcher:
    """The batcher of a run's rows."""
    return PackBatcher(
        config.trainer.pack_tokens,
        config.trainer.packing,
        shares_prompts=config.trainer.share_prompts,
        skips_backward=config.skips_backward,
        skips_forward=config.skips_forward,
    )


def _build_torch(config: RunConfig, **parts: Any) -> TorchLearner:
    threads = min(config.trainer_threads, os.cpu_count() or 1)  # the number of threads does not change the result
    return TorchLearner(config=config, threads=threads if model_device(config).type == "cpu" else 1, **parts)


LEARNERS: Mapping[str, Callable[..., RankLearner]] = MappingProxyType(
    {"torch": _build_torch, "deepspeed": DeepSpeedLearner}
)
"""learner.kind -> builder of the learner of one rank, with the arguments of BaseLearner. To add a learner: a class in
training/, its section in config/learners.py, and its line here."""


class _Loaded(NamedTuple):
    """The models of a learner. Each field has the name of the argument of BaseLearner that takes it."""

    model: object
    reference: object
    """None without KL term."""
    teacher: object
    """None without loss.teacher."""
    note: AdapterNote | None
    """None without weights.content=adapters."""


def _load(config: RunConfig, device: torch.device, ranks: Ranks) -> _Loaded:
    path = require_model(config.model.path)
    is_divided = config.learner.zero_stage == 3
    dividing = None
    if is_divided:  # rank 0 reads the weights of all ranks, and each rank the rest of the model
        files = torch.tensor(int(weights_digest(path)[:15], 16), device=device)
        _require_equal_digests(ranks, "model.path", files)
        dividing = divided_among(ranks, config, device)
    model = load_model(path, config.dtype, device, config.learner.attention, dividing=dividing)
    reference = _reference(config, path, model) if config.loss.kl_coefficient else None
    teacher = None
    if config.loss.teacher:
        teacher = load_reference(
            require_model(config.loss.teacher), model, config.learner.attention, key="loss.teacher"
        )
    _require_equal(
        ranks, {"model.path": None if is_divided else model, "loss.ref_model": reference, "loss.teacher": teacher}
    )
    if config.learner.lora_rank:
        add_adapters(model, config.learner, config.seed)
    if config.checkpoints_activations(device.type):
        checkpoint_activations(model)
    note = _adapter_note(config, path, model, ranks) if config.weights.content == "adapters" else None
    return _Loaded(model, reference, teacher, note)


def _require_equal(ranks: Ranks, models: Mapping[str, Any]) -> None:
    """Raises ConfigError on every rank if a rank has loaded other weights than rank 0: its host has other files."""
    if ranks.size == 1:
        return
    for key, model in models.items():
        if model is None:
            continue
        sums = [_checksum(parameter) for parameter in model.parameters()]
        _require_equal_digests(ranks, key, torch.stack([n * (index + 1) for index, n in enumerate(sums)]).sum())


def _require_equal_digests(ranks: Ranks, key: str, own: torch.Tensor) -> None:
    checksums = ranks.gather(own[None])
    if other := [rank for rank, checksum in enumerate(checksums) if checksum != checksums[0]]:
        raise ConfigError(
            f"{key}: ranks {', '.join(map(str, other))} have another model than rank 0. Put the same model on every "
            "host of the trainer"
        )


def _checksum(parameter: torch.Tensor) -> torch.Tensor:
    """A number of the bits of a tensor; sums of integers do not depend on their order."""
    bits = parameter.detach().view(torch.int16 if parameter.element_size() == 2 else torch.int32).flatten()
    # In parts, because torch converts a part to int64 before it adds.
    return torch.stack([part.sum(dtype=torch.int64) for part in torch.split(bits, 1 << 24)]).sum()


def _adapter_note(config: RunConfig, path: Path, model: object, ranks: Ranks) -> AdapterNote:
    """The note of published adapters. Raises ConfigError if actors could not merge them into the model's files."""
    base_digest = ""
    if ranks.rank == 0:  # other ranks publish nothing
        base = BaseWeights(path)
        weights = published_weights(model, config.learner.lora_scale)
        base.check({weight.name: weight.meta.shape for weight in weights if weight.adapter is not None})
        base_digest = base.digest
        base.close()
    return AdapterNote(scale=config.learner.lora_scale, dtype=config.model.dtype, base_digest=base_digest)


def _reference(config: RunConfig, path: Path, model: object) -> object:
    # The base model stays unchanged beside adapters, so it is the reference, unless ZeRO 3 partitions its weights.
    if config.learner.lora_rank and not config.loss.ref_model and config.learner.zero_stage < 3:
        return share_frozen(model)
    path = require_model(config.loss.ref_model) if config.loss.ref_model else path
    return load_reference(path, model, config.learner.attention)
