"""Epochs of a run, and the selection of commits that count: commits that later epochs have adopted.

Readers ignore all objects of epoch k after the last step that epoch k + 1 adopted. Therefore a late write of a fenced
process is harmless.
"""

import os
import socket
import time
from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Literal

from pipelinerl_core.errors import Fenced
from pipelinerl_core.interfaces import ObjectStore
from pipelinerl_core.run.reading import read_record
from pipelinerl_core.run.records import Commit, EpochRecord, epoch_key, parse_commit_key

# Bound of the search for a free epoch number; a run has far fewer starts.
_MAX_EPOCHS = 100_000


def read_epochs(store: ObjectStore) -> list[EpochRecord]:
    """Every start of hub and trainer, oldest first."""
    return [read_record(store, key, EpochRecord) for key in store.list("epochs/")]


def counting(keys: Iterable[str], epochs: Iterable[EpochRecord]) -> dict[int, str]:
    """Step -> key of the commit that counts, by step. `epochs` must include every epoch that fences one of the keys.

    A commit of trainer epoch k for step s counts unless a later trainer epoch adopted only steps below s. If several
    commits of a step count, the commit of the newest epoch is chosen.
    Example: epoch 2 committed steps 0 to 6, epoch 4 adopted through 5 and committed 6: step 6 is epoch 4's.
    """
    trainers = [record for record in epochs if record.role == "trainer"]
    counted: dict[int, str] = {}
    for (step, epoch), key in sorted((parse_commit_key(key), key) for key in keys):
        if all(step <= record.adopted_through for record in trainers if record.epoch > epoch):
            counted[step] = key
    return counted


def counted_commit_keys(store: ObjectStore, epochs: Iterable[EpochRecord]) -> dict[int, str]:
    """Step -> key of the commit that counts, for all committed steps in order."""
    return counting(store.list("commits/"), epochs)


def read_commit(store: ObjectStore, key: str) -> Commit:
    """Read a commit. Raises StoreError, naming the value, if the commit is damaged or a number is out of range."""
    return read_record(store, key, Commit)


def is_complete(store: ObjectStore, steps: int) -> bool:
    """Whether the last step is committed, by a commit that counts."""
    if not any(parse_commit_key(key)[0] >= steps for key in store.list("commits")):
        return False
    return max(counted_commit_keys(store, read_epochs(store)), default=-1) >= steps


def take_epoch(
    store: ObjectStore,
    role: Literal["hub", "trainer"],
    adopted_through: int,
    arithmetic: Mapping[str, str | int] = MappingProxyType({}),
) -> EpochRecord:
    """Claim the next epoch number, which fences all earlier epochs of the role. Raises Fenced if no number is
    free."""
    epochs = read_epochs(store)
    parent = max((record.epoch for record in epochs if record.role == role), default=None)
    candidate = max((record.epoch for record in epochs), default=0) + 1
    while candidate < _MAX_EPOCHS:
        record = EpochRecord(
            epoch=candidate,
            role=role,
            parent=parent,
            adopted_through=adopted_through,
            started_at=time.time(),
            host=socket.gethostname(),
            pid=os.getpid(),
            arithmetic=dict(arithmetic),
        )
        try:
            store.put(epoch_key(candidate), record.model_dump_json().encode(), create_only=True)
        except FileExistsError:
            candidate += 1
            continue
        return record
    raise Fenced(f"no free epoch below {_MAX_EPOCHS} under {store.url}/epochs")


def check_not_fenced(store: ObjectStore, epoch: EpochRecord) -> None:
    """Raise Fenced if a newer epoch of the same role exists."""
    for key in reversed(store.list("epochs/")):
        if key <= epoch_key(epoch.epoch):
            return
        newer = read_record(store, key, EpochRecord)
        if newer.role == epoch.role:
            raise Fenced(f"{epoch.role} epoch {epoch.epoch} was taken over by epoch {newer.epoch} on {newer.host}")
