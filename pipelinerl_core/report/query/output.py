"""The result of a statement as lines of a table, as CSV, or as JSON values."""

import csv
import io
import json
from collections import Counter
from collections.abc import Iterable, Iterator
from decimal import Decimal
from typing import Any, Literal

import pyarrow as pa

from pipelinerl_core.errors import ConfigError
from pipelinerl_core.report.run_list import aligned

_CELL_CHARS = 60


def table_lines(result: pa.RecordBatchReader, limit: int) -> list[str]:
    """The first `limit` rows as aligned lines with a heading (0: all), and the number of all rows."""
    shown, num_rows = [], 0
    for batch in result:
        wanted = batch.slice(0, max(0, limit - num_rows)) if limit else batch
        shown += _rows(wanted)
        num_rows += batch.num_rows
    rows = [[_cell(name) for name in result.schema.names], *([_cell(value) for value in row] for row in shown)]
    more = f", of which {len(shown):,} are shown (--limit)" if len(shown) < num_rows else ""
    return [*aligned(rows), f"{num_rows:,} row{'' if num_rows == 1 else 's'}{more}"]


def csv_parts(result: pa.RecordBatchReader) -> Iterator[str]:
    """The result as CSV (RFC 4180), part by part; lists, maps and structures are JSON, null is empty."""
    yield _csv([result.schema.names])
    for batch in result:
        yield _csv([None if value is None else _plain(value) for value in row] for row in _rows(batch))


def document(result: pa.RecordBatchReader, limit: int) -> dict[str, Any]:
    """{"columns", "rows", "num_rows"}: the first `limit` rows (0: all) as objects.

    Raises ConfigError if two columns have the same name.
    """
    names = result.schema.names
    if twice := [name for name, count in Counter(names).items() if count > 1]:
        raise ConfigError(f"two columns of the result have the name {twice[0]}: rename one with `as`")
    shown: list[dict[str, Any]] = []
    num_rows = 0
    for batch in result:
        wanted = batch.slice(0, max(0, limit - num_rows)) if limit else batch
        shown += (dict(zip(names, map(json_value, row), strict=True)) for row in _rows(wanted))
        num_rows += batch.num_rows
    return {"columns": names, "rows": shown, "num_rows": num_rows}


def _rows(batch: pa.RecordBatch) -> list[tuple[Any, ...]]:
    columns = [column.to_pylist(maps_as_pydicts=_maps_of(column.type)) for column in batch.columns]
    return list(zip(*columns, strict=True))


def _maps_of(kind: pa.DataType) -> Literal["lossy"] | None:
    """How Arrow gives maps: as dictionaries, or as pairs if a key is a list, a structure or a map."""
    fields = [kind.field(number) for number in range(kind.num_fields)]
    if pa.types.is_map(kind) and pa.types.is_nested(kind.key_type):
        return None
    return "lossy" if all(_maps_of(field.type) for field in fields) else None


def _csv(rows: Iterable[list[Any]]) -> str:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(rows)
    return text.getvalue()


def _cell(value: Any) -> str:
    """A value as short text without control characters, which a model may have written."""
    is_float = isinstance(value, float)
    number = f"{value:.1f}" if is_float and 1e5 <= abs(value) < 1e15 else f"{value:.5g}" if is_float else ""
    text = "" if value is None else number or _plain(value)
    text = "".join(char if char.isprintable() else repr(char)[1:-1] for char in text[: _CELL_CHARS + 1])
    return text if len(text) <= _CELL_CHARS else f"{text[: _CELL_CHARS - 4]} ..."


def _plain(value: Any) -> str:
    is_nested = isinstance(value, list | dict | bool)
    return json.dumps(json_value(value), ensure_ascii=False) if is_nested else str(json_value(value))


def json_value(value: Any) -> Any:
    """NaN and infinities are null; a large integer is an integer; a time is its text."""
    if isinstance(value, dict):
        return {str(key): json_value(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [json_value(item) for item in value]
    if isinstance(value, Decimal):
        return int(value) if value == value.to_integral_value() else float(value)
    if isinstance(value, float):
        return value if abs(value) < float("inf") else None
    return value if isinstance(value, str | int | None) else str(value)
