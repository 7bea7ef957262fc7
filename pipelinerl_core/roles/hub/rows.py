"""The rows that the hub keeps in memory, within a budget of bytes.

    a group arrives --keep--> in memory --seal--> in memory and in a segment --make_room--> in its segment only
                                  |                                                            |
                                  +------------------------ forget <---------------------------+

What does not fit is not refused: rows that lie in a segment leave first, and credit, of which the budget is one
measure, keeps the others at their actors.
"""

from collections.abc import Iterable
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import NamedTuple

import pyarrow as pa

from pipelinerl_core.data.schema import ROLLOUT_SCHEMA
from pipelinerl_core.types import GroupKey

GROUP_BYTES = 32 << 10
"""What a group takes beside its values, however few they are: the objects of Arrow and of the ledger."""
_GROUP_ID_AT = ROLLOUT_SCHEMA.get_field_index("group_id")
SEALED_SHARE = 0.75
"""Of the budget: beyond it sealed rows leave, so that there is always room for groups that are on their way."""


@dataclass(slots=True, eq=False)
class _Write:
    """Memory of one write to the hub: it is free again when the last of its groups has gone."""

    address: int
    num_bytes: int
    num_groups: int = 0


class Place(NamedTuple):
    """Where the rows of a group lie in the batch that they came with."""

    batch: pa.RecordBatch
    start: int
    num_rows: int

    def rows(self) -> pa.RecordBatch:
        """A view of them."""
        is_all = self.num_rows == self.batch.num_rows
        return self.batch if is_all else self.batch.slice(self.start, self.num_rows)

    def follows(self, other: "Place") -> bool:
        """Whether they lie right behind those of another group."""
        return self.batch is other.batch and self.start == other.start + other.num_rows


class Arrived(NamedTuple):
    """A group of a write."""

    key: GroupKey
    start: int
    """Its first row."""
    num_rows: int
    is_sealed: bool


class _Kept(NamedTuple):
    place: Place
    write: _Write


class RowMemory:
    """Rows by group. Not thread-safe: the hub uses it under its lock."""

    def __init__(self, budget_bytes: int, usual_bytes: int) -> None:
        """`usual_bytes`: of the values of a group, as long as there is none to go by."""
        self.used_bytes = 0
        """Of all writes of which a group is kept, and of what each group takes beside."""
        self._budget_bytes = budget_bytes
        self._usual_bytes = usual_bytes + GROUP_BYTES
        self._rows: dict[GroupKey, _Kept] = {}
        self._sealed: dict[GroupKey, None] = {}  # of them, in the order in which they were sealed
        self._writes: dict[int, _Write] = {}

    def __len__(self) -> int:
        return len(self._rows)

    def get(self, key: GroupKey) -> pa.RecordBatch | None:
        """The rows of a group, if they are here."""
        place = self.place(key)
        return None if place is None else place.rows()

    def place(self, key: GroupKey) -> Place | None:
        """Where the rows of a group are, if they are here."""
        kept = self._rows.get(key)
        return None if kept is None else kept.place

    def keep(self, key: GroupKey, rows: pa.RecordBatch, *, is_sealed: bool = False) -> None:
        """Take in the rows of a group, unless they are here."""
        self.keep_all(rows, [Arrived(key, 0, rows.num_rows, is_sealed)])

    def keep_all(self, batch: pa.RecordBatch, groups: Iterable[Arrived]) -> None:
        """Take in the rows of groups of one write, but for those that are here."""
        write = None
        for key, start, num_rows, is_sealed in groups:
            if key in self._rows:
                continue
            if write is None:
                write = self._write_of(batch)
            write.num_groups += 1
            self._rows[key] = _Kept(Place(batch, start, num_rows), write)
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
        """These groups can be read back from a segment."""
        self._sealed.update(dict.fromkeys(key for key in keys if key in self._rows))
        self.make_room()

    def keep_only(self, needed: AbstractSet[GroupKey]) -> None:
        """Drop the rows of every other group."""
        for key in self._rows.keys() - needed:
            self._drop(key)

    def make_room(self) -> None:
        """Drop sealed rows while there are too many bytes; those sealed last go first, they are trained last."""
        while self._sealed and self.used_bytes > SEALED_SHARE * self._budget_bytes:
            self._drop(next(reversed(self._sealed)))

    def free_groups(self) -> float:
        """Groups that there is room for, by the mean size of those that are here; negative beyond the budget."""
        usual_bytes = self.used_bytes / len(self._rows) if self._rows else self._usual_bytes
        # However large a group may be, one must fit at last.
        return (self._budget_bytes - self.used_bytes) / min(usual_bytes, self._budget_bytes)

    def _drop(self, key: GroupKey) -> None:
        write = self._rows.pop(key).write
        self._sealed.pop(key, None)
        self.used_bytes -= GROUP_BYTES
        write.num_groups -= 1
        if not write.num_groups:
            del self._writes[write.address]
            self.used_bytes -= write.num_bytes


def _address(rows: pa.RecordBatch) -> int:
    """The same for all groups of one write, whose rows are views of the same memory."""
    address: int = rows.column(_GROUP_ID_AT).buffers()[1].address
    return address
