"""Runs as a database: DuckDB over the views of views.py, read-only and without access to files or the network."""

import difflib
import itertools
import logging
import re
import tempfile
import threading
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import cached_property
from typing import Any

import pyarrow as pa
import pyarrow.dataset as ds

from pipelinerl_core.config import RunConfig
from pipelinerl_core.errors import BrokenRecord, ConfigError, MissingObject, PipelineRLError
from pipelinerl_core.interfaces import ObjectStore
from pipelinerl_core.report.query.reader import SEGMENT_ROWS, STORED_ROWS, RunReader
from pipelinerl_core.report.query.text import Texts
from pipelinerl_core.report.query.views import ROWS, VIEWS
from pipelinerl_core.report.run_list import run_names
from pipelinerl_core.run.locate import locate_run
from pipelinerl_core.run.records import RUN_KEY, RunRecord
from pipelinerl_core.storage.object_store import open_store
from pipelinerl_core.telemetry.log_lines import printable

logger = logging.getLogger(__name__)

_MEMORY = "1200MB"
"""Of DuckDB, which then writes to temporary files; Arrow needs up to some hundred megabytes beside it."""
_BATCH_ROWS = 10_000
_WATCHED_RUNS = 8
"""Runs that are watched at the same time, to tell their states."""
_INTERRUPT_SECONDS = 0.1
_RAISED = re.compile(r"executing the UDF: ConfigError: (.*)", re.DOTALL)
_NO_TABLE = re.compile(r"Table with name (\w+) does not exist!.*", re.DOTALL)
_NO_COLUMN = re.compile(r'Referenced column "(\w+)" not found')
_LINE = re.compile(r"\n\nLINE \d+:.*", re.DOTALL)
"""The statement with a mark below the error."""
_METRIC = re.compile(r"'([a-z_]+/\w+)'")
_METRIC_NAMES = {
    "metrics": "SELECT DISTINCT name FROM metrics",
    "steps": "SELECT DISTINCT unnest(map_keys(metrics)) FROM steps",
}
_SCHEMAS = {"stored_rows": STORED_ROWS, "segment_rows": SEGMENT_ROWS}


def stores_of(run: str, root: str = "") -> list[ObjectStore]:
    """The run, or all runs of a root, that an argument names. Raises ConfigError if there is none."""
    if "/" in run or "://" in run or run in (".", ".."):
        store = open_store(run)
        if not store.exists(RUN_KEY) and (names := run_names(store)):
            return [store.child(name) for name in names]
    return [open_store(locate_run(run, root))]


def check_alarm_query(config: RunConfig) -> None:
    """Prepare tracking.alarm_query on the views of a run without steps. Raises ConfigError."""
    if not (statement := config.tracking.alarm_query):
        return
    store = open_store("memory://alarm-query")
    record = RunRecord(run_id="r", created_at=0.0, code_version="", config=config.model_dump(mode="json"))
    store.put(RUN_KEY, record.model_dump_json().encode())
    try:
        with Database([store]) as database:
            with database.reading():
                if [each.type.name for each in _import_duckdb().extract_statements(statement)] != ["SELECT"]:
                    raise ConfigError("SQL: the text is not one SELECT")
            database.table(f"EXPLAIN {statement}")
    except ConfigError as error:
        raise ConfigError(f"tracking.alarm_query: {error}") from None


class TooSlow(ConfigError):
    """A statement has not ended within its time."""


