"""GPUs of a host: which there are, how many each role of a run needs, and which process has which.

A GPU is assigned by a lock file in shared memory, which the supervisor of a role holds while it supervises: two runs
of one host never share a GPU unnoticed, and a killed supervisor frees its GPUs. Containers take part if they share
the host's /dev/shm (docker: ipc_mode: host). With placement.share_gpu, the roles of one run share a GPU.
"""

import fcntl
import os
import shutil
import subprocess
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from threading import Event
from typing import IO

from pipelinerl_core.config import RunConfig
from pipelinerl_core.errors import ConfigError, DeadlineExceeded

DEVICES_VARIABLE = "CUDA_VISIBLE_DEVICES"
CLAIMS = Path("/dev/shm/pipelinerl-gpus")
CLAIM_SECONDS = 60.0
"""How long a role waits for GPUs that a role which is just ending still has."""
_POLL_SECONDS = 0.5
_QUERY_SECONDS = 20.0
_QUERY = ("--query-gpu=index,uuid,name,memory.total", "--format=csv,noheader,nounits")
_MIB = 2**20


@dataclass(frozen=True, slots=True)
class Gpu:
    """A GPU that this process may use."""

    device: str
    """Its name in CUDA_VISIBLE_DEVICES: its index in the order of the PCI bus, or the name given to this process."""
    uuid: str
    name: str
    num_bytes: int


def inventory() -> tuple[Gpu, ...]:
    """The GPUs of this host that CUDA_VISIBLE_DEVICES of this process allows; empty without an NVIDIA driver."""
    command = shutil.which("nvidia-smi")
    allowed = os.environ.get(DEVICES_VARIABLE)
    if command is None or allowed == "":
        return ()
    try:
        printed = subprocess.run(
            [command, *_QUERY], capture_output=True, text=True, timeout=_QUERY_SECONDS, check=True
        ).stdout
        found = [_parse(line) for line in printed.splitlines() if line.strip()]
    except (OSError, subprocess.SubprocessError, ValueError):
        return ()
    return tuple(found) if allowed is None else _allowed(found, allowed)


def _parse(line: str) -> Gpu:
    index, uuid, name, mib = (part.strip() for part in line.split(","))
    return Gpu(index, uuid, name, int(mib) * _MIB)


def _allowed(found: list[Gpu], allowed: str) -> tuple[Gpu, ...]:
    """The GPUs that a device list names by index or by the beginning of the UUID, in the order of the list."""
    names = [name.strip() for name in allowed.split(",")]
    return tuple(
        Gpu(name, gpu.uuid, gpu.name, gpu.num_bytes)
        for name in names
        for gpu in found
        if name and (name == gpu.device or gpu.uuid.startswith(name))
    )


def gpus_of(config: RunConfig, role: str) -> int:
    """GPUs of a role on a host with GPUs: `actor`, `evaluator`, `trainer` or `trainer_node` (the share of a host)."""
    if config.model.device == "cpu":
        return 0
    if role in ("trainer", "trainer_node"):
        return 0 if config.stays_on_cpu else config.trainer.ranks // config.placement.trainer_nodes
    if role not in ("actor", "evaluator") or (config.engine.kind == "embedded" and config.stays_on_cpu):
        return 0
    return config.placement.gpus_per_actor or config.engine.tensor_parallel * config.engine.data_parallel


def needed_here(config: RunConfig) -> tuple[int, str]:
    """GPUs that the roles of a local run use at the same time, and the sum as text."""
    per_actor, ranks = gpus_of(config, "actor"), gpus_of(config, "trainer")
    if config.placement.share_gpu:
        needed = max(per_actor, ranks)
        return needed, f"{needed} shared by actor and trainer (placement.share_gpu=true)"
    beside = gpus_of(config, "evaluator") if config.eval_steps and not config.evaluates_on_actors else 0
    terms = [f"trainer.ranks={config.trainer.ranks} x 1", f"placement.actors={config.placement.actors} x {per_actor}"]
    terms += [f"evaluator {beside} (eval.on=own)"] if beside else []
    total = ranks + config.placement.actors * per_actor + beside
    return total, f"{' + '.join(terms)} = {total}"


