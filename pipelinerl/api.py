"""Runs from a notebook or a program: start or open a run, read metrics and rollouts, evaluate, export.

run = pipelinerl.start("quickstart", ["trainer.steps=20"])
run.wait()
run.metrics()      # one row per step
run.rollouts(20)   # the trained rows of step 20, with their texts

A run that `start` or `resume` has started is a child process: the same command line, checks and supervision as
`pipelinerl train`. Reading needs no child process and works on runs of other programs and hosts.
"""

import itertools
import json
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from operator import index
from pathlib import Path
from threading import Event
from typing import TYPE_CHECKING, Any, SupportsFloat, SupportsIndex

from pipelinerl_core.config import RunConfig, as_toml
from pipelinerl_core.errors import ConfigError, MissingObject, PipelineRLError
from pipelinerl_core.models.resolve import load_config as _load_config
from pipelinerl_core.report.live_view import run_status
from pipelinerl_core.report.run_list import list_runs
from pipelinerl_core.run.commits import Commits, read_commits
from pipelinerl_core.run.context import open_run as _open_context
from pipelinerl_core.run.drain import request_drain
from pipelinerl_core.run.follow import RunFollower, commit_metrics
from pipelinerl_core.run.locate import locate_run, root_url
from pipelinerl_core.run.records import REPORT_JSON_KEY
from pipelinerl_core.run.versions import stored_versions
from pipelinerl_core.storage.object_store import open_store
from pipelinerl_core.supervision.role_commands import ending_with_parent

if TYPE_CHECKING:
    import pyarrow as pa

_POLL_SECONDS = 0.3
_STOP_SECONDS = 60.0
"""Deadline of the end of a run after `stop(now=True)`."""
_LOG_LINES = 15
_PREFECT_LINE = re.compile(r"\d\d:\d\d:\d\d\.\d+ \| ")
"""The beginning of a line of Prefect's log."""


def _text(name: str, value: object) -> str:
    """A text or a path as text. Raises ConfigError for another value of the argument `name`."""
    if isinstance(value, str | Path):
        return str(value)
    raise ConfigError(f"{name} is {value!r:.100}, but must be text or a path")


def _texts(overrides: Iterable[str]) -> list[str]:
    """Raises ConfigError unless the overrides are several texts."""
    values = None if isinstance(overrides, str) or not isinstance(overrides, Iterable) else list(overrides)
    if values is None or not all(isinstance(value, str) for value in values):
        raise ConfigError(f'overrides is {overrides!r:.100}, but must be a list such as ["trainer.steps=20"]')
    return values


def _number(name: str, value: SupportsIndex) -> int:
    """Raises ConfigError for another value of the argument `name` than a whole number."""
    try:
        return index(value)
    except TypeError:
        raise ConfigError(f"{name} is {value!r:.100}, but must be a whole number") from None


def load_config(source: str | Path, overrides: Iterable[str] = ()) -> RunConfig:
    """The configuration of a preset name or TOML file, with overrides such as "trainer.steps=20".

    Raises ConfigError with one line for each mistake.
    """
    return _load_config(_text("source", source), _texts(overrides))


def start(
    config: RunConfig | str | Path = "quickstart",
    overrides: Iterable[str] = (),
    *,
    root: str | Path = "",
    detached: bool = False,
) -> "Run":
    """Start a run and return when the run exists in the store; the training continues in a child process.

    config: a preset, a TOML file, or a configuration of `load_config`. root: as --root of the command line.
    detached: the run continues when this process ends; otherwise the run is killed with this process, and
    `open_run(...).resume()` continues the run. Raises ConfigError if the run is refused, PipelineRLError if the run
    ends before its first record.
    """
    if isinstance(config, RunConfig):
        source = Path(tempfile.mkdtemp(prefix="pipelinerl-")) / "notebook.toml"
        source.write_text(as_toml(config), encoding="utf-8")
        config = source
    command = ["train", _text("config", config), *_texts(overrides), "--root", root_url(_text("root", root))]
    return _launch(command, detached=detached)


