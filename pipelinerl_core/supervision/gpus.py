"""GPUs of a host: which there are, how many each role of a run needs, and which process has which.

A GPU is assigned by a lock file in shared memory, which the supervisor of a role holds while it supervises: two runs
of one host never share a GPU unnoticed, and a killed supervisor frees its GPUs. Containers take part if they share
the host's /dev/shm (docker: ipc_mode: host). With placement.share_gpu, the roles of one run share a GPU.

A GPU has one lock file for all users, and per user a note, `<uuid>.<user id>`, with the run and the role of the
process that holds the note's lock. Any user can lock these files and create others, so this module never follows a
link, never writes a file of another user and never waits for a lock without a deadline.
"""

import fcntl
import os
import stat
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from threading import Event

from pipelinerl_core.config import RunConfig
from pipelinerl_core.config.gpu_counts import gpus_of, needed_gpus
from pipelinerl_core.errors import ConfigError, DeadlineExceeded
from pipelinerl_core.host import nvidia_smi

DEVICES_VARIABLE = "CUDA_VISIBLE_DEVICES"
CLAIMS = Path("/dev/shm/pipelinerl-gpus")
CLAIM_SECONDS = 60.0
"""How long a role waits for GPUs of another role that is ending."""
_POLL_SECONDS = 0.5
_QUERY_SECONDS = 20.0
_FIELDS = ("index", "uuid", "name", "memory.total")
_MIB = 2**20
_CHOICE = "all"
"""The lock of the process that chooses GPUs, held for milliseconds."""
_DIRECTORY_MODE = 0o1777  # sticky: a user can neither remove nor replace files of other users
_NOTE_BYTES = 200


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
    allowed = os.environ.get(DEVICES_VARIABLE)
    if allowed == "":
        return ()
    try:
        rows = nvidia_smi(_FIELDS, seconds=_QUERY_SECONDS)
        gpus = [Gpu(index, uuid, name, int(mib) * _MIB) for index, uuid, name, mib in rows]
    except ValueError:
        return ()
    return tuple(gpus) if allowed is None else _allowed(gpus, allowed)


