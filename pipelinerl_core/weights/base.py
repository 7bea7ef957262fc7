"""The weights of the model directory that a run starts from, into which adapters are merged.

The files are memory-mapped and read when a weight is requested, so only merged layers are in memory twice.
"""

from collections.abc import Mapping
from contextlib import ExitStack
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from blake3 import blake3
from safetensors import safe_open
from torch import Tensor

from pipelinerl_core.algo.adapters import Adapters, merge
from pipelinerl_core.errors import ChecksumMismatch, ConfigError
from pipelinerl_core.models.paths import weight_files
from pipelinerl_core.storage.digests import SHOWN_DIGITS


class BaseWeights:
    """Weights of a model directory by the names in its safetensors files. The files must not change."""

    def __init__(self, directory: Path) -> None:
        """Raises ConfigError when the directory has no weights in safetensors files."""
        self._directory = directory
        self._open_files = ExitStack()
        self._file_of: dict[str, Any] = {}
        for path in weight_files(directory):
            file: Any = self._open_files.enter_context(safe_open(path, framework="pt"))
            self._file_of |= dict.fromkeys(file.keys(), file)
        if not self._file_of:
            raise ConfigError(
                f"model.path={directory}: weights.content=adapters are merged into weights of safetensors files, "
                "and it has none. Convert them, or set weights.content=merged"
            )

    def __contains__(self, name: str) -> bool:
        return name in self._file_of

    def tensor(self, name: str) -> Tensor:
        """A weight in the dtype of its file; memory-mapped, so that pages are read at first use."""
        tensor: Tensor = self._file_of[name].get_tensor(name)
        return tensor

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._file_of[name].get_slice(name).get_shape())

    def check(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        """Raise ConfigError unless the files have weights of these names and shapes, as merging adapters requires."""
        for name, shape in shapes.items():
            if name not in self or self.shape(name) != shape:
                existing = f"{list(self.shape(name))} there" if name in self else "not there"
                raise ConfigError(
                    f"model.path={self._directory}: weights.content=adapters are merged into the weights of its "
                    f"files, but {name} {list(shape)} is {existing}. Set weights.content=merged"
                )

    @cached_property
    def digest(self) -> str:
        """BLAKE3 of name, dtype, shape and bytes of all weights, sorted by name; independent of the split into files.

        Reads every file once, at first use.
        """
        digest = blake3()
        for name in sorted(self._file_of):
            tensor = self.tensor(name)
            digest.update(f"{name} {tensor.dtype} {list(tensor.shape)}\n".encode())
            digest.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
        return digest.hexdigest()

    def merged(self, adapters: Adapters, where: str) -> dict[str, Tensor]:
        """The adapted weights, merged, in the dtype of the note. Needs memory for these weights and one more layer.

        where: what the adapters are read from, for errors.
        Raises ChecksumMismatch if the adapters belong to another base model or do not fit its shapes.
        """
        note = adapters.note
        if note.base_digest != self.digest:
            raise ChecksumMismatch(
                f"{where}: adapters of a base model with the digest {note.base_digest[:SHOWN_DIGITS]}, but the "
                f"model in {self._directory} has {self.digest[:SHOWN_DIGITS]}. Put the run's starting model there"
            )
        dtype = _dtype(note.dtype, where)
        try:
            return {
                name: merge(self.tensor(name).to(dtype), a_RI, b_OR, note.scale)
                for name, a_RI, b_OR in adapters.pairs()
            }
        except (KeyError, ValueError, RuntimeError) as error:
            raise ChecksumMismatch(f"{where}: no adapters of the model in {self._directory}: {error}") from None

    def whole(self, adapters: Adapters, where: str) -> dict[str, Tensor]:
        """`merged`, and all other weights, in the dtype of the note; memory-mapped if the file has this dtype."""
        dtype = _dtype(adapters.note.dtype, where)
        merged = self.merged(adapters, where)
        return {name: merged[name] if name in merged else self.tensor(name).to(dtype) for name in self._file_of}

    def close(self) -> None:
        self._file_of = {}
        self._open_files.close()


def _dtype(name: str, where: str) -> torch.dtype:
    dtype = getattr(torch, str(name), None)
    if not isinstance(dtype, torch.dtype):
        raise ChecksumMismatch(f"{where}: adapters of a type {name!r}, which torch does not have")
    return dtype