def check_gpus(config: RunConfig) -> None:
    """The host has the GPUs that a local run assigns, or any if model.device=cuda. Raises ConfigError."""
    if config.placement.kind != "local":
        return
    gpus = inventory()
    if not gpus and config.model.device == "cuda":
        raise ConfigError(
            "model.device=cuda: this host has no GPU (nvidia-smi lists none). Start the run on a host with a GPU; "
            "`pipelinerl train ... --tiny` checks the configuration here, without a GPU or a download"
        )
    if not gpus:
        return
    needed, text = needed_here(config)
    if needed > len(gpus):
        share = "" if config.placement.share_gpu else ", set placement.share_gpu=true (one actor, one rank)"
        raise ConfigError(
            f"{text} GPUs, but this host has {len(gpus)} ({gpus[0].name}). Lower placement.actors or "
            f"engine.tensor_parallel or trainer.ranks{share}, or set placement.kind=work_pools for more hosts"
        )


@contextmanager
def claimed_gpus(
    config: RunConfig, run_id: str, role: str, name: str, stop: Event, seconds: float = CLAIM_SECONDS
) -> Iterator[Mapping[str, str]]:
    """Assign a role its GPUs for the time of the block; yields the environment variables that name them.

    On a host without GPUs there are no variables; a role that uses no GPU gets an empty device list. Raises
    ConfigError if the host has too few, DeadlineExceeded if other processes do not free enough within `seconds`.
    """
    wanted, gpus = gpus_of(config, role), inventory()
    if not gpus:
        yield {}
        return
    if wanted > len(gpus):
        raise ConfigError(
            f"{name}: needs {wanted} GPUs, this host has {len(gpus)} ({gpus[0].name}). Lower engine.tensor_parallel, "
            "engine.data_parallel, placement.gpus_per_actor or the ranks of a host (trainer.ranks / "
            "placement.trainer_nodes)"
        )
    with ExitStack() as held:
        deadline = time.monotonic() + seconds
        while (devices := _claim(held, gpus, wanted, run_id, name, share=config.placement.share_gpu)) is None:
            if time.monotonic() > deadline:
                raise DeadlineExceeded(
                    f"{name}: {wanted} GPUs wanted, and within {seconds:.0f} s not as many were free of {len(gpus)}: "
                    f"{', '.join(holders(gpus))}. End the other run, or lower placement.actors"
                )
            if stop.wait(_POLL_SECONDS):
                devices = ()
                break
        yield {DEVICES_VARIABLE: ",".join(devices), "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}


def _claim(
    held: ExitStack, gpus: tuple[Gpu, ...], wanted: int, run_id: str, name: str, *, share: bool
) -> tuple[str, ...] | None:
    """Lock the first `wanted` free GPUs, or, to share, those that this run has. None: not enough are free."""
    if not wanted:
        return ()
    CLAIMS.mkdir(exist_ok=True)
    _share_with_all_users(CLAIMS, 0o777)  # not sticky: Linux would refuse to open files of other users there
    with ExitStack() as locked, _open(CLAIMS / "all") as everything:
        fcntl.flock(everything, fcntl.LOCK_EX)  # held for milliseconds: one process chooses at a time
        owners = [_owner(gpu) for gpu in gpus]
        own = [gpu for gpu, owner in zip(gpus, owners, strict=True) if share and owner.startswith(f"{run_id}/")]
        free = [gpu for gpu, owner in zip(gpus, owners, strict=True) if not owner]
        chosen = (own + free)[:wanted]
        if len(chosen) < wanted:
            return None
        for gpu in chosen:
            file = locked.enter_context(_open(_lock_file(gpu)))
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            _write_owner(file, f"{run_id}/{name}")
        held.push(locked.pop_all())
    return tuple(gpu.device for gpu in chosen)


def holders(gpus: tuple[Gpu, ...]) -> list[str]:
    """A text for each GPU that a role has: "GPU 0: quickstart-1/actor-0"."""
    owners = ((gpu, _owner(gpu)) for gpu in gpus)
    return [f"GPU {gpu.device}: {owner}" for gpu, owner in owners if owner]


def _lock_file(gpu: Gpu) -> Path:
    return CLAIMS / gpu.uuid.replace("/", "_")


def _open(path: Path) -> IO[str]:
    """A lock file, created for the processes of all users of this host."""
    file = path.open("a+", encoding="utf-8")
    _share_with_all_users(path, 0o666)
    return file


def _share_with_all_users(path: Path, mode: int) -> None:
    with suppress(PermissionError):  # another user has created the path, with this mode
        path.chmod(mode)


def _owner(gpu: Gpu) -> str:
    """Run and role of a process that has a GPU; empty: the GPU is free."""
    try:
        with _lock_file(gpu).open("r+") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return file.read().strip() or "another run"
    except FileNotFoundError:
        pass
    return ""


def _write_owner(file: IO[str], owner: str) -> None:
    file.truncate(0)
    file.write(owner)
    file.flush()
