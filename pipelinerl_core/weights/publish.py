"""Publish weight versions: weights, then manifest, to shared memory and, if durable, to the object store."""

import logging
import os
import re
import shutil
import socket
import time
from collections import deque
from collections.abc import Mapping
from pathlib import Path

import torch

from pipelinerl_core.interfaces import ObjectStore
from pipelinerl_core.run.context import private_directory
from pipelinerl_core.run.records import MANIFEST_FILE, WEIGHTS_FILE, weights_prefix
from pipelinerl_core.types import WeightManifest
from pipelinerl_core.weights.files import entry_of, manifest_bytes, serialize

logger = logging.getLogger(__name__)

SHM_ROOT = Path("/dev/shm")
# An actor may still read one of these; an actor whose version has been removed reads the newest version.
KEPT_VERSIONS = 4
_DIRECTORY = re.compile(r"(\d+)\.(\d+)")
"""<version>.<epoch>; other directories in shared memory hold no published version."""


def shm_directory(run_id: str) -> Path:
    """Shared-memory directory of a run on this host."""
    return SHM_ROOT / f"pipelinerl-{run_id}"


def _left_behind(shm: Path) -> list[Path]:
    """The versions of earlier epochs in a run's shared memory, oldest first."""
    if not os.path.lexists(shm):  # no version was published
        return []
    try:
        entries = [(_DIRECTORY.fullmatch(path.name), path) for path in private_directory(shm).iterdir()]
    except OSError:  # another start has removed the directory, or it cannot be used, as `_put_shm` will report
        return []
    ordered = sorted((int(name[1]), int(name[2]), path) for name, path in entries if name is not None)
    return [path for _, _, path in ordered]


class WeightPublisher:
    """Publishes versions of one trainer epoch. Not thread-safe: one publishing thread."""

    def __init__(
        self, store: ObjectStore, *, run_id: str, epoch: int, use_shm: bool, file_name: str = WEIGHTS_FILE
    ) -> None:
        """file_name: name of the file of each version, WEIGHTS_FILE or ADAPTERS_FILE."""
        self._store = store
        self._file_name = file_name
        self._epoch = epoch
        self._shm = shm_directory(run_id) if use_shm else None
        # Versions of earlier epochs are removed in turn too: an actor may still read the newest of them.
        self._kept: deque[Path] = deque(_left_behind(self._shm) if self._shm else ())
        self._host = socket.gethostname()

    def publish(self, version: int, tensors: Mapping[str, torch.Tensor], *, durable: bool) -> WeightManifest:
        """Write the weights, then the manifest; without shared memory every version goes to the object store."""
        return self.publish_bytes(version, serialize(tensors), durable=durable)

    def publish_bytes(
        self, version: int, data: bytes, *, durable: bool, group: int = 0, broadcast_index: int = 0
    ) -> WeightManifest:
        """`publish` for serialized weights. A broadcast version needs no copy in shared memory or store.

        broadcast_index: as in the manifest; 0 if the version is not broadcast.
        If the version does not fit into shared memory, it goes to the object store.
        """
        entry = entry_of(self._file_name, data)
        prefix = weights_prefix(version, self._epoch)
        directory = self._shm / f"{version:08d}.{self._epoch}" if self._shm else None
        if directory is not None and not self._put_shm(directory, data):
            directory = None
        is_broadcast = broadcast_index > 0
        in_store = durable or (directory is None and not is_broadcast)
        manifest = WeightManifest(
            version=version,
            epoch=self._epoch,
            files=(entry,),
            key=prefix if in_store else None,
            shm=str(directory) if directory else None,
            host=self._host,
            published_at=time.time(),
            group=group,
            is_broadcast=is_broadcast,
            broadcast_index=broadcast_index,
        )
        if in_store:
            self._store.put(f"{prefix}/{entry.name}", data)
            self._store.put(f"{prefix}/{MANIFEST_FILE}", manifest_bytes(manifest))
        return manifest

    def _put_shm(self, directory: Path, data: bytes) -> bool:
        """Write the weights to shared memory and remove old versions; False if shared memory does not accept them."""
        partial = directory / f".{self._file_name}.{os.getpid()}"
        try:
            private_directory(directory.parent)
            try:
                self._drop_old()  # an epoch that ended during a write has left one version too many
                directory.mkdir(exist_ok=True)
                partial.write_bytes(data)
                partial.replace(directory / self._file_name)
            except OSError:
                shutil.rmtree(directory, ignore_errors=True)
                raise
        except OSError as error:
            logger.warning(
                "%s cannot hold the weights (%s): they go through %s. Make it large enough for %d versions, e.g. "
                "by docker run --shm-size", SHM_ROOT, error.strerror or error, self._store.url, KEPT_VERSIONS + 1,
            )  # fmt: skip
            return False
        if directory not in self._kept:
            self._kept.append(directory)
        self._drop_old()
        return True

    def _drop_old(self) -> None:
        while len(self._kept) > KEPT_VERSIONS:
            shutil.rmtree(self._kept.popleft(), ignore_errors=True)
