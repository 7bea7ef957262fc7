"""The files of one weight version: one safetensors file, and the manifest with its checksum.

The safetensors file holds all weights, or only adapters with a note in its header (algo/adapters.py).
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

# One key of the header holds the whole note: the order of several keys in the file is not defined.
_NOTE_KEY = "pipelinerl.adapters"


def serialize(tensors: Mapping[str, torch.Tensor]) -> bytes:
    """safetensors bytes of a state dict, names sorted: equal weights give equal bytes.

    The bytes of `Adapters` include the note, so that the checksum of a version covers scale and base model.
    """
    metadata = None
    if isinstance(tensors, Adapters):
        metadata = {_NOTE_KEY: json.dumps(asdict(tensors.note), sort_keys=True)}
    return safetensors.save({name: tensors[name].contiguous() for name in sorted(tensors)}, metadata)


def deserialize(data: bytes, where: str) -> dict[str, torch.Tensor]:
    """The inverse of `serialize`: `Adapters` if the header has a note. Raises ChecksumMismatch for other bytes."""
    try:
        tensors = safetensors.load(data)
        if not any(map(is_factor, tensors)):
            return tensors
        # safetensors reads metadata only from files, hence a copy. Adapters are small; all weights would take long.
        with open(os.memfd_create("adapters"), "wb") as file:
            file.write(data)
            file.flush()
            with safe_open(f"/proc/self/fd/{file.fileno()}", framework="pt") as opened:
                text = (opened.metadata() or {}).get(_NOTE_KEY)
        return tensors if text is None else Adapters(tensors, AdapterNote(**json.loads(text)))
    except (SafetensorError, ValueError, TypeError) as error:
        raise ChecksumMismatch(f"{where}: not a file of weights: {error}") from None


def is_weights(entry: FileEntry) -> bool:
    """Whether the entry is the weights file or the adapters file of a version."""
    return entry.name in (WEIGHTS_FILE, ADAPTERS_FILE)


def entry_of(name: str, data: bytes) -> FileEntry:
    """Name, size and sha256 of some bytes."""
    return FileEntry(name=name, size=len(data), sha256=hashlib.sha256(data).hexdigest())


def verify(data: bytes, entry: FileEntry, where: str) -> None:
    """Raise ChecksumMismatch unless size and sha256 of the bytes are as in the manifest."""
    if len(data) != entry.size:
        raise ChecksumMismatch(f"{where}/{entry.name}: {len(data)} bytes, the manifest says {entry.size}")
    digest = hashlib.sha256(data).hexdigest()
    if digest != entry.sha256:
        raise ChecksumMismatch(f"{where}/{entry.name}: sha256 {digest[:12]}, the manifest says {entry.sha256[:12]}")


def manifest_bytes(manifest: WeightManifest) -> bytes:
    """The bytes of manifest.json."""
    return json.dumps(asdict(manifest), indent=1).encode()