def train(
    data: Any,
    reward: str | Callable[..., Any] | Sequence[Callable[..., Any]] = "",
    *,
    model: str | Path = "",
    overrides: Iterable[str] = (),
    root: str | Path = "",
) -> "Run":
    """Train on rows with a reward function, show the progress, and return when the run has ended.

    The settings are guessed from the rows, as `pipelinerl try` guesses them; overrides win. A keyboard interrupt
    stops the run; `open_run().resume()` continues the run.

    data: path of a file, list of dictionaries, or table of pandas, pyarrow or datasets.
    reward: a function with the signature of docs/rewards.md, of TRL or of verl, a list of functions whose rewards are
    added, or FILE.py:FUNCTION; "": compare with the answer of the row.
    model: directory or hub name; "": SmolLM2-135M-Instruct.

    Raises ConfigError if the run is refused, PipelineRLError if it fails.
    """
    from pipelinerl_core.tools.own_objects import function_location, rows_file
    from pipelinerl_core.tools.own_rows import PRESET, guess

    chosen = [*((f"model.path={_text('model', model)}",) if model else ()), *_texts(overrides)]
    run = start(PRESET, [*guess(str(rows_file(data)), function_location(reward), chosen), *chosen], root=root)
    run._show()
    return run


def open_run(run: str | Path = "latest", root: str | Path = "") -> "Run":
    """An existing run: id under the root, `latest`, path or URL. Raises ConfigError if there is no such run."""
    return Run(locate_run(_text("run", run), _text("root", root)))


def runs(root: str | Path = "", limit: int = 0) -> list[dict[str, Any]]:
    """The newest `limit` runs below a root (0: all), newest first, as `pipelinerl runs --json` lists them."""
    listed = list_runs(open_store(root_url(_text("root", root))), _number("limit", limit))
    return [run.document() for run in listed]


