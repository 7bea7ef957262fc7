"""The bytes of one weight version: one safetensors file and the manifest that vouches for it.

The file holds all weights, or adapters alone with a note in its header (algo/adapters.py).
"""

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import asdict

import torch
from safetensors import SafetensorError, safe_open
from safetensors import torch as safetensors

from pipelinerl_core.algo.adapters import AdapterNote, Adapters, is_factor
from pipelinerl_core.errors import ChecksumMismatch
from pipelinerl_core.run.records import ADAPTERS_FILE, WEIGHTS_FILE
from pipelinerl_core.types import FileEntry, WeightManifest

MANIFEST_FILE = "manifest.json"
UNREADABLE_COUNTER = "unreadable_version"
"""Counter in an actor's syncs: the announced version that it could not read, -1 for none."""


# One key of the header for the whole note: several would be written in any order.
_NOTE_KEY = "pipelinerl.adapters"


def serialize(tensors: Mapping[str, torch.Tensor]) -> bytes:
    """safetensors bytes of a state dict, names sorted: equal weights give equal bytes.

    Those of `Adapters` carry the note, so that the checksum of a version covers scale and base model too.
    """
    metadata = None
    if isinstance(tensors, Adapters):
        metadata = {_NOTE_KEY: json.dumps(asdict(tensors.note), sort_keys=True)}
    return safetensors.save({name: tensors[name].contiguous() for name in sorted(tensors)}, metadata)


def deserialize(data: bytes, where: str) -> dict[str, torch.Tensor]:
    """The inverse of `serialize`: `Adapters` where the header says so. Raises ChecksumMismatch for anything else."""
    try:
        tensors = safetensors.load(data)
        if not any(map(is_factor, tensors)):
            return tensors
        # safetensors reads metadata from files alone. Adapters are small; a copy of all weights would take a while.
        with open(os.memfd_create("adapters"), "wb") as file:
            file.write(data)
            file.flush()
            with safe_open(f"/proc/self/fd/{file.fileno()}", framework="pt") as opened:
                text = (opened.metadata() or {}).get(_NOTE_KEY)
        return tensors if text is None else Adapters(tensors, AdapterNote(**json.loads(text)))
    except (SafetensorError, ValueError, TypeError) as error:
        raise ChecksumMismatch(f"{where}: not a file of weights: {error}") from None


def is_weights(entry: FileEntry) -> bool:
    """Whether it is the file of a version that holds its weights, or its adapters."""
    return entry.name in (WEIGHTS_FILE, ADAPTERS_FILE)


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
