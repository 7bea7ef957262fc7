"""Rows of files and data sets as JSON objects, with the values that the file has.

No reader guesses types: a date in a JSON or CSV file stays the text that it is, and an integer keeps its digits.
Every row is kept as one line of JSON and parsed when it is needed, so that a large file takes about its own size of
memory.
"""

import codecs
import csv
import io
import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from datetime import date, time
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet

from pipelinerl_core.config.prompts import FILE_SUFFIXES
from pipelinerl_core.errors import ConfigError

_OBJECTS = "Write one JSON object per line, in UTF-8"
_FIELDS = "Write a line of column names and then the rows, in UTF-8, with quotes around a field of several lines"
_ADVICE: Mapping[str, str] = {
    ".jsonl": _OBJECTS,
    ".json": "Write a list of JSON objects, or one JSON object per line, in UTF-8",
    ".csv": _FIELDS,
    ".tsv": _FIELDS,
    ".parquet": "Write the file again",
}
_MAX_FIELD_CHARS = 1 << 26
_ROWS_AT_ONCE = 10_000
_EXACT_IN_DOUBLE = 2.0**53

_PACKED = (".gz", ".bz2", ".xz", ".zst", ".zip")


def _finite(text: str) -> float:
    number = float(text)
    if math.isinf(number):
        raise ValueError(f"the number {text[:20]} is beyond the range of floating-point numbers")
    return number


# NaN and Infinity are not JSON: null.
_DECODER = json.JSONDecoder(parse_constant=lambda _: None, parse_float=_finite)

_DOUBTFUL = re.compile(rb"\\u[dD]")  # half of a surrogate pair
_MAX_DEPTH = 100
"""Messages between the roles hold values of up to 190."""

Record = dict[str, Any]
"""Column -> JSON value."""


class Records:
    """Rows by number, each a JSON object."""

    def __init__(self, lines: Sequence[bytes], origin: str, notes: Sequence[str] = ()) -> None:
        """lines: JSON objects in UTF-8. origin: the file or data set, for messages. notes: lines of text about what
        the format of the file has lost, by column."""
        self.lines, self.origin, self.notes = lines, origin, tuple(notes)

    def __len__(self) -> int:
        return len(self.lines)

    def __getitem__(self, row: int) -> Record:
        """Raises ConfigError if the line is no JSON object, or has a value that no message can hold."""
        line = self.lines[row]
        try:
            record = _DECODER.decode(line.decode())
            if not isinstance(record, dict):
                raise ValueError(f"an object is expected, not {type(record).__name__}")
            if _DOUBTFUL.search(line):
                json.dumps(record, ensure_ascii=False, allow_nan=False).encode()
            if line.count(b"[") + line.count(b"{") > _MAX_DEPTH and _depth(record) > _MAX_DEPTH:
                raise ValueError(f"lists and objects are nested more than {_MAX_DEPTH} deep")
        except (ValueError, RecursionError) as error:
            raise ConfigError(
                f"{self.origin}: cannot be read as JSON: row {row}: {_reason(error)}. {_OBJECTS}"
            ) from None
        return record

    def __iter__(self) -> Iterator[Record]:
        return map(self.__getitem__, range(len(self)))

    def columns(self) -> list[str]:
        """The columns of the first rows and the fields of their objects, `meta.answer`, for messages."""
        return list(dict.fromkeys(name for row in range(min(len(self), 100)) for name in _names(self[row])))


