"""Where the ranks of a trainer find one another: a file on one host, a port of rank 0 on several.

Ranks of one host talk over the loopback interface only. Those of several hosts trust their network: torch's process
groups know no password.
"""

import os
import socket
from datetime import timedelta
from pathlib import Path

from torch.distributed import FileStore, Store, TCPStore  # type: ignore[attr-defined]

from pipelinerl_core.config import RunConfig
from pipelinerl_core.interfaces import ObjectStore
from pipelinerl_core.run.reading import read_record
from pipelinerl_core.run.records import RENDEZVOUS_PREFIX, RendezvousRecord, rendezvous_key

_FILE, _TCP = "file:", "tcp:"


def hold_meeting(size: int, seconds: float, *, directory: Path, host: str | None) -> tuple[Store, str]:
    """Rank 0: the store of the process group, and where the others find it. `host`: how other hosts name this one."""
    if host is None:
        where = f"{_FILE}{directory / 'ranks'}"
        return join_meeting(where, size, seconds), where
    store = TCPStore(host, 0, size, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=seconds))
    return store, f"{_TCP}{host}:{store.port}"


def join_meeting(where: str, size: int, seconds: float) -> Store:
    """Any other rank: the store of the process group."""
    if where.startswith(_FILE):
        for variable in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
            os.environ.setdefault(variable, "lo")
        return FileStore(where.removeprefix(_FILE), size)
    host, _, port = where.removeprefix(_TCP).rpartition(":")
    return TCPStore(host, int(port), size, wait_for_workers=False, timeout=timedelta(seconds=seconds))


def own_address(config: RunConfig) -> str:
    """How the other hosts of the trainer name this one."""
    return config.placement.trainer_host or socket.gethostname()


def announce_meeting(store: ObjectStore, record: RendezvousRecord) -> None:
    """Rank 0: tell the other hosts of a trainer, through the run's store."""
    store.put(rendezvous_key(record.epoch), record.model_dump_json().encode())


def newest_meeting(store: ObjectStore) -> RendezvousRecord | None:
    """The meeting of the newest start of the trainer, if there was any."""
    keys = store.list(RENDEZVOUS_PREFIX)
    if not keys:
        return None
    return read_record(store, keys[-1], RendezvousRecord)
