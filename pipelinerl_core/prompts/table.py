"""Prompts from the rows of files and data sets."""

import difflib
import hashlib
import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import cached_property, lru_cache
from string import Formatter
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pipelinerl_core.config.prompts import FilePrompts, RowPrompts
from pipelinerl_core.config.run import RunConfig
from pipelinerl_core.config.verifier import verifier_name
from pipelinerl_core.errors import ConfigError
from pipelinerl_core.prompts.records import Record, Records
from pipelinerl_core.prompts.split import held_out_ids, prompt_id, stable_seed
from pipelinerl_core.types import Prompt

DEFAULT_ANSWER_COLUMN = FilePrompts.model_fields["answer_column"].default
_MISSING = object()
_MANY_ROWS = 10
"""With fewer rows, equal answers may be chance."""


class Rows:
    """The prompts of a table, by row number."""

    def __init__(self, records: Records, config: RunConfig, name: str) -> None:
        """name: of the source. Raises ConfigError if a row cannot be read, or a column is missing or unusable."""
        section = config.prompts
        assert isinstance(section, RowPrompts)
        self._records = records
        self._name, self._env = name, verifier_name(config)
        self._answer_column = section.answer_column
        self._is_own = bool(config.reward.function or config.environment.path)
        """Code of the user takes the answers: lists and objects too, or none."""
        self._is_optional = self._is_own and section.answer_column == DEFAULT_ANSWER_COLUMN
        self._has_function = bool(config.reward.function)
        self._is_nullable = self._is_optional and self._has_function
        """Parquet has null for a missing field. Environments such as builtin:math would take None for an answer."""
        self._key = "prompts.template: column" if section.template else "prompts.prompt_column"
        self._template = _template_parts(section.template) if section.template else [("", section.prompt_column)]
        self.ids: list[str] = []
        """For each row, the prompt_id of the text shown to the model."""
        self.questions: list[str] = []
        """For each row, the hash of the columns that the prompt is made of, each once, whatever the source and the
        template."""
        self.values: list[str] = []
        """For each row, the hash of the values of these columns, whatever the names of the columns."""
        self.texts: list[str] = [] if section.template else self.questions
        """For each row, the hash of the text shown to the model."""
        self.num_empty_answers = 0
        self._first_answers: set[str | None] = set()
        """Up to two different answers."""
        for row, record in enumerate(records):
            columns = self._columns(row, record)
            text = self._filled(columns)
            if not text:
                raise ConfigError(f"row {row} of {records.origin} has an empty prompt. Remove such rows")
            self.ids.append(prompt_id(name, text))
            names = [column for _, column in self._template if column is not None]
            values = [value for _, value in sorted(set(zip(names, columns, strict=True)))]
            self.questions.append(text_hash("\0".join(values)))
            self.values.append(text_hash("\0".join(sorted(values))))
            if section.template:
                self.texts.append(text_hash(text))
            answer = self._answer(row, record)
            self.num_empty_answers += answer == ""
            if len(self._first_answers) < 2:
                self._first_answers.add(answer if answer is None else str(answer))

    def text(self, row: int) -> str:
        """The prompt of a row as shown to the model."""
        return self._filled(self._columns(row, self._records[row]))

    def prompt(self, row: int) -> Prompt:
        """The prompt of a row; its task has all columns of the row, and the answer as `answer`, if there is one."""
        record = self._records[row]
        answer = self._answer(row, record)
        return Prompt(
            prompt_id=self.ids[row],
            source=self._name,
            env=self._env,
            text=self._filled(self._columns(row, record)),
            messages=self._messages(record),
            task=record if answer is None else {**record, "answer": answer},
        )

    def matching(self, other: "Rows", others: Sequence[int]) -> list[int]:
        """Rows that are the same problem as one of the rows `others` of `other`: the columns that the prompt is made
        of have the same text, or the text shown to the model or all columns are equal."""
        questions, texts = {other.questions[row] for row in others}, {other.texts[row] for row in others}
        matches = [row for row, question in enumerate(self.questions)
                 if question in questions or self.texts[row] in texts]  # fmt: skip
        if {column for _, column in self._template} != {column for _, column in other._template}:
            values = {other.values[row] for row in others}
            matches += [row for row, value in enumerate(self.values) if value in values]
            whole = {other.row_hashes[row] for row in others}
            matches += [row for row, whole_row in enumerate(self.row_hashes) if whole_row in whole]
        return sorted(set(matches))

    @cached_property
    def row_hashes(self) -> list[str]:
        """For each row, the hash of all columns in any order; a null column counts as a missing column."""
        return [
            text_hash(
                json.dumps({name: value for name, value in record.items() if value is not None}, sort_keys=True)
            )
            for record in self._records
        ]

    def notes(self) -> list[str]:
        """Lines of text: what the format of the file has lost, and answers that a reply may give unread."""
        lines = [*self._records.notes]
        if self.num_empty_answers:
            lines.append(f"{self.num_empty_answers:,} rows have an empty answer: an empty reply would be right")
        elif len(self.ids) >= _MANY_ROWS and len(self._first_answers) == 1 and None not in self._first_answers:
            (answer,) = self._first_answers
            lines.append(
                f"all {len(self.ids):,} rows have the answer {str(answer)[:40]!r}: the same reply is always right"
            )
        return lines

    def _columns(self, row: int, record: Record) -> list[str]:
        """The text of each column that the prompt is made of."""
        return [self._text(row, record, column, self._key) for _, column in self._template if column is not None]

    def _filled(self, columns: Sequence[str]) -> str:
        left = iter(columns)
        return "".join(literal + ("" if column is None else next(left)) for literal, column in self._template)

    def _messages(self, record: Record) -> tuple[dict[str, Any], ...]:
        """The messages of the prompt's column, if it has messages and the prompt is this column alone."""
        literal, column = self._template[0]
        value = None if literal or len(self._template) > 1 else _value(record, column or "")
        return tuple(value) if isinstance(value, list) else ()

    def _answer(self, row: int, record: Record) -> Any:
        """The answer as text; for code of the user a list or object, for its functions also a number, as it is.

        None: there is none.
        """
        value = _value(record, self._answer_column)
        if (self._is_optional and value is _MISSING) or (self._is_nullable and value is None):
            return None
        if self._is_own and isinstance(value, list | Mapping):
            return value
        if self._has_function and isinstance(value, bool | int | float):
            return value
        return self._text(row, record, self._answer_column, "prompts.answer_column")

    def _text(self, row: int, record: Record, column: str, key: str) -> str:
        """A value as text. Raises ConfigError if it is missing or null, or neither text nor a number."""
        value = _value(record, column)
        if isinstance(value, str):
            return value
        setting, origin = f"{key}={column}", self._records.origin
        if value is _MISSING and column not in (names := self._records.columns()):
            close = difflib.get_close_matches(column, names, n=1)
            if len(names) == 1 and any(mark in names[0] for mark in ";\t|"):
                raise ConfigError(
                    f"{setting}: {origin} has one column, {names[0]!r}. Separate columns by commas, semicolons or "
                    "tabs, in a .tsv file by tabs"
                )
            nearest = f"; did you mean {close[0]}?" if close else f". Name one of these in {key.partition(':')[0]}"
            raise ConfigError(f"{setting}: no such column in {origin} ({', '.join(names)}){nearest}")
        if value is _MISSING or value is None:
            raise ConfigError(f"{setting}: row {row} of {origin} has no value. Remove such rows")
        if isinstance(value, bool | int | float):
            return json.dumps(value)
        if (
            isinstance(value, list)
            and value
            and all(isinstance(each, Mapping) and {"role", "content"} <= each.keys() for each in value)
        ):
            if _is_conversation(value) and (len(value) == 1 or not key.startswith("prompts.template")):
                return "\n\n".join(message["content"] for message in value)
            roles = [message["role"] for message in value]
            raise ConfigError(
                f"{setting}: row {row} of {origin} has messages of {roles}, but must have texts of user and "
                "assistant in turn, the last of the user, after a message of the system or without it; in "
                "prompts.template one message of the user"
            )
        raise ConfigError(
            f"{setting}: row {row} of {origin} has a {type(value).__name__}, but must have text or a number. "
            "Choose another column"
        )