def read_file(
    path: Path,
    key: str,
    *,
    separator: str = "",
    field: str = "",
    kind: str = "",
    features: Mapping[str, Any] | None = None,
) -> Records:
    """The rows of a file. Raises ConfigError if the file is missing or cannot be read.

    Args:
        path: the name ends in one of FILE_SUFFIXES.
        key: key and value that name the file, for messages.
        separator: of the columns of a CSV file; empty: tab for .tsv, else the first of comma, semicolon and tab that
            the first line has.
        field: of the one object in a JSON file, the field with the list of rows.
        kind: json, csv or parquet, whatever the name ends in.
        features: columns with class labels that a data set declares (`labelled`); None: those of a Parquet file.
    """
    kind = f".{kind}" if kind else path.suffix
    if kind not in FILE_SUFFIXES:
        change = "Unpack the file" if kind in _PACKED else "Rename or convert the file"
        raise ConfigError(f"{key}: the name must end in {', '.join(FILE_SUFFIXES)}. {change}")
    if not path.is_file():
        place = path.parent.resolve()
        raise ConfigError(f"{key}: no such file in {place}. Set a file whose name ends in {', '.join(FILE_SUFFIXES)}")
    try:
        if kind == ".parquet":
            return table_records(pyarrow.parquet.read_table(path), key, features)
        data = path.read_bytes().removeprefix(codecs.BOM_UTF8)
        if kind in (".csv", ".tsv"):
            lines = _csv_lines(data.decode(), separator or ("\t" if kind == ".tsv" else ""))
            return _with_label_names(Records(lines, key), features, is_typed=False)
        if field or (kind == ".json" and data.lstrip()[:1] == b"["):
            values = _DECODER.decode(data.decode())
            records = Records([_line(value) for value in (values[field] if field else values)], key)
        else:
            records = Records([line for line in data.split(b"\n") if line.strip()], key)
        return _with_label_names(records, features, is_typed=True)
    except (pa.ArrowException, OSError, ValueError, KeyError, TypeError, csv.Error, RecursionError) as error:
        raise ConfigError(f"{key}: cannot be read as {kind[1:]}: {_reason(error)}. {_ADVICE[kind]}") from None


def joined(parts: Sequence[Records], origin: str) -> Records:
    """The rows of several files, one after the other."""
    notes = dict.fromkeys(note for part in parts for note in part.notes)
    return Records([line for part in parts for line in part.lines], origin, list(notes))


def part_of(records: Records, start: int | None, end: int | None) -> Records:
    """Rows [start, end); None: from the first, to the last."""
    return Records(records.lines[start:end], records.origin, records.notes)


def table_records(table: pa.Table, origin: str, features: Mapping[str, Any] | None = None) -> Records:
    """The rows of an Arrow table: class labels by name, dates and decimals as text, binary data and NaN as null.

    features: columns with class labels (`labelled`); None: those that the table declares. Raises ConfigError if two
    columns have the same name, and Arrow's errors for damaged data.
    """
    table.validate(full=True)  # text that is not UTF-8 otherwise raises where the text is used
    names = table.column_names
    if repeated := sorted({name for name in names if names.count(name) > 1}):
        raise ConfigError(f"{origin}: several columns are named {', '.join(repeated)}. Rename them")
    labels = _label_columns(table.schema) if features is None else features
    lines: list[bytes] = []
    for batch in table.to_batches(_ROWS_AT_ONCE):
        for record in batch.to_pylist():
            for name in labels.keys() & record.keys():
                record[name] = _with_names(record[name], labels[name], is_typed=True)
            lines.append(_line(record))
    return Records(lines, origin, [note for name in names if name not in labels for note in _lost(name, table[name])])


def _lost(name: str, values: pa.ChunkedArray) -> Iterator[str]:
    """What the file does not keep of the values of a column that were text or integers before."""
    kind = values.type
    if pa.types.is_struct(kind):
        for field in kind:
            inner = pa.chunked_array([pc.struct_field(part, field.name) for part in values.chunks], field.type)
            yield from _lost(f"{name}.{field.name}", inner)
    elif pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind):
        yield from _lost(f"{name}[]", pa.chunked_array(list(map(pc.list_flatten, values.chunks)), kind.value_type))
    elif pa.types.is_temporal(kind) or pa.types.is_decimal(kind):
        example = next((_as_text(value) for value in values.to_pylist() if value is not None), "null")
        yield f"column {name} holds {kind}, not text: its values are given as text such as {example!r}"
    elif pa.types.is_binary(kind) or pa.types.is_large_binary(kind) or pa.types.is_fixed_size_binary(kind):
        yield f"column {name} holds {kind}: its values are given as null"
    elif pa.types.is_floating(kind):
        values = values.cast(pa.float64())  # Arrow has few functions for half precision
        known = values.filter(pc.is_finite(values))
        if len(known) and pc.all(pc.equal(known, pc.floor(known))).as_py():
            largest = pc.max(pc.abs(known)).as_py()
            digits = ", and may have lost digits" if largest >= _EXACT_IN_DOUBLE else ""
            yield f"column {name} holds {kind}: its whole numbers are given as {known[0].as_py()!r}{digits}"


