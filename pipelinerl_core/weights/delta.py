"""The difference of two weight versions: an Arrow stream of the 16-bit words that differ, compressed with zstd.

A record batch is for `_BATCH_WORDS` words of the file. For each word that differs it has `gap`, the distance from the
word before that differs (of the first: from the first word of the batch), and `value`, the new word. A step at a
learning rate of 1e-6 changes 0.4 % of bfloat16 weights (docs/results/weights.md).

Shapes: W = words of a file, D = words of a batch that differ.
"""

import mmap

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from pipelinerl_core.errors import ChecksumMismatch

Buffer = bytes | memoryview | mmap.mmap

_WORD = np.uint16
_BATCH_WORDS = 1 << 22
_SCHEMA = pa.schema([("gap", pa.uint32()), ("value", pa.uint16())])


def encode_delta(old: Buffer, new: Buffer, limit: int) -> memoryview | None:
    """The words of `new` that differ from `old`; None if they take more than `limit` bytes, or the sizes differ."""
    if len(old) != len(new) or len(new) % _WORD().itemsize:
        return None
    old_W, new_W = np.frombuffer(old, _WORD), np.frombuffer(new, _WORD)
    sink = pa.BufferOutputStream()
    options = pa.ipc.IpcWriteOptions(compression=pa.Codec("zstd", compression_level=1))
    with pa.ipc.new_stream(sink, _SCHEMA, options=options) as writer:
        for begin in range(0, len(new_W), _BATCH_WORDS):
            part = slice(begin, begin + _BATCH_WORDS)
            places_D = np.flatnonzero(old_W[part] != new_W[part])
            gaps_D = np.diff(places_D, prepend=0).astype(np.uint32)
            writer.write_batch(pa.record_batch([gaps_D, new_W[part][places_D]], schema=_SCHEMA))
            if sink.tell() > limit:
                return None
    return memoryview(sink.getvalue())


def apply_delta(target: Buffer, delta: bytes | memoryview, where: str) -> None:
    """Apply a difference in place: `target` has the bytes of the old version before, and of the new version after.

    Raises ChecksumMismatch, which names `where`, if the delta cannot belong to a file of this size.
    """
    words_W: NDArray[np.uint16] = np.frombuffer(target, _WORD)
    try:
        with pa.ipc.open_stream(delta) as batches:
            for index, batch in enumerate(batches):
                part_W = words_W[index * _BATCH_WORDS : (index + 1) * _BATCH_WORDS]
                places_D = np.cumsum(batch.column("gap").to_numpy(), dtype=np.int64)
                part_W[places_D] = batch.column("value").to_numpy()
    except (pa.ArrowException, IndexError, KeyError) as error:
        raise ChecksumMismatch(f"{where}: no delta of a file of {len(target):,} bytes: {error}") from None
