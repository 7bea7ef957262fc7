"""Read weight versions: map or read them, verify, and merge adapters, before the engine pauses for the swap."""

import socket
from collections.abc import Mapping
from pathlib import Path

import torch

from pipelinerl_core.algo.adapters import Adapters
from pipelinerl_core.errors import ChecksumMismatch, ConfigError, MissingObject
from pipelinerl_core.interfaces import ObjectStore, WeightUpdate
from pipelinerl_core.storage.digests import read_verified, verify
from pipelinerl_core.types import FileEntry, WeightManifest
from pipelinerl_core.weights.base import BaseWeights
from pipelinerl_core.weights.delta import apply_delta
from pipelinerl_core.weights.files import copy_of, is_weights, parse, parse_copy
from pipelinerl_core.weights.memory import open_shared

_Read = tuple[dict[str, torch.Tensor], int]
"""Tensors of a version, and the inode of the file in shared memory if they are views of it, else 0."""


class WeightSubscriber:
    """Fetches versions by manifest, from shared memory of this host if possible, else from the object store."""

    def __init__(self, store: ObjectStore, base: BaseWeights | None = None) -> None:
        """base: the weights into which adapters are merged; None with weights.content=merged."""
        self._store = store
        self._base = base
        self._host = socket.gethostname()
        self._elsewhere: WeightManifest | None = None
        """The first version that only another host can read."""
        self._uses_deltas = False
        self._whole: tuple[str, bytes] | None = None
        """In a run with deltas: digest and bytes of the last version that was read whole."""

    def fetch(self, manifest: WeightManifest) -> WeightUpdate:
        """The verified tensors of a version, as an update. Adapters are merged; the update has only adapted weights.

        Raises MissingObject if the version is gone, or is the first that only another host can read; ConfigError for
        a second of that kind; ChecksumMismatch if it is damaged, or if its adapters belong to another base model.
        """
        tensors, inode = self._read(manifest)
        is_partial = isinstance(tensors, Adapters)
        if isinstance(tensors, Adapters):
            where = f"weights of version {manifest.version}"
            if self._base is None:
                raise ChecksumMismatch(f"{where}: adapters, in a run with weights.content=merged")
            tensors, inode = self._base.merged(tensors, where), 0
        return WeightUpdate(
            version=manifest.version,
            tensors=tensors,
            num_bytes=manifest.num_bytes,
            path=manifest.shm if inode else None,
            inode=inode,
            is_partial=is_partial,
        )

    def read(self, manifest: WeightManifest) -> Mapping[str, torch.Tensor]:
        """The verified tensors of a version as they were published: all weights, or `Adapters`. Raises as `fetch`."""
        return self._read(manifest)[0]

    def _read(self, manifest: WeightManifest) -> _Read:
        entry = next(entry for entry in manifest.files if is_weights(entry))
        where = f"weights of version {manifest.version}"
        shared = self._from_shm(manifest, entry, where)
        return shared or (self._from_store(manifest, entry, where), 0)

    def _from_shm(self, manifest: WeightManifest, entry: FileEntry, where: str) -> _Read | None:
        """Views of the copy in shared memory, and its inode; None if the durable copy must be read instead."""
        if manifest.shm is None:
            return None
        opened = open_shared(Path(manifest.shm))
        if opened is None:
            return None  # the memory holds a newer version, or another host has it
        try:
            verify(opened.data, entry, manifest.shm)
        except ChecksumMismatch:
            if manifest.key is None and manifest.host == self._host:
                raise
            return None
        return parse(opened.data, where), opened.inode

    def _from_store(self, manifest: WeightManifest, entry: FileEntry, where: str) -> dict[str, torch.Tensor]:
        # A container may have another name than its host, and the memory of the host.
        is_here = manifest.host == self._host or manifest.shm is None or Path(manifest.shm).parent.is_dir()
        if manifest.key is None and not is_here:
            text = (
                f"weights.transport=shm: version {manifest.version} is in the shared memory of {manifest.host}, and "
                f"not durable, so {self._host} cannot read it. Set weights.transport=object_store or nccl, or "
                "weights.durable_every=1"
            )
            if self._elsewhere in (None, manifest):  # the run may be resumed on this host
                self._elsewhere = manifest
                raise MissingObject(text)
            raise ConfigError(text)  # a trainer publishes there
        if manifest.key is None:
            raise MissingObject(
                f"weights of version {manifest.version}: gone from shared memory of {manifest.host} and not durable; "
                "the next announced version replaces them"
            )
        if manifest.delta is None:
            return parse_copy(self._read_whole(f"{manifest.key}/{entry.name}", entry), where)
        self._uses_deltas = True
        whole = self._read_whole(manifest.delta.base.name, manifest.delta.base)
        key = f"{manifest.key}/{manifest.delta.entry.name}"
        delta = read_verified(self._store, key, manifest.delta.entry)
        region = copy_of(whole)
        apply_delta(region.buffer, delta, where)
        verify(region.buffer, entry, where)
        return parse(region.buffer, where)

    def _read_whole(self, key: str, entry: FileEntry) -> bytes:
        """The bytes of a version that is stored whole. In a run with deltas they stay here for the next delta."""
        if self._whole is not None and self._whole[0] == entry.digest:
            return self._whole[1]
        data = read_verified(self._store, key, entry)
        if self._uses_deltas:
            self._whole = entry.digest, data
        return data
