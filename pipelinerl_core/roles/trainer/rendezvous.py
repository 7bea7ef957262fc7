"""Rendezvous of the ranks of a trainer: a file on one host, a TCP port of rank 0 on several hosts.

Ranks on one host communicate over the loopback interface only, unless rank 0 also broadcasts weights to other hosts.
Ranks and receivers on several hosts need a trusted network, because torch's process groups have no authentication.
"""

import os
import socket
from datetime import timedelta
from pathlib import Path

from torch.distributed import FileStore, Store, TCPStore  # type: ignore[attr-defined]

from pipelinerl_core.config import RunConfig
from pipelinerl_core.host import own_outgoing_address
from pipelinerl_core.interfaces import ObjectStore
from pipelinerl_core.run.reading import list_keys, read_record
from pipelinerl_core.run.records import RENDEZVOUS_PREFIX, RendezvousRecord, rendezvous_key

_FILE, _TCP = "file:", "tcp:"
_REFUSAL = "refusal"


def open_rendezvous(
    size: int, seconds: float, *, directory: Path, host: str | None, sends_weights: bool = False
) -> tuple[Store, str]:
    """Rank 0: create the store of the process group; returns the store and its address for the other ranks.

    host: address of this host for other hosts; None if all ranks are on this host. sends_weights: this process also
    broadcasts weights to other hosts, which the variables of a loopback interface would prevent.
    """
    if host is None:
        if not sends_weights:  # the other ranks inherit the variables
            for variable in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
                os.environ.setdefault(variable, "lo")
        where = f"{_FILE}{directory / 'ranks'}"
        return join_rendezvous(where, size, seconds), where
    # The server listens on all addresses of this host; `host` may be reachable for others only.
    deadline = timedelta(seconds=seconds)
    store = TCPStore("127.0.0.1", 0, size, is_master=True, wait_for_workers=False, timeout=deadline)
    return store, f"{_TCP}{host}:{store.port}"


def join_rendezvous(where: str, size: int, seconds: float) -> Store:
    """Any other rank: connect to the store of the process group at the address `where`."""
    if where.startswith(_FILE):
        return FileStore(where.removeprefix(_FILE), size)
    host, _, port = where.removeprefix(_TCP).rpartition(":")
    return TCPStore(host, int(port), size, wait_for_workers=False, timeout=timedelta(seconds=seconds))


def report_refusal(store: Store, reason: str) -> None:
    """Any other rank: leave the text of a ConfigError for rank 0, which would only see that the rank has ended."""
    store.set(_REFUSAL, reason)


def refusal_of(store: Store) -> str:
    """Rank 0: the text of another rank's ConfigError; empty if there is none."""
    return store.get(_REFUSAL).decode() if store.check([_REFUSAL]) else ""


def own_address(config: RunConfig) -> str:
    """Address of this host for the other hosts of the trainer: placement.trainer_host if it is an address of this
    host, where the work pool has started rank 0."""
    wanted = config.placement.trainer_host
    if not wanted:
        return socket.gethostname()
    with socket.socket() as probe:
        try:
            probe.bind((wanted, 0))
        except OSError:
            return own_outgoing_address()
    return wanted


def announce_rendezvous(store: ObjectStore, record: RendezvousRecord) -> None:
    """Rank 0: publish the rendezvous in the run's store, for the other hosts of the trainer."""
    store.put(rendezvous_key(record.epoch), record.model_dump_json().encode())


def newest_rendezvous(store: ObjectStore) -> RendezvousRecord | None:
    """The rendezvous of the newest start of the trainer; None if there is none."""
    keys = list_keys(store, RENDEZVOUS_PREFIX)
    return read_record(store, keys[-1], RendezvousRecord) if keys else None