def _first(keys: Iterable[str]) -> dict[str, int]:
    """Key -> its first position, in order."""
    first: dict[str, int] = {}
    for position, key in enumerate(keys):
        first.setdefault(key, position)
    return first


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
        if held_out is None:
            chosen = held_out_ids(rows.ids, share)
            self._held_out = [row for identity, row in _first(rows.ids).items() if identity in chosen]
        else:  # the user has chosen them: prompts of the same text may differ in the answer
            self._held_out = list(_first(held_out.row_hashes).values())
        self._training = np.arange(len(rows.ids))
        self._order = lru_cache(maxsize=2)(self._pass_order)
        self._left_out: list[str] = []
        if held_out is None:
            self._take_out(self._held_out, "")
            again = sorted(set(rows.matching(rows, self._held_out)) - set(self._held_out))
            self._take_out(again, "rows repeat a held-out prompt and are left out")
        else:
            self.leave_out(self, "held-out prompts")
        if not self._held_out or (held_out is None and not len(self._training)):
            raise self._too_few()

    def leave_out(self, other: "TableSource", name: str) -> None:
        """Train on no row that is the same problem as a held-out row of `other`. name: of these rows, for
        `summary`."""
        rows = self._rows.matching(other._held_out_rows, other._held_out)
        self._take_out(rows, f"training rows are also {name} and are left out of training")

    def leave_out_texts(self, texts: Collection[str], name: str) -> None:
        """`leave_out` for prompts that another source generates. texts: `text_hash` of what is shown to the model."""
        rows = [row for row, text in enumerate(self._rows.texts) if text in texts]
        self._take_out(rows, f"training rows are also {name} and are left out of training")

    def held_out_texts(self) -> set[str]:
        """`text_hash` of the text of each held-out prompt, as shown to the model."""
        return {self._held_out_rows.texts[row] for row in self._held_out}

    def held_out_notes(self) -> list[str]:
        """Lines of text about the held-out rows: what the format of their file has lost, and empty answers."""
        return self._held_out_rows.notes()

    def shared(self, other: "TableSource") -> list[str]:
        """The held-out prompts that are the same problems as held-out prompts of `other`."""
        rows = set(self._held_out_rows.matching(other._held_out_rows, other._held_out))
        return [self._held_out_rows.text(row) for row in self._held_out if row in rows]

    def _take_out(self, rows: Sequence[int], told: str) -> None:
        is_taken_out = np.isin(self._training, rows)
        if told:
            self._left_out += self._told(self._training[is_taken_out].tolist(), told)
        self._training = self._training[~is_taken_out]

    def _too_few(self) -> ConfigError:
        return ConfigError(
            f"{self.name}: {len(self._rows.ids)} rows with {len(set(self._rows.ids))} different prompts, of which "
            f"none is left to train on: {len(self._held_out)} are held out"
            f"{''.join(f'; {line}' for line in self._left_out)}. Give at least one prompt more that is not held out"
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
        """Lines of text: how many prompts are for training and how many are held out, overlaps of both, and what the
        format of the file has lost."""
        first = {self._rows.ids[row] for row in self._training}
        num_held_out, num_all = len(self._held_out), len(first) + len(self._held_out)
        return [
            f"{len(first):,} different prompts to train on ({len(self._training):,} rows), {num_held_out:,} held "
            f"out ({num_held_out / num_all:.1%})",
            *self._left_out,
            *self.alike(self, "a held-out prompt"),
            *dict.fromkeys([*self._rows.notes(), *self._held_out_rows.notes()]),
        ]

    @cached_property
    def _simplified_rows(self) -> dict[int, str]:
        """First training row of each prompt -> hash of its text without case and spaces; read after `leave_out`."""
        first = {self._rows.ids[row]: row for row in reversed(self._training)}
        return {row: text_hash(_simplified(self._rows.text(row))) for row in first.values()}

    def alike(self, other: "TableSource", name: str) -> list[str]:
        """A line of text if training prompts equal a held-out prompt of `other` but for case and spaces.

        name: of such a prompt.
        """
        texts = {text_hash(_simplified(other._held_out_rows.text(row))) for row in other._held_out}
        rows = sorted(row for row, text in self._simplified_rows.items() if text in texts)
        return self._told(rows, f"training prompts equal {name} but for case and spaces")

    def _told(self, rows: Sequence[int], description: str) -> list[str]:
        return [f"{len(rows):,} {description}; the first is {self._rows.text(rows[0])[:60]!r}"] if rows else []


def _value(record: Record, column: str) -> Any:
    """The value of a column, or of a field of an object: `meta.answer`; _MISSING without it."""
    if column in record:
        return record[column]
    outer, dot, field = column.partition(".")
    while dot:
        inner = record.get(outer)
        if isinstance(inner, Mapping) and (value := _value(dict(inner), field)) is not _MISSING:
            return value
        more, dot, field = field.partition(".")
        outer = f"{outer}.{more}"
    return _MISSING


def _is_conversation(messages: Sequence[Mapping[str, Any]]) -> bool:
    """Whether the messages are texts of user and assistant in turn, the last of the user; the first may be of the
    system."""
    roles = [message["role"] for message in messages]
    turns = roles[roles[0] == "system" :]
    in_turn = all(role == ("user", "assistant")[at % 2] for at, role in enumerate(turns))
    are_texts = all(isinstance(message["content"], str) for message in messages)
    return are_texts and in_turn and len(turns) % 2 == 1


def text_hash(text: str) -> str:
    """16 hex digits for equal texts."""
    return hashlib.sha256(text.encode()).hexdigest()[:16]


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