class Run:
    """A run, live or not. Every method reads the current state from the store of the run."""

    def __init__(self, url: str, process: "_Process | None" = None) -> None:
        """url: of a run; process: of a run that this process has started."""
        self.url = url
        """Store of the run, file:// or s3://."""
        self.id = url.rpartition("/")[2]
        self._store = open_store(url)
        self._process = process

    def __repr__(self) -> str:
        return f"<Run {self.id} at {self.url}>"

    @property
    def config(self) -> RunConfig:
        """The resolved configuration, with the changes of resumes."""
        return _open_context(self.url).config

    @property
    def report_path(self) -> str:
        """Path or URL of report.html, which exists after the first minutes of a run and is complete at its end."""
        return f"{self.url.removeprefix('file://')}/report.html"

    def status(self) -> dict[str, Any]:
        """State, step, newest figures and actors, as `pipelinerl status --json` prints them.

        The state is `starting` until the processes of a run of `start` answer.
        """
        status = run_status(self._store)
        if status["state"] == "stopped" and not status["step"] and self._process and self._process.is_running:
            status["state"] = "starting"
        return status

    def report(self) -> dict[str, Any]:
        """report.json. Raises MissingObject before the report was written for the first time."""
        document: dict[str, Any] = json.loads(self._store.get(REPORT_JSON_KEY))
        return document

    def metrics(self) -> "pa.Table":
        """One row per committed step: `step`, `committed_at` (Unix seconds) and the metrics of docs/metrics.md.

        A metric that a step lacks is null. Step 0, the initial weights, is left out.
        """
        import pyarrow as pa

        every = list(read_commits(self._store).values())
        commits = [commit for commit in every if commit.step > 0]
        previous = [None, *every][-len(commits) - 1 : -1]
        values = [commit_metrics(commit, before) for before, commit in zip(previous, commits, strict=True)]
        names = sorted({name for metrics in values for name in metrics})
        columns: dict[str, Any] = {
            "step": pa.array([commit.step for commit in commits], pa.int64()),
            "committed_at": pa.array([commit.committed_at for commit in commits], pa.float64()),
        }
        for name in names:
            columns[name] = pa.array([metrics.get(name) for metrics in values], pa.float64())
        return pa.table(columns)

    def rollouts(self, steps: int | Iterable[int] | None = None, *, text: bool = True) -> "pa.Table":
        """The rows that were trained, in training order, with the columns of docs/storage.md.

        `task` has the columns of the prompt's row, or the environment's task, as JSON.

        steps: a step, or several; None: all steps whose rows the run keeps (`store.keep_rows`).
        text: add `prompt`, `completion` and `turns`, decoded by the
        tokenizer of the run's model; turns: [{given, text, reward}, ...], null for one turn; given: what the
        environment said before the turn. Raises ConfigError for a step that was not trained, or if this host lacks
        the tokenizer, and MissingObject if the rows of a step are not there.
        """
        import pyarrow as pa

        from pipelinerl_core.data.compaction import removed_through
        from pipelinerl_core.data.schema import BATCH_SCHEMA
        from pipelinerl_core.data.trained import TrainedRows

        commits = read_commits(self._store)
        trained = TrainedRows(self._store)
        removed = removed_through(self._store, self.config.store.keep_rows) if steps is None else -1
        batches = []
        for step in _steps(steps, commits):
            try:
                batches += trained.batches(commits[step])
            except MissingObject:
                if step > removed:
                    raise
        table = pa.Table.from_batches(batches, BATCH_SCHEMA)
        return self._with_text(table) if text else table

    def sql(self, statement: str) -> "pa.Table":
        """The result of a SQL statement over the views of docs/sql.md.

        Raises ConfigError for an error in the statement, without the package duckdb, and if a text is asked for and
        this host lacks the tokenizer; StoreError for an object that cannot be read.
        """
        from pipelinerl_core.report.query.database import Database

        with Database([self._store]) as database:
            return database.table(_text("statement", statement))

    def evaluations(self) -> list[dict[str, Any]]:
        """All evaluations by version: accuracy, its 95 % interval, components, sampled completions."""
        follower = RunFollower(self._store)
        follower.refresh()
        records = (
            *follower.evals.values(),
            *(record for each in follower.set_evals.values() for record in each.values()),
        )
        return [record.document() for record in records]

    def evaluate(self, version: int | str = "last") -> list[dict[str, Any]]:
        """Evaluate a weight version, "first", "last" or "all" on the held-out prompts, in a child process."""
        from pipelinerl_core.supervision.run_roles import evaluate

        records = evaluate(_open_context(self.url), str(version), Event()) or []
        return [record.document() for record in records]

    def versions(self) -> list[int]:
        """The weight versions that the store has, which `evaluate` and `export` accept."""
        return sorted(stored_versions(self._store))

    def export(self, directory: str | Path, version: int | str = "last") -> Path:
        """Write a version as a directory for transformers, vLLM and model.path; the directory must not exist.

        version: "last", "first" or any step; one that the store does not have is computed again.
        """
        from pipelinerl_core.tools.export import export

        return Path(export(self.url, Path(_text("directory", directory)), str(version))["directory"]).resolve()

    @property
    def is_running(self) -> bool:
        """Whether the run is live, on this host or another."""
        if self._process is not None and self._process.is_running:
            return True
        return bool(self.status()["state"] == "running")

    def wait(self, timeout_seconds: float | None = None) -> dict[str, Any]:
        """Wait for the end of the run and return `status()`.

        Raises TimeoutError after timeout_seconds, PipelineRLError with the last lines of the log if the run that this
        process started has failed. A keyboard interrupt ends the wait and not the run.
        """
        if timeout_seconds is not None and not isinstance(timeout_seconds, SupportsFloat):
            raise ConfigError(f"timeout_seconds is {timeout_seconds!r:.100}, but must be a number")
        deadline = None if timeout_seconds is None else time.monotonic() + float(timeout_seconds)
        while self.is_running:
            if deadline is not None and time.monotonic() > deadline:
                raise TimeoutError(f"{self.id} still runs after {timeout_seconds:g} s")
            time.sleep(_POLL_SECONDS)
        if self._process is not None:
            self._process.raise_if_failed()
        return self.status()

    def _show(self) -> None:
        """Wait as `wait` does, with the steps and the summary on stderr; a keyboard interrupt stops the run."""
        assert self._process is not None
        try:
            for line in self._process.follow():
                if not _PREFECT_LINE.match(line):
                    sys.stderr.write(f"{line}\n")
                    sys.stderr.flush()
        except KeyboardInterrupt:
            self.stop(now=True)
            raise
        self._process.raise_if_failed()

    def stop(self, *, now: bool = False) -> None:
        """Stop a live run after its next commit, or at once if `now`; `resume` continues the run.

        now=True waits for the end of all processes and needs a run that this process has started.
        """
        if not now:
            request_drain(self.url)
        elif self._process is None:
            raise ConfigError(f"{self.id} was not started by this process. Call stop(), which drains the run")
        else:
            self._process.interrupt()

    def resume(self, overrides: Iterable[str] = (), *, detached: bool = False) -> "Run":
        """Continue the run from its last commit in a child process; raises ConfigError if the run is live."""
        return _launch(["resume", self.url, *_texts(overrides)], detached=detached)

    def _with_text(self, table: "pa.Table") -> "pa.Table":
        import pyarrow as pa

        from pipelinerl_core.report.query.text import tokenizer_of

        tokenizer = tokenizer_of(self.config.model.path)
        for name in ("prompt", "completion"):
            ids = table.column(f"{name}_token_ids").to_pylist()
            table = table.append_column(name, pa.array(tokenizer.decode_batch(ids, skip_special_tokens=False)))
        rows = table.select(["completion_token_ids", "turn_spans", "turn_rewards"]).to_pylist()
        turns = [_turns(tokenizer, **row) if row["turn_spans"] else None for row in rows]
        kind = pa.struct([("given", pa.string()), ("text", pa.string()), ("reward", pa.float64())])
        return table.append_column("turns", pa.array(turns, pa.list_(kind)))


