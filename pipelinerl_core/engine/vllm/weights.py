"""Checks new weights against the model and stages them in a file that vLLM's workers can read.

A failed update ends the engine core, so this module makes every check that is possible before the update.
"""

import contextlib
import json
import os
import shutil
import tempfile
from collections.abc import Collection, Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors import torch as safetensors
from torch import Tensor

from pipelinerl_core.engine.vllm.names import FileNames, file_shapes
from pipelinerl_core.errors import SwapError
from pipelinerl_core.interfaces import WeightUpdate
from pipelinerl_core.models.paths import weight_files
from pipelinerl_core.run.context import private_directory

_SHARED_MEMORY = Path("/dev/shm")
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class StagedWeights:
    """Files of the loaded weights and of the next weights, in shared memory if the host has shared memory."""

    def __init__(self, model: str, directory: Path | None = None) -> None:
        """Raises EngineError.

        model: directory with config.json and safetensors. directory: where to stage, created if missing; on the file
        system of the published files a hard link replaces a copy. None: a new directory in shared memory.
        """
        self._model = Path(model)
        in_files = file_shapes(self._model)
        self._tied = _tied_names(self._model, in_files)
        # Files may have a copy of a tied head and, from older versions of transformers, angles that no weight names.
        unused = {name for name in in_files if name in self._tied or name.endswith("rotary_emb.inv_freq")}
        self._shapes = {name: shape for name, shape in in_files.items() if name not in unused}
        self._accepted: tuple[object, ...] = ()
        """Names, shapes and types of the last update that passed."""
        self._names = FileNames(self._model, self._shapes.keys() | self._tied.keys())
        if directory is None:
            memory = _SHARED_MEMORY if _SHARED_MEMORY.is_dir() else None
            directory = Path(tempfile.mkdtemp(prefix="pipelinerl-vllm-", dir=memory))
        self._made = [path for path in (directory, *directory.parents) if not path.exists()]
        for path in reversed(self._made):
            private_directory(path)
        self._directory = directory
        self.current: Path | None = None
        """Weights for the next start of the engine core; None: the model directory."""
        self._staged: tuple[Path, Mapping[str, Tensor]] | None = None
        self._held: Mapping[str, Tensor] | None = None
        """The tensors of `current`: while they exist, the trainer does not write the linked file again."""

    def check(self, tensors: Mapping[str, Tensor], *, is_partial: bool = False) -> None:
        """Raise SwapError unless `tensors` are all weights of this model, or some of them if is_partial.

        For tied weights (an embedding that is also the head) one of the two names is enough. A weight may have the
        name and shape of the learner instead of those in the files.
        """
        for alias, name in self._tied.items():
            if alias in tensors and name in tensors and not torch.equal(tensors[alias], tensors[name]):
                raise SwapError(f"{name!r} and {alias!r} are tied in this model but differ in the update")
        self.check_layout({name: torch.empty_like(tensor, device="meta") for name, tensor in tensors.items()},
                          is_partial=is_partial)  # fmt: skip

    def check_layout(self, tensors: Mapping[str, Tensor], *, is_partial: bool = False) -> None:
        """As `check`, of tensors without values (device "meta")."""
        layout = tuple((name, tuple(tensor.shape), tensor.dtype) for name, tensor in tensors.items())
        if layout == self._accepted and not is_partial:
            return
        try:
            tensors = dict(self._names.converted(tensors.items()))
        except Exception as error:
            raise SwapError(f"the update cannot be converted to the form of the model's files: {error}") from error
        for name, tensor in tensors.items():
            if name not in self._shapes and name not in self._tied:
                unknown = sorted(set(tensors) - set(self._shapes) - set(self._tied))
                raise SwapError(
                    f"the update names {unknown[0]!r} ({len(unknown)} such), which is no weight of this model"
                )
            shape = self._shapes.get(name) or self._shapes[self._tied[name]]
            if tuple(tensor.shape) != shape or tensor.dtype not in _DTYPES:
                raise SwapError(
                    f"{name}: the update is {tensor.dtype} {tuple(tensor.shape)}, the model has {shape} in float32, "
                    "bfloat16 or float16"
                )
        given = {self._tied.get(name, name) for name in tensors}
        lacking = sorted(set(self._shapes) - given)
        if lacking and not is_partial:
            raise SwapError(f"the update lacks {lacking[0]!r}; it has {len(given)} of {len(self._shapes)} weights")
        if not is_partial:
            self._accepted = layout

    def stage(self, update: WeightUpdate) -> Path:
        """Put an update into a file that every worker of this host can read; returns the file.

        The published file is hard-linked, so the staged file stays complete when the publisher removes the published
        file. Weights that a partial update lacks are copied from the loaded weights: vLLM loads all weights or none,
        and a restart of the engine core reads this file. Raises SwapError if there is no space for the file.
        """
        path = self._directory / f"{update.version:08d}.safetensors"
        path.unlink(missing_ok=True)
        self._staged = None
        if update.path is not None and not self._tied.keys() & update.tensors.keys():
            with contextlib.suppress(OSError):  # gone, or on another file system
                os.link(update.path, path)
                if path.stat().st_ino == update.inode:  # else the version was published again meanwhile
                    self._staged = path, update.tensors
                    return path
                path.unlink()
        given = self._names.converted(update.tensors.items()) if update.is_partial else update.tensors.items()
        tensors = {self._tied.get(name, name): tensor.contiguous() for name, tensor in given}
        with contextlib.ExitStack() as files:
            if update.is_partial:
                tensors = self._loaded(files, leave_out=tensors) | tensors
            self._save(tensors, path)
        return path

    def _save(self, tensors: Mapping[str, Tensor], path: Path) -> None:
        try:
            safetensors.save_file(dict(tensors), path)
        except (OSError, SafetensorError) as error:
            path.unlink(missing_ok=True)
            wanted = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
            free = shutil.disk_usage(self._directory).free
            raise SwapError(
                f"{path}: could not be written ({error}): {wanted / 1e9:.1f} GB wanted, {free / 1e9:.1f} GB free. "
                "Enlarge /dev/shm (docker run --shm-size; shm_size of a pool), or set weights.transport=nccl"
            ) from None

    def _loaded(self, files: contextlib.ExitStack, leave_out: Collection[str]) -> dict[str, Tensor]:
        """The other weights of the engine core, memory-mapped from files that `files` closes."""
        tensors: dict[str, Tensor] = {}
        for path in weight_files(self._model) if self.current is None else [self.current]:
            file = files.enter_context(safe_open(path, framework="pt"))
            tensors |= {name: file.get_tensor(name) for name in file.keys() if name not in leave_out}  # noqa: SIM118
        return tensors

    def set_current(self, path: Path | None) -> None:
        """Record that the engine core has the weights of `path` (None: of a broadcast), and remove other files."""
        self.current = path
        self._held = self._staged[1] if self._staged is not None and self._staged[0] == path else None
        for other in self._directory.iterdir():
            if other != path:
                other.unlink(missing_ok=True)

    def close(self) -> None:
        """Remove all files, and the directories that this object created."""
        shutil.rmtree(self._directory, ignore_errors=True)
        for path in self._made:
            with contextlib.suppress(OSError):  # not empty: another process uses the directory
                path.rmdir()


def _tied_names(model: Path, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, str]:
    """Name of the head -> name of the embedding if the model ties the two; else empty."""
    config = json.loads((model / "config.json").read_text(encoding="utf-8"))
    embeddings = [name for name in shapes if name.endswith("embed_tokens.weight")]
    is_tied = bool(config.get("tie_word_embeddings")) and bool(embeddings)
    return {"lm_head.weight": embeddings[0]} if is_tied else {}
