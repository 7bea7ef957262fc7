"""Rows of several groups in one write: a write costs both sides about as much as copying a megabyte.

The hub's service answers with one header and one batch per group, and so the trainer reads them; in between they
travel together.
"""

import itertools
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import pyarrow as pa

from pipelinerl_core.messages import Answer, RowsBundle, RowsHeader

BUNDLE_BYTES = 1 << 20
"""Rows are joined up to this size; a larger group travels alone, and is not copied."""


class Received(NamedTuple):
    """An answer, with its rows if it has any."""

    answer: Answer
    rows: pa.RecordBatch | None


def bundled(
    answers: Iterable[tuple[Answer, pa.RecordBatch | None]],
) -> Iterator[tuple[Answer, pa.RecordBatch | None]]:
    """The same answers, neighbouring groups joined."""
    waiting: list[tuple[RowsHeader, pa.RecordBatch]] = []
    num_bytes = 0
    for answer, rows in answers:
        if not isinstance(answer, RowsHeader) or rows is None:
            yield from _joined(waiting)
            waiting, num_bytes = [], 0
            yield answer, rows
            continue
        size = rows.get_total_buffer_size()
        if num_bytes + size > BUNDLE_BYTES:
            yield from _joined(waiting)
            waiting, num_bytes = [], 0
        waiting.append((answer, rows))
        num_bytes += size
    yield from _joined(waiting)


def _joined(waiting: list[tuple[RowsHeader, pa.RecordBatch]]) -> Iterator[tuple[Answer, pa.RecordBatch | None]]:
    if len(waiting) < 2:
        yield from waiting
        return
    last = waiting[-1][0]
    groups = tuple((header.group_id, header.attempt, rows.num_rows) for header, rows in waiting)
    yield (
        RowsBundle(re=last.re, groups=groups, remaining=last.remaining),
        pa.concat_batches([rows for _, rows in waiting]),
    )


def unbundled(answer: Answer, rows: pa.RecordBatch | None) -> list[Received]:
    """What was joined, group by group; the batches are views. Every other answer is left as it is."""
    if not isinstance(answer, RowsBundle) or rows is None:
        return [Received(answer, rows)]
    ends = list(itertools.accumulate(num_rows for _, _, num_rows in answer.groups))
    return [
        Received(
            RowsHeader(
                re=answer.re,
                group_id=group_id,
                attempt=attempt,
                remaining=answer.remaining + len(ends) - 1 - index,
            ),
            rows.slice(ends[index] - num_rows, num_rows),
        )
        for index, (group_id, attempt, num_rows) in enumerate(answer.groups)
    ]