def _turns(
    tokenizer: Any,
    completion_token_ids: list[int],
    turn_spans: list[dict[str, int]],
    turn_rewards: list[float] | None,
) -> list[dict[str, Any]]:
    edges = [edge for span in turn_spans for edge in (span["start"], span["end"])]
    pieces = [completion_token_ids[start:end] for start, end in itertools.pairwise([0, *edges])]
    texts = tokenizer.decode_batch(pieces, skip_special_tokens=False)
    rewards: Sequence[float | None] = turn_rewards or [None] * len(turn_spans)
    return [
        {"given": given, "text": text, "reward": reward}
        for given, text, reward in zip(texts[::2], texts[1::2], rewards, strict=True)
    ]


def _steps(steps: int | Iterable[int] | None, commits: Commits) -> list[int]:
    """The steps to read. Raises ConfigError for a step without a commit."""
    known = [step for step in commits if step > 0]
    if steps is None:
        wanted = known
    elif isinstance(steps, Iterable) and not isinstance(steps, str):
        wanted = [_number("a step", step) for step in steps]
    else:
        wanted = [_number("a step", steps)]
    for step in wanted:
        if step not in known:
            there = f"steps {known[0]} to {known[-1]} are" if known else "no step is"
            raise ConfigError(f"step {step} is not committed; {there}")
    return wanted


class _Process:
    """The command line of a run as a child process, with its output in a file."""

    def __init__(self, arguments: Sequence[str], *, detached: bool) -> None:
        self._log = Path(tempfile.mkdtemp(prefix="pipelinerl-")) / "output.log"
        command = [sys.executable, "-m", "pipelinerl.flows.cli", *arguments]
        with self._log.open("wb") as output:
            self._child = subprocess.Popen(
                command if detached else ending_with_parent(command),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # Ctrl-C in a notebook or shell interrupts the cell and not the run
            )

    @property
    def is_running(self) -> bool:
        return self._child.poll() is None

    def url(self) -> str:
        """Wait for the line that names the run. Raises ConfigError or PipelineRLError if the command ends before."""
        while True:
            is_running = self.is_running
            for line in self._lines():
                if line.startswith("run ") and " at " in line:
                    return line.partition(" at ")[2]
            if not is_running:
                self.raise_if_failed()
                raise PipelineRLError(f"the run ended at once:\n{self._tail()}")
            time.sleep(_POLL_SECONDS)

    def follow(self) -> Iterator[str]:
        """The lines of the output, as they are written, until the process ends."""
        num_lines = 0
        while True:
            is_running = self.is_running
            text = self._log.read_text(errors="replace")
            lines = (text if not is_running else text[: text.rfind("\n") + 1]).splitlines()
            yield from lines[num_lines:]
            num_lines = len(lines)
            if not is_running:
                return
            time.sleep(_POLL_SECONDS)

    def raise_if_failed(self) -> None:
        """Raise ConfigError after exit code 2, PipelineRLError after another failure; a stopped run is no failure."""
        code = self._child.poll()
        if code == 2:
            raise ConfigError(self._lines()[-1].removeprefix("pipelinerl: "))
        if code not in (None, 0, 130, 143):
            raise PipelineRLError(f"the run ended with exit code {code}:\n{self._tail()}")

    def interrupt(self) -> None:
        """Ctrl-C; wait for the end of all processes of the run."""
        self._child.send_signal(signal.SIGINT)
        self._child.wait(_STOP_SECONDS)

    def _lines(self) -> list[str]:
        return self._log.read_text(errors="replace").splitlines()

    def _tail(self) -> str:
        return "\n".join(self._lines()[-_LOG_LINES:])


def _launch(arguments: Sequence[str], *, detached: bool) -> Run:
    process = _Process(arguments, detached=detached)
    return Run(process.url(), process)
