"""A temporary directory for each supervised process, removed when the process has ended.

Killed processes leave sockets and files behind (vLLM: the sockets of its channels and a rendezvous file, torch: error
files). The supervisor of a process removes the directory. If a supervisor itself was killed, the next start on this
host removes its directories.
"""

import fcntl
import getpass
import logging
import os
import shutil
import socket
import tempfile
import time
import zlib
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from pipelinerl_core.run.context import OUTER_TEMPORARY_VARIABLE, outer_temporary, private_directory

logger = logging.getLogger(__name__)

# A UNIX socket's path has at most 107 bytes, and vLLM's are TMPDIR/<36 characters>.
_MAX_PATH_BYTES = 70
_SHORT = Path("/tmp")
_REMOVE_SECONDS = 1.0
_POLL_SECONDS = 0.02


@contextmanager
def own_temporary(environment: Mapping[str, str]) -> Iterator[dict[str, str]]:
    """`environment` of a process with a temporary directory of its own, removed at the end of the block.

    The process and its child processes must have ended by then. If no directory can be created (for example on a full
    disk), the process uses the common temporary directory.
    """
    outer = outer_temporary()
    own: dict[str, str] = {}
    with ExitStack() as stack:
        try:
            directory = stack.enter_context(temporary_directory())
            own = {"TMPDIR": str(directory), OUTER_TEMPORARY_VARIABLE: str(outer)}
            link_compiler_cache(directory)
        except OSError as error:
            logger.warning(
                "no temporary directory below %s (%s): files that processes leave there are not removed", outer, error
            )
        yield {**environment, **own}


def compiler_cache() -> Path:
    """Cache directory of torch's compiler for this user, shared by all processes: torch's own default."""
    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # the user id has no name, as in some containers
        user = f"uid_{os.getuid()}"
    return outer_temporary() / f"torchinductor_{user}"


def link_compiler_cache(directory: Path) -> None:
    """Link torch's compiler cache into a temporary directory, so that engines start without compiling again.

    A link, because torch's environment variable for the cache does not cover the whole cache. The cache holds code,
    so a directory of another user is not linked.
    """
    cache = compiler_cache()
    with suppress(OSError):  # a process works without the cache
        (directory / cache.name).symlink_to(private_directory(cache))


@contextmanager
def temporary_directory() -> Iterator[Path]:
    """A new directory with a short path for the time of the block; OSError if no directory can be created."""
    parent = _parent_directory(outer_temporary())
    _remove_abandoned(parent)
    directory, lock = _create_locked(parent)
    try:
        yield directory
    finally:
        _remove(directory)
        os.close(lock)


def _parent_directory(outer: Path) -> Path:
    """Parent of the temporary directories: `outer`, or /tmp if the paths of sockets below `outer` would be too
    long."""
    too_long = len(os.fsencode(outer)) + len(f"/{_prefix()}12345678") > _MAX_PATH_BYTES
    return _SHORT if too_long and os.access(_SHORT, os.W_OK) else outer


def _prefix() -> str:
    """Name prefix of this host's directories; directories of other hosts on a shared disk have other prefixes."""
    return f"prl{zlib.crc32(socket.gethostname().encode()) & 0xFFFF:04x}-"


def _create_locked(parent: Path) -> tuple[Path, int]:
    """A new directory, and a descriptor that holds the directory's lock until this process ends."""
    while True:
        directory = Path(tempfile.mkdtemp(prefix=_prefix(), dir=parent))
        with suppress(FileNotFoundError):
            lock = os.open(directory, os.O_RDONLY)
            fcntl.flock(lock, fcntl.LOCK_EX)
            if directory.exists():
                return directory, lock
            os.close(lock)  # between mkdtemp and flock another process removed the directory as abandoned


def _remove_abandoned(parent: Path) -> None:
    """Remove the directories of this user whose owner has ended without removing them."""
    for directory in parent.glob(f"{_prefix()}*"):
        with suppress(OSError):  # removed meanwhile, or owned by another user
            # O_DIRECTORY: anybody can make a pipe of such a name, and the open of a pipe waits for a writer.
            lock = os.open(directory, os.O_RDONLY | os.O_NOFOLLOW | os.O_DIRECTORY)
            try:
                if os.fstat(lock).st_uid == os.getuid():
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    shutil.rmtree(directory, ignore_errors=True)
            finally:
                os.close(lock)


def _remove(directory: Path) -> None:
    """Remove a directory; repeat, because a process that is being killed may still create files."""
    deadline = time.monotonic() + _REMOVE_SECONDS
    shutil.rmtree(directory, ignore_errors=True)
    while directory.exists() and time.monotonic() < deadline:
        time.sleep(_POLL_SECONDS)
        shutil.rmtree(directory, ignore_errors=True)
