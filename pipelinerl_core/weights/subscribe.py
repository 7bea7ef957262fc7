"""Actor side of the weights: read, verify, stage. All of it happens outside the pause."""

import socket
from pathlib import Path

from safetensors import SafetensorError
from safetensors import torch as safetensors

from pipelinerl_core.errors import ChecksumMismatch, MissingObject
from pipelinerl_core.interfaces import ObjectStore, WeightUpdate
from pipelinerl_core.types import FileEntry, WeightManifest
from pipelinerl_core.weights.files import WEIGHTS_FILE, verify


class WeightSubscriber:
    """Fetches versions by manifest, from shared memory where that is this host's, else from the object store."""

    def __init__(self, store: ObjectStore) -> None:
        self._store = store
        self._host = socket.gethostname()

    def fetch(self, manifest: WeightManifest) -> WeightUpdate:
        """The verified tensors of a version; MissingObject if it is gone, ChecksumMismatch if it is damaged."""
        entry = next(entry for entry in manifest.files if entry.name == WEIGHTS_FILE)
        path = self._path(manifest, entry)
        data = self._from_shm(path, manifest, entry) if path is not None else None
        if data is None:
            path, data = None, self._from_store(manifest, entry)
        try:
            tensors = safetensors.load(data)
        except SafetensorError as error:
            raise ChecksumMismatch(f"version {manifest.version}: not a safetensors file: {error}") from None
        return WeightUpdate(
            version=manifest.version,
            tensors=tensors,
            num_bytes=len(data),
            path=None if path is None else str(path),
        )

    def _path(self, manifest: WeightManifest, entry: FileEntry) -> Path | None:
        """The file in this host's shared memory, if the version was put there."""
        if manifest.shm is None or manifest.host != self._host:
            return None
        return Path(manifest.shm) / entry.name

    def _from_shm(self, path: Path, manifest: WeightManifest, entry: FileEntry) -> bytes | None:
        """The copy in shared memory; None when the durable copy must serve."""
        try:
            data = path.read_bytes()
            verify(data, entry, str(path.parent))
        except FileNotFoundError:
            return None  # pruned: a newer version exists
        except ChecksumMismatch:
            if manifest.key is None:
                raise
            return None
        return data

    def _from_store(self, manifest: WeightManifest, entry: FileEntry) -> bytes:
        if manifest.key is None:
            raise MissingObject(
                f"weights of version {manifest.version}: gone from shared memory of {manifest.host} and not durable; "
                "the next announced version replaces them"
            )
        data = self._store.get(f"{manifest.key}/{entry.name}")
        verify(data, entry, manifest.key)
        return data
