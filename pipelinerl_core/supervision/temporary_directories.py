"""A temporary directory for each process that is started here: gone with it, however it ended.

Libraries leave sockets and files behind when they are killed (vLLM a socket for each of its channels and a meeting
point, torch its error files). Whoever supervises a process removes them; the next start on this host removes those of
supervisors that were killed themselves.
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

from pipelinerl_core.run.context import OUTER_TEMPORARY_VARIABLE, outer_temporary

logger = logging.getLogger(__name__)

# A UNIX socket's path has at most 107 bytes, and vLLM's are TMPDIR/<36 characters>.
_MAX_PATH_BYTES = 70
_SHORT = Path("/tmp")
_REMOVE_SECONDS = 1.0
_POLL_SECONDS = 0.02


@contextmanager
def own_temporary(environment: Mapping[str, str]) -> Iterator[dict[str, str]]:
    """`environment` of a process with a temporary directory of its own, removed at the end of the block.

    The process, and whatever it has started, must have ended by then. Where none can be made, on a full disk say, it
    has that of all: tidiness is no reason not to run.
    """
    outer = outer_temporary()
    own: dict[str, str] = {}
    with ExitStack() as stack:
        try:
            directory = stack.enter_context(scratch_directory())
            own = {"TMPDIR": str(directory), OUTER_TEMPORARY_VARIABLE: str(outer)}
            link_compiler_cache(directory)
        except OSError as error:
            logger.warning("no temporary directory below %s (%s): what processes leave there stays", outer, error)
        yield {**environment, **own}


def compiler_cache() -> Path:
    """Where torch's compiler keeps what it has built, for processes that come later: torch's own default."""
    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # no such user, as in some containers
        user = f"uid_{os.getuid()}"
    return outer_temporary() / f"torchinductor_{user}"


def link_compiler_cache(directory: Path) -> None:
    """Let processes with this temporary directory use the compiler's cache of this host.

    An engine that must build again takes longer to start. A variable names most of the cache, but not all of it.
    """
    cache = compiler_cache()
    with suppress(OSError):  # it is only a cache
        cache.mkdir(mode=0o700, exist_ok=True)
        (directory / cache.name).symlink_to(cache)


@contextmanager
def scratch_directory() -> Iterator[Path]:
    """A new directory with a short path for the time of the block; OSError when none can be made."""
    place = _place(outer_temporary())
    _remove_abandoned(place)
    directory, lock = _make(place)
    try:
        yield directory
    finally:
        _remove(directory)
        os.close(lock)


def _place(outer: Path) -> Path:
    """Where the directories are made: there, unless sockets inside would have too long a path."""
    too_long = len(os.fsencode(outer)) + len(f"/{_prefix()}12345678") > _MAX_PATH_BYTES
    return _SHORT if too_long and os.access(_SHORT, os.W_OK) else outer


def _prefix() -> str:
    """Of the names of all such directories of this host: those of others on a shared disk are left alone."""
    return f"prl{zlib.crc32(socket.gethostname().encode()) & 0xFFFF:04x}-"


def _make(place: Path) -> tuple[Path, int]:
    """A new directory, and a descriptor that holds its lock as long as this process lives."""
    while True:
        directory = Path(tempfile.mkdtemp(prefix=_prefix(), dir=place))
        with suppress(FileNotFoundError):
            lock = os.open(directory, os.O_RDONLY)
            fcntl.flock(lock, fcntl.LOCK_EX)
            if directory.exists():
                return directory, lock
            os.close(lock)  # somebody took it for an abandoned one, between the two lines above


def _remove_abandoned(place: Path) -> None:
    """Remove the directories of this user whose owner has ended without doing so."""
    for directory in place.glob(f"{_prefix()}*"):
        with suppress(OSError):  # gone, or somebody else's
            lock = os.open(directory, os.O_RDONLY | os.O_NOFOLLOW)
            try:
                if os.fstat(lock).st_uid == os.getuid():
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    shutil.rmtree(directory, ignore_errors=True)
            finally:
                os.close(lock)


def _remove(directory: Path) -> None:
    """Remove it; a process that was killed a moment ago may still put something in."""
    deadline = time.monotonic() + _REMOVE_SECONDS
    shutil.rmtree(directory, ignore_errors=True)
    while directory.exists() and time.monotonic() < deadline:
        time.sleep(_POLL_SECONDS)
        shutil.rmtree(directory, ignore_errors=True)