class Database:
    """Runs in SQL. Not thread-safe. A statement reads the current state of the runs, and only objects of the views
    that it names."""

    def __init__(self, stores: Sequence[ObjectStore]) -> None:
        """Raises ConfigError without the package duckdb, StoreError if the record of the only run cannot be read."""
        self._duckdb = _import_duckdb()
        self._readers = [RunReader(store) for store in stores]
        run_id = self._readers[0].run_id if len(self._readers) == 1 else None  # raises before the directory exists
        self._spill = tempfile.TemporaryDirectory(prefix="pipelinerl-sql-")
        settings = {
            "memory_limit": _MEMORY,
            "temp_directory": self._spill.name,
            "python_enable_replacements": False,  # a statement reads no variable of the program
        }
        self._connection = self._duckdb.connect(config=settings)
        texts = Texts(self._model_of, run_id)
        for name, ids in (("decoded", "INTEGER[]"), ("token_text", "INTEGER")):
            function = getattr(texts, name)
            self._connection.create_function(name, function, ["VARCHAR", ids], "VARCHAR", type="arrow")
        for setting in ("enable_progress_bar", "enable_external_access"):  # the bar is written to stdout
            self._connection.execute(f"SET {setting} = false")
        self._connection.execute("SET lock_configuration = true")
        self._result: pa.RecordBatchReader | None = None

    def __enter__(self) -> "Database":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Free memory and temporary files."""
        self._connection.close()
        self._spill.cleanup()

    def sql(self, statement: str) -> pa.RecordBatchReader:
        """The result of a statement, computed while it is read; the next statement ends it.

        Raises ConfigError with one line for an error in the statement, StoreError for an object that cannot be read;
        reading the result raises the errors of DuckDB, for which `reading` is the context.
        """
        if self._result is not None:  # DuckDB runs no statement beside an open result
            self._result.close()
        with self.reading():
            if len(self._connection.extract_statements(statement)) > 1:
                raise ConfigError("SQL: give one statement at a time")
            self._prepare(statement)
            result = self._connection.sql(statement)
            reader = result.to_arrow_reader(_BATCH_ROWS) if result is not None else pa.table({}).to_reader()
        self._result = reader
        return reader

    def unknown_metrics(self, statement: str) -> list[str]:
        """One line for each name like 'reward/mean' in a statement that no step has, with a group that steps have.

        Raises as `sql`.
        """
        names = set(_METRIC.findall(statement))
        views = [view for view in _METRIC_NAMES if names and re.search(rf"\b{view}\b", statement)]
        known = [name for view in views for name in self.table(_METRIC_NAMES[view]).column(0).to_pylist()]
        wanted = {name for name in names if name.partition("/")[0] in {name.partition("/")[0] for name in known}}
        near = {name: difflib.get_close_matches(name, known, 1) for name in sorted(wanted - set(known))}
        return [
            f"no step has the metric {name}" + (f"; did you mean {like[0]}?" if like else "")
            for name, like in near.items()
        ]

    def table(self, statement: str, seconds: float | None = None) -> pa.Table:
        """The result of a statement in memory. Raises ConfigError and StoreError as `sql`.

        seconds: longest duration, after which it raises ConfigError; None: without limit.
        """
        with self._limit(seconds):
            reader = self.sql(statement)
            with self.reading():
                return reader.read_all()

    def first(self, statement: str, seconds: float) -> dict[str, Any] | None:
        """The first row of the result, None without a row; as `table`, without reading the other rows."""
        with self._limit(seconds):
            reader = self.sql(statement)
            with self.reading():
                rows = [row for batch in itertools.islice(reader, 1) for row in batch.slice(0, 1).to_pylist()]
            return rows[0] if rows else None

    def check_condition(self, text: str) -> None:
        """Raises ConfigError for a text that is not one condition of a WHERE."""
        with self.reading():
            ends = [self._duckdb.extract_statements(f"select 1 where {own}\n") for own in (text, f"(\n{text}\n)")]
        if [len(statements) for statements in ends] != [1, 1]:
            raise ConfigError("SQL: the text is not one condition")

    @contextmanager
    def _limit(self, seconds: float | None) -> Iterator[None]:
        if seconds is None:
            yield
            return
        is_late, is_over = threading.Event(), threading.Event()

        def interrupt() -> None:
            if is_over.wait(seconds):
                return
            is_late.set()
            while not is_over.wait(_INTERRUPT_SECONDS):  # DuckDB forgets an interrupt between two queries
                self._connection.interrupt()

        thread = threading.Thread(target=interrupt, name="sql-limit", daemon=True)
        thread.start()
        try:
            yield
        except (KeyboardInterrupt, ConfigError, BrokenRecord):  # DuckDB tells of an interrupt in three ways
            if not is_late.is_set():
                raise
            raise TooSlow(f"the statement takes longer than {seconds:.0f} s: ask for fewer steps") from None
        finally:
            is_over.set()
            thread.join()

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Turn errors of DuckDB and Arrow into ConfigError, for the statement, or StoreError, for an object."""
        try:
            yield
        except (self._duckdb.Error, pa.ArrowException, OSError) as error:
            raise _error_of(error) from None
        except RuntimeError as error:
            if "interrupted" not in str(error):
                raise
            raise KeyboardInterrupt from None  # Ctrl-C while DuckDB computes

    def _model_of(self, run_id: str) -> str:
        return next(reader.config.model.path for reader in self._readable if reader.run_id == run_id)

    def _prepare(self, statement: str) -> None:
        """Make the relations that a statement names; a name in a comment or a column does no harm."""
        for reader in self._readers:
            reader.refresh()
        views = [name for name in VIEWS if name in set(re.findall(r"\w+", statement.lower()))]
        needed = {name: None for view in views for name in VIEWS[view].uses or (view,)}
        for name in needed:
            self._register(name)
        if "stored_rows" in needed:
            names = Counter(reader.run_id for reader in self._readable)
            if twice := [name for name, count in names.items() if count > 1]:
                raise ConfigError(f"several runs of the root have the id {twice[0]}: ask them one by one")
            self._connection.execute(f"CREATE OR REPLACE TEMP VIEW rows AS {ROWS}")
        for name in views:
            if VIEWS[name].source:
                self._connection.execute(f"CREATE OR REPLACE TEMP VIEW {name} AS {VIEWS[name].select()}")

    def _register(self, name: str) -> None:
        with suppress(self._duckdb.CatalogException):
            self._connection.unregister(name)
        readers = self._readers if name == "runs" else self._readable
        if name in _SCHEMAS:
            datasets = [dataset for reader in readers for dataset in getattr(reader, name)()]
            empty = ds.dataset(_SCHEMAS[name].empty_table())
            self._connection.register(name, ds.dataset(datasets) if datasets else empty)
        elif name in VIEWS:
            self._connection.register(name, records_table(name, readers))
        else:
            self._connection.register(name, pa.concat_tables([getattr(reader, name)() for reader in readers]))

    @cached_property
    def _readable(self) -> list[RunReader]:
        """The run, or the runs of a root whose record can be read; raises StoreError or ConfigError without any."""
        readable = []
        for reader in self._readers:
            try:
                _ = reader.config
            except (BrokenRecord, MissingObject, ConfigError) as error:
                if len(self._readers) == 1:
                    raise
                logger.warning("left out of all views but runs: %s", error)
            else:
                readable.append(reader)
        if not readable:
            raise ConfigError("no run of the root can be read; the view runs says why")
        return readable


