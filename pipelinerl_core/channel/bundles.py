"""Combines several groups into one Flight write: one write costs each side about as much as copying a megabyte.

Actors create one message per group and the hub service answers each message; for the trainer, the hub service creates
one header and one batch per group. Only on the wire are several of them combined.
"""

import itertools
import threading
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import pyarrow as pa

from pipelinerl_core.data.codec import row_bytes
from pipelinerl_core.interfaces import RowSlice
from pipelinerl_core.messages import Answer, Answers, RowsBundle, RowsHeader

BUNDLE_BYTES = 1 << 20
"""Largest bundle of rows for the trainer. A larger group is sent alone, without a copy."""
MIN_VIEW_BYTES = BUNDLE_BYTES // 4
"""Adjacent rows of several groups with fewer bytes are copied into a bundle instead of being sent as a view."""
GROUPS_BYTES = 1 << 20
"""Largest bundle of groups for the hub, which keeps the memory of a write as long as one of its groups is needed."""


class Received(NamedTuple):
    """An answer with its rows; None for an answer without rows."""

    answer: Answer
    rows: pa.RecordBatch | None


_Run = list[tuple[RowsHeader, RowSlice]]


def bundled(
    answers: Iterable[tuple[Answer, RowSlice | None]],
) -> Iterator[tuple[Answer, pa.RecordBatch | None]]:
    """The same answers in their order, with consecutive groups combined into bundles.

    Groups whose rows are adjacent in one batch are sent as one view, without a copy, unless they are short: many
    small writes cost more than a copy.
    """
    waiting: _Run = []
    num_bytes = 0
    for run in _runs(answers):
        if not isinstance(run, list):
            yield from _joined(waiting)
            waiting, num_bytes = [], 0
            yield run, None
            continue
        if len(run) > 1 and row_bytes(_view(run)) >= MIN_VIEW_BYTES:
            yield from _joined(waiting)
            waiting, num_bytes = [], 0
            yield _bundle(run, _view(run))
            continue
        for header, rows in run:
            size = row_bytes(rows.rows())
            if num_bytes + size > BUNDLE_BYTES:
                yield from _joined(waiting)
                waiting, num_bytes = [], 0
            waiting.append((header, rows))
            num_bytes += size
    yield from _joined(waiting)


def _runs(answers: Iterable[tuple[Answer, RowSlice | None]]) -> Iterator[_Run | Answer]:
    """Lists of groups whose rows are adjacent in one batch, and all other answers, in their order."""
    run: _Run = []
    for answer, rows in answers:
        if run and not (rows is not None and rows.follows(run[-1][1])):
            yield run
            run = []
        if isinstance(answer, RowsHeader) and rows is not None:
            run.append((answer, rows))
        else:
            yield answer
    if run:
        yield run


def _view(run: _Run) -> pa.RecordBatch:
    first, last = run[0][1], run[-1][1]
    return RowSlice(first.batch, first.start, last.start + last.num_rows - first.start).rows()


def _joined(waiting: _Run) -> Iterator[tuple[Answer, pa.RecordBatch | None]]:
    if len(waiting) == 1:
        yield waiting[0][0], waiting[0][1].rows()
    elif waiting:
        yield _bundle(waiting, pa.concat_batches([rows.rows() for _, rows in waiting]))


def _bundle(run: _Run, rows: pa.RecordBatch) -> tuple[RowsBundle, pa.RecordBatch]:
    last = run[-1][0]
    groups = tuple((header.group_id, header.attempt, part.num_rows) for header, part in run)
    return RowsBundle(re=last.re, groups=groups, remaining=last.remaining), rows


def unbundled(answer: Answer, rows: pa.RecordBatch | None) -> list[Received]:
    """Split a bundle into one answer per group, with views of the batch. Other answers are returned unchanged."""
    if isinstance(answer, Answers):
        return [Received(part, None) for part in answer.answers]
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


class Frame(NamedTuple):
    """One request to be written; `written` is set after Flight has accepted it."""

    metadata: bytes
    rows: pa.RecordBatch | None
    is_group: bool
    written: threading.Event


def frames_of_writes(frames: Iterable[Frame]) -> Iterator[list[Frame]]:
    """The same frames in their order, in lists of which each becomes one write."""
    part: list[Frame] = []
    num_bytes = 0
    for frame in frames:
        size = frame.rows.get_total_buffer_size() if frame.rows is not None else 0
        if part and not (_can_merge(part[-1], frame) and num_bytes + size <= GROUPS_BYTES):
            yield part
            part, num_bytes = [], 0
        part.append(frame)
        num_bytes += size
    if part:
        yield part


def _can_merge(frame: Frame, other: Frame) -> bool:
    if not (frame.is_group and other.is_group) or frame.rows is None or other.rows is None:
        return False
    return bool(frame.rows.schema.equals(other.rows.schema, check_metadata=True))


def merged(frames: Sequence[Frame]) -> tuple[bytes, pa.RecordBatch | None]:
    """Metadata and rows of one write; several frames become one `groups` message."""
    if len(frames) == 1:
        return frames[0].metadata, frames[0].rows
    messages = b",".join(frame.metadata for frame in frames)
    return b'{"kind":"groups","groups":[' + messages + b"]}", pa.concat_batches([frame.rows for frame in frames])
