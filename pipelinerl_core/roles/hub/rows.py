"""Keeps the rows of ready and reserved groups in the hub's memory, within a limit of bytes.

    a group arrives --keep--> in memory --seal--> in memory and in a segment --make_room--> in its segment only
                                  |                                                            |
                                  +------------------------ drop <-----------------------------+

The memory accepts all rows. If the limit is near, rows that are also in a segment are dropped. Credit, which depends
on the free memory, limits how many groups the actors send.
"""

from collections.abc import Iterable
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import NamedTuple

import pyarrow as pa

from pipelinerl_core.data.schema import ROLLOUT_SCHEMA
from pipelinerl_core.interfaces import RowSlice
from pipelinerl_core.types import GroupKey

GROUP_BYTES = 32 << 10
"""Memory of the Arrow and ledger objects of one group, in addition to its values."""
_GROUP_ID_AT = ROLLOUT_SCHEMA.get_field_index("group_id")
SEALED_SHARE = 0.75
"""Share of the limit above which sealed rows are dropped: the rest is reserved for arriving groups."""


@dataclass(slots=True, eq=False)
class _Write:
    """The memory of one Flight write; it is freed when the rows of its last group are dropped."""

    address: int
    num_bytes: int
    num_groups: int = 0


class WrittenGroup(NamedTuple):
    """One group of a write."""

    key: GroupKey
    start: int
    """Index of the group's first row in the batch."""
    num_rows: int
    is_sealed: bool


class _Kept(NamedTuple):
    rows: RowSlice
    write: _Write


class RowMemory:
    """Rows by group. Not thread-safe: the hub uses it under its lock."""

    def __init__(self, budget_bytes: int, default_group_bytes: int) -> None:
        """`default_group_bytes`: estimated size of a group's values, used while the memory is empty."""
        self.used_bytes = 0
        """Bytes of all kept writes, plus GROUP_BYTES per kept group."""
        self._budget_bytes = budget_bytes
        self._default_group_bytes = default_group_bytes + GROUP_BYTES
        self._rows: dict[GroupKey, _Kept] = {}
        self._sealed: dict[GroupKey, None] = {}  # kept groups that are in a segment, in the order of sealing
        self._writes: dict[int, _Write] = {}

    def __len__(self) -> int:
        return len(self._rows)

    def get(self, key: GroupKey) -> pa.RecordBatch | None:
        """The rows of a group; None if they are not in memory."""
        stored = self.find(key)
        return None if stored is None else stored.rows()

    def find(self, key: GroupKey) -> RowSlice | None:
        """The position of a group's rows; None if they are not in memory."""
        kept = self._rows.get(key)
        return None if kept is None else kept.rows

    def keep(self, key: GroupKey, rows: pa.RecordBatch, *, is_sealed: bool = False) -> None:
        """Keep the rows of one group; no effect if they are already in memory."""
        self.keep_all(rows, [WrittenGroup(key, 0, rows.num_rows, is_sealed)])

    def keep_all(self, batch: pa.RecordBatch, groups: Iterable[WrittenGroup]) -> None:
        """Keep the rows of the groups of one write, except groups that are already in memory."""
        write = None
        for key, start, num_rows, is_sealed in groups:
            if key in self._rows:
                continue
            if write is None:
                write = self._write_of(batch)
            write.num_groups += 1
            self._rows[key] = _Kept(RowSlice(batch, start, num_rows), write)
            self.used_bytes += GROUP_BYTES
            if is_sealed:
                self._sealed[key] = None
        self.make_room()

    def _write_of(self, batch: pa.RecordBatch) -> _Write:
        address = _address(batch)
        write = self._writes.get(address)
        if write is None:
            write = self._writes[address] = _Write(address, batch.get_total_buffer_size())
            self.used_bytes += write.num_bytes
        return write

    def seal(self, keys: Iterable[GroupKey]) -> None:
        """Note that the rows of these groups are also in a segment."""
        self._sealed.update(dict.fromkeys(key for key in keys if key in self._rows))
        self.make_room()

    def keep_only(self, needed: AbstractSet[GroupKey]) -> None:
        for key in self._rows.keys() - needed:
            self._drop(key)

    def make_room(self) -> None:
        """Drop sealed rows, the last sealed first, while more than SEALED_SHARE of the limit is used, or while no
        further group fits."""
        while self._sealed and (self.used_bytes > SEALED_SHARE * self._budget_bytes or self.free_groups() < 1):
            self._drop(next(reversed(self._sealed)))

    def free_groups(self) -> float:
        """How many groups fit into the free memory, by the mean size of kept groups; negative above the limit."""
        group_bytes = self.used_bytes / len(self._rows) if self._rows else self._default_group_bytes
        # A group larger than the limit must fit once the memory is empty.
        return (self._budget_bytes - self.used_bytes) / min(group_bytes, self._budget_bytes)

    def _drop(self, key: GroupKey) -> None:
        write = self._rows.pop(key).write
        self._sealed.pop(key, None)
        self.used_bytes -= GROUP_BYTES
        write.num_groups -= 1
        if not write.num_groups:
            del self._writes[write.address]
            self.used_bytes -= write.num_bytes


def _address(rows: pa.RecordBatch) -> int:
    """The address of the write's memory, equal for all groups of one write."""
    address: int = rows.column(_GROUP_ID_AT).buffers()[1].address
    return address
