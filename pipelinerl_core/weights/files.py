"""The safetensors file of a weight version, laid out in memory: tensors are written and read in place.

The file holds all weights, or only adapters with a note in its header (algo/adapters.py). Equal weights give equal
bytes: the order of the tensors and the size of the header depend only on names, types and shapes. Tensors begin at
multiples of 64 bytes, as those that torch allocates, if their sizes are such multiples; the others come last.
"""

import json
import math
import mmap
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import cached_property
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pipelinerl_core.algo.adapters import AdapterNote, Adapters
from pipelinerl_core.errors import ChecksumMismatch
from pipelinerl_core.interfaces import Learner, TensorMeta, WeightLayout
from pipelinerl_core.run.records import ADAPTERS_FILE, WEIGHTS_FILE
from pipelinerl_core.storage.digests import entry_of
from pipelinerl_core.types import FileEntry
from pipelinerl_core.weights.memory import Region, WeightMemory, private_memory

# One key of the header holds the whole note: the order of several keys in the file is not defined.
_METADATA, _NOTE_KEY = "__metadata__", "pipelinerl.adapters"
_LENGTH_BYTES = 8
_ALIGNMENT = 64
_TYPES: Mapping[str, torch.dtype] = MappingProxyType(
    {
        "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
        "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8,
        "BOOL": torch.bool,
    }
)  # fmt: skip
"""safetensors' name of a type -> torch's type."""
_NAMES = MappingProxyType({str(dtype).removeprefix("torch."): name for name, dtype in _TYPES.items()})


@dataclass(frozen=True, eq=False)
class Snapshot:
    """The weights after a step, in one region of memory with the bytes of their file. Do not change the tensors."""

    tensors: Mapping[str, Tensor]
    """Views of the region by name; `Adapters` if the file has a note."""
    region: Region

    @property
    def data(self) -> "memoryview | mmap.mmap":
        """The bytes of the file."""
        return self.region.buffer

    @cached_property
    def entry(self) -> FileEntry:
        """Size and digest of the bytes, computed at first use; the name is that of all weights or of adapters."""
        return entry_of(ADAPTERS_FILE if isinstance(self.tensors, Adapters) else WEIGHTS_FILE, self.data)


def lay_out(layout: WeightLayout, memory: WeightMemory = private_memory) -> Snapshot:
    """A snapshot with undefined values, to write the weights into. Raises OSError if the memory has no space."""
    header: dict[str, Any] = {}
    if layout.note is not None:
        header[_METADATA] = {_NOTE_KEY: json.dumps(asdict(layout.note), sort_keys=True)}
    end = 0
    for meta in sorted(layout.metas, key=_place):
        begin, end = end, end + num_bytes(meta)
        header[meta.name] = {"dtype": _NAMES[meta.dtype], "shape": list(meta.shape), "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-(_LENGTH_BYTES + len(text)) % _ALIGNMENT)
    start = _LENGTH_BYTES + len(text)
    region = memory(start + end)
    region.buffer[:start] = len(text).to_bytes(_LENGTH_BYTES, "little") + text
    return Snapshot(parse(region.buffer, "new weights"), region)


def take_snapshot(learner: Learner, memory: WeightMemory = private_memory) -> Snapshot:
    """The weights of a learner, copied once. Raises OSError if the memory has no space."""
    snapshot = lay_out(learner.layout(), memory)
    learner.weights(snapshot.tensors)
    return snapshot


def metas_of(tensors: Mapping[str, Tensor]) -> tuple[TensorMeta, ...]:
    """Name, type and shape of each tensor, sorted by name."""
    return tuple(
        TensorMeta(name, str(tensors[name].dtype).removeprefix("torch."), tuple(tensors[name].shape))
        for name in sorted(tensors)
    )


def parse(data: "memoryview | mmap.mmap | bytearray", where: str) -> dict[str, Tensor]:
    """The tensors of a file, as views of its bytes: `Adapters` if its header has a note.

    where: for messages. Raises ChecksumMismatch if the bytes are no such file.
    """
    try:
        start = _LENGTH_BYTES + int.from_bytes(data[:_LENGTH_BYTES], "little")
        if start > len(data):
            raise ValueError(f"a header of {start:,} bytes")
        header = json.loads(bytes(data[_LENGTH_BYTES:start]))
        metadata = header.pop(_METADATA, None) or {}
        tensors = {name: _view(data, start, values) for name, values in header.items()}
        note = metadata.get(_NOTE_KEY)
        return tensors if note is None else Adapters(tensors, AdapterNote(**json.loads(note)))
    except (ValueError, TypeError, KeyError, AttributeError, RuntimeError) as error:
        raise ChecksumMismatch(f"{where}: not a file of weights: {error}") from None


def parse_copy(data: bytes, where: str) -> dict[str, Tensor]:
    """`parse` on a copy of the bytes; other threads of the process run meanwhile."""
    return parse(copy_of(data).buffer, where)


def copy_of(data: bytes) -> Region:
    """Memory of this process with a copy of the bytes."""
    region = private_memory(max(1, len(data)))
    np.copyto(np.frombuffer(region.buffer, np.uint8)[: len(data)], np.frombuffer(data, np.uint8))
    return region


def is_weights(entry: FileEntry) -> bool:
    """Whether the entry is the weights file or the adapters file of a version."""
    return entry.name in (WEIGHTS_FILE, ADAPTERS_FILE)


def _view(data: "memoryview | mmap.mmap | bytearray", start: int, values: Mapping[str, Any]) -> Tensor:
    dtype, shape = _TYPES[values["dtype"]], values["shape"]
    begin, end = values["data_offsets"]
    count = math.prod(shape)
    if end - begin != count * dtype.itemsize:
        raise ValueError(f"{end - begin} bytes for {count} values")
    if not count:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(data, dtype=dtype, count=count, offset=start + begin).view(shape)


def num_bytes(meta: TensorMeta) -> int:
    """Size of a tensor."""
    return math.prod(meta.shape) * _TYPES[_NAMES[meta.dtype]].itemsize


def _place(meta: TensorMeta) -> tuple[bool, int, str]:
    """Position in the file: sizes that keep the alignment first, then large types before small ones."""
    size = num_bytes(meta)
    return size % _ALIGNMENT != 0, -_TYPES[_NAMES[meta.dtype]].itemsize, meta.name
