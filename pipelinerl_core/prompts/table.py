"""Prompts from the rows of an Arrow table, for files and data sets."""

import difflib
import json
from collections.abc import Sequence
from functools import lru_cache
from string import Formatter
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from pipelinerl_core.config.sections import FilePrompts, RowPrompts, RunConfig
from pipelinerl_core.config.verifier import verifier_name
from pipelinerl_core.errors import ConfigError
from pipelinerl_core.prompts.split import held_out_ids, prompt_id, stable_seed
from pipelinerl_core.types import Prompt

DEFAULT_ANSWER_COLUMN = FilePrompts.model_fields["answer_column"].default


class Rows:
    """The prompts of a table, by row number."""

    def __init__(self, table: pa.Table, config: RunConfig, origin: str, name: str) -> None:
        """origin: the file or data set, for messages; name: of the source. Raises ConfigError if a column is missing
        or unusable."""
        section = config.prompts
        assert isinstance(section, RowPrompts)
        self._table = table
        columns = _with_fields(table)
        self._texts = _texts(columns, section, origin)
        is_own = config.reward.function or config.environment.path
        is_optional = is_own and section.answer_column == DEFAULT_ANSWER_COLUMN
        self._answers = (
            None
            if is_optional and section.answer_column not in columns.column_names
            else text_column(columns, section.answer_column, "prompts.answer_column", origin)
        )
        self._name, self._env = name, verifier_name(config)
        self.ids = [prompt_id(name, text.as_py()) for text in self._texts]

    def first_rows(self) -> dict[str, int]:
        """Prompt id -> first row with this prompt, in the order of the table."""
        first: dict[str, int] = {}
        for row, identity in enumerate(self.ids):
            first.setdefault(identity, row)
        return first

    def text(self, row: int) -> str:
        """The prompt of a row as shown to the model."""
        return str(self._texts[row].as_py())

    def prompt(self, row: int) -> Prompt:
        """The prompt of a row; its task has all columns of the row, and the answer as `answer`, if there is one."""
        columns = _as_json(self._table.slice(row, 1).to_pylist()[0])
        return Prompt(
            prompt_id=self.ids[row],
            source=self._name,
            env=self._env,
            text=self.text(row),
            task=columns if self._answers is None else {**columns, "answer": self._answers[row].as_py()},
        )


class TableSource:
    """Endless passes over the training rows, each pass in another order."""

    def __init__(self, name: str, rows: Rows, seed: int, *, share: float, held_out: Rows | None = None) -> None:
        """share: prompts.held_out_share. held_out: held-out rows of another table; its prompts are not trained on.

        Raises ConfigError if no row is held out, or if none is left for training; with `held_out`, `prompt` raises
        the latter.
        """
        self.name = name
        self._seed = seed
        self._rows, self._held_out_rows = rows, held_out or rows
        self._held_out_ids = chosen = held_out_ids(rows.ids, share) if held_out is None else set(held_out.ids)
        self._held_out = [row for identity, row in self._held_out_rows.first_rows().items() if identity in chosen]
        self._training = np.flatnonzero([identity not in chosen for identity in rows.ids])
        self._order = lru_cache(maxsize=2)(self._pass_order)
        if not self._held_out or (held_out is None and not len(self._training)):
            raise self._too_few()

    def _too_few(self) -> ConfigError:
        return ConfigError(
            f"{self.name}: {len(self._rows.ids)} rows with {len(set(self._rows.ids))} different prompts, of which "
            f"{len(self._held_out)} are held out. Give at least two different prompts: one is held out"
        )

    @property
    def num_training(self) -> int:
        """Number of training rows, the length of a pass."""
        return len(self._training)

    def prompt(self, index: int) -> Prompt:
        """The training row at a position; every pass has each row once. Raises ConfigError without rows."""
        if not len(self._training):
            raise self._too_few()
        number, position = divmod(index, len(self._training))
        return self._rows.prompt(int(self._order(number)[position]))

    def held_out(self, count: int) -> list[Prompt]:
        """The first `count` held-out prompts in the order of the table, each once; fewer if there are fewer."""
        return [self._held_out_rows.prompt(row) for row in self._held_out[:count]]

    def _pass_order(self, number: int) -> NDArray[np.int64]:
        """[training rows] row numbers in the order of one pass."""
        return np.random.default_rng(stable_seed(self._seed, self.name, number)).permutation(self._training)

    def summary(self) -> list[str]:
        """Lines of text: how many prompts are for training and how many are held out, and overlaps of both."""
        training = [row for row in self._rows.first_rows().values() if self._rows.ids[row] not in self._held_out_ids]
        num_held_out, num_all = len(self._held_out), len(training) + len(self._held_out)
        lines = [
            f"{len(training):,} different prompts to train on ({len(self._training):,} rows), {num_held_out:,} held "
            f"out ({num_held_out / num_all:.1%})"
        ]
        if self._held_out_rows is self._rows:
            held_out = set(self._held_out)
            again = [
                row for row, one in enumerate(self._rows.ids) if one in self._held_out_ids and row not in held_out
            ]
            lines += self._told(again, "rows repeat a held-out prompt and are left out")
        else:
            left_out = [row for row, identity in enumerate(self._rows.ids) if identity in self._held_out_ids]
            lines += self._told(left_out, "training rows are also held-out prompts and are left out of training")
        texts = {_simplified(self._held_out_rows.text(row)) for row in self._held_out}
        alike = [row for row in training if _simplified(self._rows.text(row)) in texts]
        return lines + self._told(alike, "training prompts equal a held-out prompt but for case and spaces")

    def _told(self, rows: Sequence[int], what: str) -> list[str]:
        return [f"{len(rows):,} {what}; the first is {self._rows.text(rows[0])[:60]!r}"] if rows else []


