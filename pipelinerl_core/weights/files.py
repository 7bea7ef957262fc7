"""The bytes of one weight version: one safetensors file and the manifest that vouches for it."""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict

import torch
from safetensors import torch as safetensors

from pipelinerl_core.errors import ChecksumMismatch
from pipelinerl_core.types import FileEntry, WeightManifest

WEIGHTS_FILE = "model.safetensors"
MANIFEST_FILE = "manifest.json"
UNREADABLE_COUNTER = "unreadable_version"
"""Counter in an actor's syncs: the announced version that it could not read, -1 for none."""


def serialize(tensors: Mapping[str, torch.Tensor]) -> bytes:
    """safetensors bytes of a state dict, names sorted: equal weights give equal bytes."""
    return safetensors.save({name: tensors[name].contiguous() for name in sorted(tensors)})


def entry_of(name: str, data: bytes) -> FileEntry:
    """Name, size and sha256 of some bytes."""
    return FileEntry(name=name, size=len(data), sha256=hashlib.sha256(data).hexdigest())


def verify(data: bytes, entry: FileEntry, where: str) -> None:
    """Raise ChecksumMismatch unless the bytes are the ones the manifest names."""
    if len(data) != entry.size:
        raise ChecksumMismatch(f"{where}/{entry.name}: {len(data)} bytes, the manifest says {entry.size}")
    found = hashlib.sha256(data).hexdigest()
    if found != entry.sha256:
        raise ChecksumMismatch(f"{where}/{entry.name}: sha256 {found[:12]}, the manifest says {entry.sha256[:12]}")


def manifest_bytes(manifest: WeightManifest) -> bytes:
    """manifest.json."""
    return json.dumps(asdict(manifest), indent=1).encode()
