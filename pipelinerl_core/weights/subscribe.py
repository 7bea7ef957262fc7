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
        data, where = self._read(manifest, entry)
        verify(data, entry, where)
        try:
            tensors = safetensors.load(data)
        except SafetensorError as error:
            raise ChecksumMismatch(f"{where}/{entry.name}: not a safetensors file: {error}") from None
        return WeightUpdate(version=manifest.version, tensors=tensors, num_bytes=len(data))

    def _read(self, manifest: WeightManifest, entry: FileEntry) -> tuple[bytes, str]:
        if manifest.shm and manifest.host == self._host:
            try:
                return (Path(manifest.shm) / entry.name).read_bytes(), manifest.shm
            except FileNotFoundError:
                pass  # pruned: a newer version exists, or the durable copy serves
        if manifest.key is None:
            raise MissingObject(
                f"weights of version {manifest.version}: gone from shared memory of {manifest.host} and not durable; "
                "the next announced version replaces them"
            )
        return self._store.get(f"{manifest.key}/{entry.name}"), manifest.key