def text_column(table: pa.Table, column: str, key: str, origin: str) -> pa.ChunkedArray:
    """A column of text, numbers, or lists of one message of the user, as text.

    Raises ConfigError if the column is missing, has another type or has nulls, or a list has other messages.
    `key` is the configuration key that names the column, `origin` the file or data set, for the message.
    """
    if column not in table.column_names:
        close = difflib.get_close_matches(column, table.column_names, n=1)
        nearest = f"; did you mean {close[0]}?" if close else f". Name one of these in {key.partition(':')[0]}"
        raise ConfigError(f"{key}={column}: no such column in {origin} ({', '.join(table.column_names)}){nearest}")
    values = table[column]
    if _holds_messages(values.type):
        values = _contents(values, f"{key}={column}", origin)
    try:
        texts = pc.cast(values, pa.large_string())
    except (pa.ArrowNotImplementedError, pa.ArrowInvalid):
        raise ConfigError(
            f"{key}={column}: {values.type} in {origin}, but must be text or numbers. Choose another column"
        ) from None
    if texts.null_count:
        row = pc.index(pc.is_null(texts), True).as_py()
        raise ConfigError(f"{key}={column}: row {row} of {origin} has no value. Remove such rows")
    return texts


def _with_fields(table: pa.Table) -> pa.Table:
    """The table, and the fields of its struct columns as further columns: `column.field`."""
    flat = table
    while any(pa.types.is_struct(kind) for kind in flat.schema.types):
        flat = flat.flatten()
    for name in set(flat.column_names) - set(table.column_names):
        table = table.append_column(name, flat[name])
    return table


def _holds_messages(kind: pa.DataType) -> bool:
    """Whether the values are lists of chat messages, {role, content}."""
    is_list = pa.types.is_list(kind) or pa.types.is_large_list(kind)
    return (
        is_list
        and pa.types.is_struct(kind.value_type)
        and {"role", "content"} <= {one.name for one in kind.value_type}
    )


def _contents(lists: pa.ChunkedArray, setting: str, origin: str) -> pa.ChunkedArray:
    """The text of lists of one message of the user. Raises ConfigError for any other list."""
    for row, messages in enumerate(lists.to_pylist()):
        roles = [message["role"] for message in messages or ()]
        if roles != ["user"]:
            raise ConfigError(
                f"{setting}: row {row} of {origin} has messages of {roles}, but must have one message of the user. "
                "Choose a column of text, and set prompts.system for a message of the system"
            )
    return pc.struct_field(pc.list_flatten(lists), "content")


def _texts(table: pa.Table, section: RowPrompts, origin: str) -> pa.ChunkedArray:
    """The prompts as shown to the model: prompts.template with columns of the row, else prompts.prompt_column."""
    if not section.template:
        return text_column(table, section.prompt_column, "prompts.prompt_column", origin)
    parts: list[Any] = []
    for literal, column in _template_parts(section.template):
        parts.append(pa.scalar(literal, pa.large_string()))
        if column is not None:
            parts.append(text_column(table, column, "prompts.template: column", origin))
    return pc.binary_join_element_wise(*parts, pa.scalar("", pa.large_string()))


def _template_parts(template: str) -> list[tuple[str, str | None]]:
    """(text, column after the text) of prompts.template. A column is a plain name: nothing is evaluated."""
    advice = (
        'Write a column as {name}, and braces as {{ and }}: prompts.template="{question}\\nAnswer with a number."'
    )
    try:
        parsed = list(Formatter().parse(template))
    except ValueError as error:
        raise ConfigError(f"prompts.template: {error}. {advice}") from None
    for _, column, specification, conversion in parsed:
        if column == "" or specification or conversion:
            raise ConfigError(f"prompts.template: braces hold {column!r} with a format or no name. {advice}")
    if all(column is None for _, column, _, _ in parsed):
        raise ConfigError(f"prompts.template: names no column, so all prompts would be equal. {advice}")
    return [(literal, column) for literal, column, _, _ in parsed]


def _simplified(text: str) -> str:
    return " ".join(text.casefold().split())


def _as_json(value: Any) -> Any:
    """A value of a column with JSON types only: dates and decimals as text, binary data and NaN as null."""
    return json.loads(
        json.dumps(value, default=lambda other: None if isinstance(other, bytes) else str(other)),
        parse_constant=lambda _: None,
    )
