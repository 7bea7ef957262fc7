"""Writes, verifies and prunes checkpoints in the object store.

The data is written first, the manifest with sizes and digests last.

checkpoints/<step>.<k>/state-<number>.safetensors, then checkpoints/<step>.<k>/manifest.json

If the state is divided among ranks, rank r writes its part into state-<r>-<number>.safetensors.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol

from torch import Tensor

from pipelinerl_core.errors import MissingObject, StoreError
from pipelinerl_core.interfaces import ObjectStore, TensorMeta, WeightLayout
from pipelinerl_core.run.reading import list_keys, read_record
from pipelinerl_core.run.records import (
    MANIFEST_FILE,
    CheckpointManifest,
    checkpoint_prefix,
    commit_key,
    complete_checkpoints,
    parse_step_key,
)
from pipelinerl_core.run.versions import first_of_every
from pipelinerl_core.storage.digests import entry_of, read_verified
from pipelinerl_core.storage.keys import delete_with_folders
from pipelinerl_core.types import FileEntry
from pipelinerl_core.weights.files import lay_out, metas_of, num_bytes, parse_copy

FILE_BYTES = 256 << 20


class State(Protocol):
    """The state of a learner, as `training.live_state.LiveState` is."""

    values: dict[str, Any]
    written_elsewhere: Callable[[str], Sequence[FileEntry]]
    """Waits for the files that other ranks write below a prefix."""

    @property
    def tensors(self) -> Mapping[str, Tensor]:
        """The tensors that were not taken."""

    def take(self, targets: Mapping[str, Tensor]) -> None:
        """Copy the tensors of these names into `targets`, and forget them."""


def save_checkpoint(store: ObjectStore, step: int, epoch: int, state: State) -> CheckpointManifest:
    """Write a learner's state after `step`. Returns after the manifest, which completes the checkpoint, is stored."""
    prefix = checkpoint_prefix(step, epoch)
    files = (*write_state(store, prefix, state), *state.written_elsewhere(prefix))
    manifest = CheckpointManifest(step=step, epoch=epoch, files=files, values=state.values).digested()
    store.put(f"{prefix}/{MANIFEST_FILE}", manifest.model_dump_json(indent=1).encode())
    return manifest


def write_state(store: ObjectStore, prefix: str, state: State, *, rank: int = 0) -> Iterator[FileEntry]:
    """Write the tensors of a rank; yields each file after it is stored. FILE_BYTES and the largest tensor bound the
    memory."""
    of_rank = f"{rank}-" if rank else ""
    for number, metas in enumerate(_files(metas_of(state.tensors)), 1):
        snapshot = lay_out(WeightLayout(metas))
        state.take(snapshot.tensors)
        entry = entry_of(f"state-{of_rank}{number:05d}.safetensors", snapshot.data)
        store.put(f"{prefix}/{entry.name}", memoryview(snapshot.data))
        yield entry


def _files(metas: Iterable[TensorMeta]) -> Iterator[tuple[TensorMeta, ...]]:
    """Divide tensors into files of at most FILE_BYTES; a larger tensor has a file of its own."""
    chosen: list[TensorMeta] = []
    size = 0
    for meta in metas:
        if chosen and size + num_bytes(meta) > FILE_BYTES:
            yield tuple(chosen)
            chosen, size = [], 0
        chosen.append(meta)
        size += num_bytes(meta)
    if chosen:  # a rank may have no element
        yield tuple(chosen)


def load_checkpoint(
    store: ObjectStore, step: int, epoch: int
) -> tuple[Iterator[Mapping[str, Tensor]], dict[str, Any]]:
    """The files of a checkpoint, each as its tensors by name, and the values. A file is read when it is asked for.

    Raises MissingObject without a manifest, StoreError if the manifest cannot be read. The iterator raises
    ChecksumMismatch if a file differs from the manifest, StoreError if it is missing.
    """
    manifest = read_record(store, f"{checkpoint_prefix(step, epoch)}/{MANIFEST_FILE}", CheckpointManifest)
    return _read_files(store, manifest), manifest.values


def _read_files(store: ObjectStore, manifest: CheckpointManifest) -> Iterator[Mapping[str, Tensor]]:
    prefix = checkpoint_prefix(manifest.step, manifest.epoch)
    for entry in manifest.files:
        try:
            yield parse_copy(read_verified(store, f"{prefix}/{entry.name}", entry), entry.name)
        except MissingObject as error:
            raise StoreError(f"{store.url}/{prefix}/{MANIFEST_FILE} names a missing object: {error}") from error


def prune_checkpoints(
    store: ObjectStore, counted: Mapping[int, str], keep: int = 2, keep_every: int = 0
) -> list[tuple[int, int]]:
    """Delete old checkpoints; returns (step, epoch) of each.

    Step 0, the newest `keep` complete checkpoints and the first complete one of every `keep_every` steps stay.
    Step 0 stays because a replay of the whole run starts there. Older incomplete checkpoints are deleted too.
    counted: step -> key of the commit that counts. No start uses a checkpoint of another commit: it is none of the
    `keep`, and stays if it is newer than they are.

    A checkpoint of a later epoch is newer, independent of its step: an earlier epoch may have made steps that the
    later epoch did not adopt. Keep at least 2, because a checkpoint is used only after a later commit names it.
    Manifests are deleted first, so that an interrupted deletion leaves no checkpoint that looks complete.
    """
    keys = list_keys(store, "checkpoints")
    by_age = sorted({parse_step_key(key)[::-1] for key in keys}, reverse=True)
    finished = sorted(
        ((ref.epoch, ref.step) for ref in complete_checkpoints(keys)
         if counted.get(ref.step) == commit_key(ref.step, ref.epoch)),
        reverse=True,
    )  # fmt: skip
    if len(finished) <= keep:
        return []
    kept = first_of_every((step for _, step in finished), keep_every)
    doomed = [
        (step, epoch)
        for epoch, step in by_age
        if step > 0 and (epoch, step) < finished[keep - 1] and not (step in kept and (epoch, step) in finished)
    ]
    for step, epoch in doomed:
        prefix = checkpoint_prefix(step, epoch)
        store.delete([f"{prefix}/{MANIFEST_FILE}"])
        delete_with_folders(store, [key for key in keys if key.startswith(f"{prefix}/")])
    return doomed