def _label_columns(schema: pa.Schema) -> dict[str, Any]:
    """Column -> feature of the datasets library, of the columns that hold class labels."""
    if b"ClassLabel" not in (schema.metadata or {}).get(b"huggingface", b""):
        return {}
    from datasets import Features  # noqa: PLC0415  (takes seconds)

    return labelled(Features.from_arrow_schema(schema))


def labelled(features: Mapping[str, Any]) -> dict[str, Any]:
    """The features that are, or contain, class labels."""
    return {name: feature for name, feature in features.items() if "ClassLabel(" in repr(feature)}


def _with_names(value: Any, feature: Any, *, is_typed: bool) -> Any:
    """The value with the names of its class labels instead of their numbers; -1, no label, is null.

    is_typed: text is a name. Otherwise, in CSV, text may be a number too, as the datasets library reads it.
    """
    if hasattr(feature, "int2str"):
        if is_typed and value in feature.names:
            return value
        number = int(value) if isinstance(value, str) and value.lstrip("-").isdecimal() else value
        if not isinstance(number, int):
            return value
        return feature.names[number] if 0 <= number < len(feature.names) else None
    if isinstance(feature, Mapping) and isinstance(value, Mapping):
        return {name: _with_names(item, feature.get(name), is_typed=is_typed) for name, item in value.items()}
    inner = feature[0] if isinstance(feature, list) else getattr(feature, "feature", None)
    if inner is not None and isinstance(value, list):
        return [_with_names(item, inner, is_typed=is_typed) for item in value]
    return value


def _with_label_names(records: Records, features: Mapping[str, Any] | None, *, is_typed: bool) -> Records:
    """The rows with the names of class labels that a data set declares."""
    if not features:
        return records
    lines = []
    for row in records:
        known = features.keys() & row.keys()
        lines.append(_line(row | {name: _with_names(row[name], features[name], is_typed=is_typed) for name in known}))
    return Records(lines, records.origin, records.notes)


def _csv_lines(text: str, separator: str) -> list[bytes]:
    csv.field_size_limit(_MAX_FIELD_CHARS)
    first = text.partition("\n")[0]
    separator = separator or next((mark for mark in ",;\t" if mark in first), ",")
    rows = csv.reader(io.StringIO(text, newline=""), delimiter=separator, strict=True)
    names = next(rows, [])
    if len(set(names)) < len(names):
        raise ValueError("two columns have the same name")
    lines = []
    for row in rows:
        if row and len(row) != len(names):
            raise ValueError(f"line {rows.line_num} has {len(row)} fields, but the first line {len(names)}")
        if row:
            lines.append(_line(dict(zip(names, row, strict=True))))
    return lines


def _line(value: Any) -> bytes:
    return json.dumps(value, default=_as_text).encode()


def _as_text(value: Any) -> str | None:
    """A value without a JSON form: dates and times in ISO 8601, others by their name; binary data is null."""
    if isinstance(value, bytes):
        return None
    return value.isoformat() if isinstance(value, date | time) else str(value)


def _names(record: Mapping[str, Any], before: str = "") -> Iterator[str]:
    for name, value in record.items():
        yield before + name
        if isinstance(value, Mapping):
            yield from _names(value, f"{before}{name}.")


def _depth(value: Any) -> int:
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return 1 + max(map(_depth, inner), default=0)


def _reason(error: BaseException) -> str:
    return (str(error) or type(error).__name__).splitlines()[0]
