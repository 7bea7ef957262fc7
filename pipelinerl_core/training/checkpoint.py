"""Writes, verifies and prunes checkpoints in the object store.

The data is written first, the manifest with sizes and digests last.

checkpoints/<step>.<k>/state.safetensors, then checkpoints/<step>.<k>/manifest.json
"""

from collections.abc import Mapping
from typing import Any

import safetensors.torch
from torch import Tensor

from pipelinerl_core.errors import MissingObject, StoreError
from pipelinerl_core.interfaces import ObjectStore
from pipelinerl_core.run.reading import list_keys, read_record
from pipelinerl_core.run.records import CheckpointManifest, checkpoint_prefix
from pipelinerl_core.storage.digests import entry_of, read_verified

_MANIFEST = "manifest.json"
_DATA = "state.safetensors"


def save_checkpoint(
    store: ObjectStore, step: int, epoch: int, tensors: Mapping[str, Tensor], values: Mapping[str, Any]
) -> CheckpointManifest:
    """Write a learner's state after `step`. Returns after the manifest, which completes the checkpoint, is stored."""
    prefix = checkpoint_prefix(step, epoch)
    data: bytes = safetensors.torch.save(dict(tensors))
    entry = entry_of(_DATA, data)
    manifest = CheckpointManifest(step=step, epoch=epoch, files=(entry,), values=dict(values))
    store.put(f"{prefix}/{_DATA}", data)
    store.put(f"{prefix}/{_MANIFEST}", manifest.model_dump_json(indent=1).encode())
    return manifest


def load_checkpoint(store: ObjectStore, step: int, epoch: int) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Read and verify the tensors and values of a checkpoint.

    Raises MissingObject without a manifest, ChecksumMismatch if the data differs from the manifest, StoreError if the
    manifest cannot be read or names a missing object.
    """
    prefix = checkpoint_prefix(step, epoch)
    key = f"{prefix}/{_MANIFEST}"
    manifest = read_record(store, key, CheckpointManifest)
    tensors: dict[str, Tensor] = {}
    for entry in manifest.files:
        try:
            tensors |= safetensors.torch.load(read_verified(store, f"{prefix}/{entry.name}", entry))
        except MissingObject as error:
            raise StoreError(f"{store.url}/{key} names a missing object: {error}") from error
    return tensors, manifest.values


def prune_checkpoints(store: ObjectStore, keep: int = 2) -> list[tuple[int, int]]:
    """Delete all checkpoints but step 0 and the newest `keep` complete ones; returns their (step, epoch).

    Step 0 stays because a replay of the whole run starts there. Older incomplete checkpoints are deleted too.

    A checkpoint of a later epoch is newer, independent of its step: an earlier epoch may have made steps that the
    later epoch did not adopt. Keep at least 2, because a checkpoint is used only after a later commit names it.
    Manifests are deleted first, so that an interrupted deletion leaves no checkpoint that looks complete.
    """
    keys = list_keys(store, "checkpoints")
    by_age = sorted({_parse(key) for key in keys}, reverse=True)
    finished = [age for age in by_age if f"{checkpoint_prefix(age[1], age[0])}/{_MANIFEST}" in keys]
    if len(finished) <= keep:
        return []
    doomed = [(step, epoch) for epoch, step in by_age if step > 0 and (epoch, step) < finished[keep - 1]]
    for step, epoch in doomed:
        prefix = checkpoint_prefix(step, epoch)
        store.delete([f"{prefix}/{_MANIFEST}"])
        store.delete([key for key in keys if key.startswith(f"{prefix}/")])
    return doomed


def _parse(key: str) -> tuple[int, int]:
    """(epoch, step) of checkpoints/<step>.<epoch>/<file>."""
    step, epoch = key.split("/")[1].split(".")
    return int(epoch), int(step)
