"""Prompts from the rows of an Arrow table, for files and data sets."""

import difflib
import json
from functools import lru_cache
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from pipelinerl_core.config.sections import FilePrompts, RunConfig
from pipelinerl_core.errors import ConfigError
from pipelinerl_core.prompts.split import TABLE_SHARE, is_held_out, prompt_id, repeated, stable_seed
from pipelinerl_core.types import Prompt

DEFAULT_ANSWER_COLUMN = FilePrompts.model_fields["answer_column"].default


class TableSource:
    """Endless passes over the training rows, each pass in another order."""

    def __init__(
        self,
        name: str,
        env: str,
        prompts: pa.ChunkedArray,
        answers: pa.ChunkedArray | None,
        seed: int,
        columns: pa.Table | None = None,
    ) -> None:
        """`prompts` and `answers` are string columns of equal length without nulls; see `text_column`.

        columns: all columns, for a user's reward function; `answers` is then optional.
        """
        self.name = name
        self._env = env
        self._prompts = prompts
        self._answers = answers
        self._columns = columns
        self._seed = seed
        self._training, self._held_out = _split(name, prompts)
        self._order = lru_cache(maxsize=2)(self._pass_order)

    def prompt(self, index: int) -> Prompt:
        """The training row at a position; every pass has each row once."""
        number, position = divmod(index, len(self._training))
        return self._row(int(self._order(number)[position]))

    def held_out(self, count: int) -> list[Prompt]:
        """`count` held-out rows in the order of the file, repeated from the first if there are fewer."""
        return [self._row(int(row)) for row in repeated(self._held_out.tolist(), count)]

    def _pass_order(self, number: int) -> NDArray[np.int64]:
        """[training rows] row numbers in the order of one pass."""
        return np.random.default_rng(stable_seed(self._seed, self.name, number)).permutation(self._training)

    def _row(self, row: int) -> Prompt:
        text = self._prompts[row].as_py()
        return Prompt(
            prompt_id=prompt_id(self.name, text),
            source=self.name,
            env=self._env,
            text=text,
            task=self._task(row),
        )

    def _task(self, row: int) -> dict[str, Any]:
        columns = {} if self._columns is None else _json_row(self._columns, row)
        return columns if self._answers is None else {**columns, "answer": self._answers[row].as_py()}


def _json_row(table: pa.Table, row: int) -> dict[str, Any]:
    """The values of a row that JSON can hold; dates and decimals as text, numbers that are not finite as None."""
    names = [field.name for field in table.schema if not pa.types.is_binary(field.type)]
    values = table.select(names).slice(row, 1).to_pylist()[0]
    return dict(json.loads(json.dumps(values, default=str), parse_constant=lambda constant: None))


def answer_column(table: pa.Table, config: RunConfig, column: str, origin: str) -> pa.ChunkedArray | None:
    """The column of reference answers as text; None if reward.function is set and the default column is missing."""
    if config.reward.function and column == DEFAULT_ANSWER_COLUMN and column not in table.column_names:
        return None
    return text_column(table, column, "prompts.answer_column", origin)


def text_column(table: pa.Table, column: str, key: str, origin: str) -> pa.ChunkedArray:
    """A column of text or numbers, as text; raises ConfigError if the column is missing, has another type, or has
    nulls.

    `key` is the configuration key that names the column, `origin` the file or data set, for the message.
    """
    if column not in table.column_names:
        close = difflib.get_close_matches(column, table.column_names, n=1, cutoff=0)
        nearest = f"; did you mean {close[0]}?" if close else ""
        raise ConfigError(f"{key}={column}: no such column in {origin} ({', '.join(table.column_names)}){nearest}")
    values = table[column]
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


def _split(name: str, prompts: pa.ChunkedArray) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Numbers of the training rows and of the held-out rows; neither is empty.

    The hash of a prompt decides. If the hashes put all rows of a small table on one side, all rows with the prompt
    with the smallest hash are held out.
    """
    ids = [prompt_id(name, text.as_py()) for text in prompts]
    held_out = np.array([is_held_out(identity, TABLE_SHARE) for identity in ids], dtype=bool)
    if held_out.all() or not held_out.any():
        smallest = min(ids, default="")
        held_out = np.array([identity == smallest for identity in ids], dtype=bool)
    if held_out.all():
        raise ConfigError(
            f"{name}: {len(ids)} rows with {len(set(ids))} different prompts. "
            "Give at least two different prompts: one is held out"
        )
    return np.flatnonzero(~held_out), np.flatnonzero(held_out)