def _allowed(gpus: list[Gpu], allowed: str) -> tuple[Gpu, ...]:
    """The GPUs that a device list names by index or by the beginning of the UUID, in the order of the list."""
    names = [name.strip() for name in allowed.split(",")]
    return tuple(
        Gpu(name, gpu.uuid, gpu.name, gpu.num_bytes)
        for name in names
        for gpu in gpus
        if name and (name == gpu.device or gpu.uuid.startswith(name))
    )


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
    needed, text = needed_gpus(config)
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
        devices = None
        while devices is None:
            is_late = time.monotonic() > deadline
            try:
                devices = _claim(held, gpus, wanted, run_id, name, share=bool(config.placement.share_gpu))
                problem = ", ".join(holders(gpus)) if devices is None and is_late else ""
            except OSError as error:
                problem = f"{CLAIMS}: {error}"
            if devices is None and is_late:
                raise DeadlineExceeded(
                    f"{name}: {wanted} GPUs wanted, and within {seconds:.0f} s not as many were free of {len(gpus)}: "
                    f"{problem}. End the other run, or lower placement.actors"
                )
            if devices is None and stop.wait(_POLL_SECONDS):
                devices = ()
        yield {DEVICES_VARIABLE: ",".join(devices), "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}


def _claim(
    held: ExitStack, gpus: tuple[Gpu, ...], wanted: int, run_id: str, name: str, *, share: bool
) -> tuple[str, ...] | None:
    """Lock the first `wanted` free GPUs, or, to share, those that this run has. None: not now.

    Waits for no lock. Raises OSError if a file is not usable.
    """
    if not wanted:
        return ()
    with _claims() as directory, ExitStack() as choosing, ExitStack() as locked:
        if not _lock(_opened(choosing, directory, _CHOICE, os.O_CREAT), fcntl.LOCK_EX):
            return None
        own = [gpu for gpu in gpus if share and _note(directory, _note_name(gpu)).startswith(f"{run_id}/")]
        chosen: list[Gpu] = []
        for gpu in [*own, *(gpu for gpu in gpus if gpu not in own)]:
            file = _opened(locked, directory, _name(gpu), os.O_CREAT)
            is_taken = gpu in own or _lock(file, fcntl.LOCK_EX)
            if is_taken and (not share or _lock(file, fcntl.LOCK_SH)):
                chosen.append(gpu)
            if len(chosen) == wanted:
                break
        else:
            return None
        for gpu in chosen:
            note = _opened(locked, directory, _note_name(gpu), os.O_CREAT | os.O_RDWR)
            if not _lock(note, fcntl.LOCK_SH):
                return None
            os.ftruncate(note, 0)
            os.pwrite(note, f"{run_id}/{name}".encode(), 0)
        held.push(locked.pop_all())
    return tuple(gpu.device for gpu in chosen)


def holders(gpus: tuple[Gpu, ...]) -> list[str]:
    """A text for each GPU that a process has: "GPU 0: quickstart-1/actor-0"; also for the lock of the choice.

    Raises OSError.
    """
    shown = {_CHOICE: str(CLAIMS / _CHOICE)} | {_name(gpu): f"GPU {gpu.device}" for gpu in gpus}
    texts = []
    with _claims() as directory, ExitStack() as files:
        for name, place in shown.items():
            if not _lock(_opened(files, directory, name, os.O_CREAT), fcntl.LOCK_EX):
                notes = [
                    _note(directory, file_name)
                    for file_name in os.listdir(directory)
                    if file_name.startswith(f"{name}.")
                ]
                texts.append(f"{place}: {', '.join(filter(None, notes)) or 'another process'}")
    return texts


def _name(gpu: Gpu) -> str:
    return gpu.uuid.replace("/", "_").replace(".", "_")


def _note_name(gpu: Gpu) -> str:
    return f"{_name(gpu)}.{os.geteuid()}"


@contextmanager
def _claims() -> Iterator[int]:
    """A descriptor of CLAIMS, which is created if it is missing. Raises OSError."""
    with suppress(FileExistsError):
        CLAIMS.mkdir(_DIRECTORY_MODE)
    directory = os.open(CLAIMS, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        status = os.fstat(directory)
        if os.geteuid() in (0, status.st_uid):
            os.fchmod(directory, _DIRECTORY_MODE)  # the umask, or an earlier release, has chosen another mode
        elif not status.st_mode & stat.S_ISVTX:
            raise OSError(f"user {status.st_uid} made it without the sticky bit; the user or root must set mode 1777")
        yield directory
    finally:
        os.close(directory)


def _opened(stack: ExitStack, directory: int, name: str, flags: int = os.O_RDONLY) -> int:
    """A descriptor of a file in CLAIMS, closed with `stack`. Raises OSError, also if the file is not what its name
    says: a plain file, and a note of the user whose id the name has.

    Only without O_CREAT Linux opens files of other users in a sticky directory (fs.protected_regular).
    """
    safe = os.O_NOFOLLOW | os.O_NONBLOCK | flags & ~os.O_CREAT
    try:
        file = os.open(name, safe, dir_fd=directory)
        stack.callback(os.close, file)
    except FileNotFoundError:
        if not flags & os.O_CREAT:
            raise
        file = os.open(name, safe | os.O_CREAT | os.O_EXCL, 0o644, dir_fd=directory)
        stack.callback(os.close, file)
        os.fchmod(file, 0o644)  # whatever the umask: a process locks the file through a read-only descriptor
    status, user = os.fstat(file), name.partition(".")[2]
    if not stat.S_ISREG(status.st_mode) or status.st_nlink != 1 or user not in ("", str(status.st_uid)):
        raise OSError(f"user {status.st_uid} has put something else in the place of the file {name!r}")
    return file


def _lock(file: int, how: int) -> bool:
    """Lock a file, or False if another process holds a lock that excludes this one."""
    try:
        fcntl.flock(file, how | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _note(directory: int, name: str) -> str:
    """Run and role of the process that holds the lock of a note; empty if none does or the note is not usable."""
    with ExitStack() as stack, suppress(OSError):
        file = _opened(stack, directory, name)
        if not _lock(file, fcntl.LOCK_EX):
            text = os.pread(file, _NOTE_BYTES, 0).decode(errors="replace")
            return "".join(letter for letter in text if letter.isprintable())
    return ""