def records_table(name: str, readers: Iterable[RunReader]) -> pa.Table:
    """The rows of a view of records."""
    columns = VIEWS[name].columns
    schema = pa.schema([(column, _ARROW_TYPES[columns[column].expression]) for column in columns])
    if name == "runs":  # the hub of a run that was killed is watched for seconds
        with ThreadPoolExecutor(_WATCHED_RUNS) as pool:
            rows = [row for of_run in pool.map(lambda reader: list(reader.runs()), readers) for row in of_run]
    else:
        rows = [row for reader in readers for row in getattr(reader, name)()]
    return pa.Table.from_pylist(rows, schema)


_ARROW_TYPES = {
    "VARCHAR": pa.string(),
    "JSON": pa.string(),
    "DOUBLE": pa.float64(),
    "BIGINT": pa.int64(),
    "BOOLEAN": pa.bool_(),
    "VARCHAR[]": pa.list_(pa.string()),
    "MAP(VARCHAR, DOUBLE)": pa.map_(pa.string(), pa.float64()),
}


def _error_of(error: Exception) -> PipelineRLError:
    text = str(error)
    raised = _RAISED.search(text)  # by a function of Texts
    if raised is not None:
        return ConfigError(_one_line(raised[1]))
    if isinstance(error, (pa.ArrowException, OSError)) or "reading the stream registered as" in text:
        text = text.rpartition("failed: ")[2].splitlines()[0]
        return BrokenRecord(f"{text}. If the run was compacted during the query, repeat the query")
    return ConfigError(f"SQL: {_one_line(_with_hint(_LINE.sub('', text)))}")


def _with_hint(text: str) -> str:
    """The text with what DuckDB cannot know: the names of the views, and where the columns of a prompt's row are."""
    if table := _NO_TABLE.search(text):
        near = difflib.get_close_matches(table[1], VIEWS, 1)
        views = f"did you mean {near[0]}?" if near else f"the views are {', '.join(VIEWS)}"
        return f"there is no view {table[1]}; {views}"
    if column := _NO_COLUMN.search(text):
        return f"{text}. A column of the prompt's row is task->>'{column[1]}'"
    return text


def _one_line(text: str) -> str:
    """The text without line breaks and control characters, which values in a message of DuckDB may have."""
    return printable(" ".join(text.split()))


def _import_duckdb() -> Any:
    try:
        import duckdb
    except ImportError:
        raise ConfigError("SQL needs the package duckdb: pip install 'pipelinerl[sql]'") from None
    return duckdb
