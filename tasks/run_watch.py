"""Follows a run by its stored objects: logs metrics to MLflow, makes artifacts in Prefect, updates the terminal view.

After each reading, the watch pauses for at least 50 times the duration of the reading.
"""

import logging
import shlex
import time
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Any
from uuid import UUID

from prefect.artifacts import (
    create_link_artifact,
    create_markdown_artifact,
    create_progress_artifact,
    create_table_artifact,
    update_progress_artifact,
)
from prefect.settings import PREFECT_CLIENT_MAX_RETRIES, temporary_settings
from pydantic_core import PydanticSerializationError

from pipelinerl.tasks.alarms import RUN_STALLED, Alarms
from pipelinerl.tasks.drain_request import BY_STATE
from pipelinerl.tasks.notifications import REPORT_LABEL, label_flow_run
from pipelinerl.tasks.placement import RUN_THREAD
from pipelinerl.tasks.suspension import Inquiry
from pipelinerl_core.errors import DeadlineExceeded, MissingObject, StoreError
from pipelinerl_core.report.equal_rewards import (
    WARN_STEPS,
    comparison_text,
    equal_reward,
    example_of,
    example_text,
    headline,
)
from pipelinerl_core.report.live_view import LiveView
from pipelinerl_core.report.markdown import report_markdown
from pipelinerl_core.report.rollout_table import COLUMNS, MAX_STEPS, TABLE_NAME, RolloutTable
from pipelinerl_core.report.rollout_traces import log_traces
from pipelinerl_core.report.samples import token_decoder
from pipelinerl_core.report.scrape_targets import role_progress
from pipelinerl_core.run.context import RunContext, log_directory
from pipelinerl_core.run.drain import ask_to_drain, wants_drain
from pipelinerl_core.run.follow import Forwarder, RunFollower
from pipelinerl_core.run.hub_status import HubWatch
from pipelinerl_core.run.locate import page_url, plain_name
from pipelinerl_core.run.mlflow_run import RunTracker
from pipelinerl_core.run.reading import read_record
from pipelinerl_core.run.records import REPORT_HTML_KEY, REPORT_JSON_KEY, Commit, RoleRecord, role_key
from pipelinerl_core.supervision.log_copies import all_logs, lines_of_failure
from pipelinerl_core.supervision.supervise import LAST_LINES
from pipelinerl_core.telemetry.mlflow import Status
from pipelinerl_core.telemetry.redact import redact_text
from pipelinerl_core.tools.promote import RunModels

logger = logging.getLogger(__name__)

READ_SECONDS = 2.0
"""Shortest time between two readings of the run's commits."""
READ_SHARE = 0.02
"""Largest share of a core for reading; if readings take longer, they are less frequent."""
PROGRESS_SECONDS = 10.0
"""Shortest time between two updates of the progress artifact."""
TABLE_SECONDS = 30.0
"""Shortest time between two writings of the table of sampled rollouts."""
TABLE_BATCHES = 5
"""Batches read for one update of the table during the run."""
STALL_SECONDS = 1200.0
"""Time without a commit and without a sampled token after which the run has stalled.

After a start, the trainer may train many steps again while the actors wait; each of these steps counts as progress.
"""
FAILURE_LINES = 20
"""Lines of a role's log in the artifact of a failure."""
TABLE_VERSIONS = 50
"""Newest weight versions in the table artifact; weights.parquet has all versions."""


class RunWatch:
    """Observes a live run. An outage of MLflow or of the Prefect server does not end the run."""

    def __init__(self, run: RunContext, tracker: RunTracker) -> None:
        """`tracker`: closed at the end of the context."""
        self._run = run
        thread = RUN_THREAD.get()
        shares_terminal = thread is not None and not thread.is_alone
        self._view = LiveView(None, run.config.trainer.steps, name=run.run_id if shares_terminal else "")
        self._follower = RunFollower(run.store)
        self._hub = HubWatch(run.store)
        self._alarms = Alarms(run.run_id)
        self._forwarder = Forwarder(self._follower, tracker)
        self._tracker = tracker
        self._decode = token_decoder(run.config.model.path)
        self._table = RolloutTable(run.store, run.config.trainer.steps, self._decode)
        self._has_warned = False
        self._table_at = -TABLE_SECONDS
        self._table_rows = 0
        self._linked: set[str] = set()
        self.waits_for_machine: Callable[[], bool] = lambda: False
        """Whether the trainer, or every actor, waits for a worker: the run does not stall then."""
        self.is_held = False
        """A user has suspended or deleted the flow run; the run drains."""
        self._inquiry = Inquiry()
        self._progress: UUID | None = None
        self._progress_at = -PROGRESS_SECONDS
        self._next_reading = 0.0
        self._live: dict[str, Any] = {}
        self._seen: object = None
        self._start_beat = 0.0
        self._changed_at = time.monotonic()
        self._start_step = run.config.trainer.steps
        """Newest committed step when this start began. Only later steps count for trainer.equal_reward_steps."""
        self._read()
        self._start_step = self.committed_step
        stored = self._follower.run.config
        _quietly("alarms of earlier starts", lambda: self._alarms.skip(stored, self.commits, self._follower.last))

    def __enter__(self) -> "RunWatch":
        self._view.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Log the last metrics and rollouts, close the view, and end the MLflow run with the status of the run."""
        was_stopped = kind is not None and not issubclass(kind, Exception)
        _quietly("last reading of the run", self._read)
        _quietly("rollout table", lambda: self._write_table(TABLE_BATCHES if was_stopped else MAX_STEPS))
        self._view.__exit__(kind, error, trace)
        if kind is not None:  # else `finish` has shown it
            _quietly("progress artifact", self._show_progress)
        _quietly("table of logs", self._show_logs)
        if isinstance(error, Exception):
            _quietly("artifact of the failure", lambda: self._show_failure(error))
        status: Status = "KILLED" if was_stopped else "FAILED" if kind else "FINISHED"
        _quietly("end of the MLflow run", lambda: self._tracker.close(status, self._log_rest), self._repeat)

    def is_complete(self) -> bool:
        """Whether the last step is committed, as of now."""
        if self.committed_step < self._run.config.trainer.steps:
            self._read()
        return self.committed_step >= self._run.config.trainer.steps

    @property
    def committed_step(self) -> int:
        """Newest committed step; -1 before the first commit."""
        last = self._follower.last
        return last.step if last else -1

    @property
    def commits(self) -> Mapping[int, Commit]:
        """Step -> valid commit, as of the last reading."""
        return self._follower.commits

    def poll(self) -> None:
        """Read new objects if the pause is over. Raises DeadlineExceeded if the run has stalled."""
        is_due = time.monotonic() >= self._next_reading
        self.look()
        if is_due:
            self._check_stall()
        if time.monotonic() - self._progress_at >= PROGRESS_SECONDS:
            self._progress_at = time.monotonic()
            _quietly("progress artifact", self._show_progress)
            _quietly("links to live report and metrics", self._show_links)
            _quietly("alarm", lambda: self._alarms.check(self.commits))
            stored = self._follower.run.config
            _quietly("alarm", lambda: self._alarms.check_parts(stored, self._follower.last))
            if query := self._run.config.tracking.alarm_query:
                _quietly("tracking.alarm_query", lambda: self._alarms.check_query(self._run.store, query))

    def look(self) -> None:
        """Read new objects if the pause is over, and update the view; if a user has suspended the flow run, drain."""
        if time.monotonic() >= self._next_reading:
            self._read()
        if not self.is_held and (reason := self._inquiry.why_drain()):
            _quietly("request to drain", lambda: self._drain(reason))

    def _drain(self, reason: str) -> None:
        logger.info("%s: the run drains", reason)
        if not wants_drain(self._run.store):  # the request of a user lasts longer
            ask_to_drain(self._run.store, by=f"{BY_STATE}{reason}")
        self.is_held = True

    def finish(self, report: Mapping[str, Any] | None) -> None:
        """Read the remaining objects and make the artifacts: progress, weight versions, report, link to the metrics.

        Raises nothing. report: None if it could not be written.
        """
        _quietly("last reading of the run", self._read)
        if report is not None:
            _quietly("files of the MLflow run", self._log_report, self._repeat)
        if self._run.config.tracking.chosen_uri != "none" and self.committed_step >= 0:
            _quietly("models and traces of the MLflow run", self._log_models, self._repeat)
        _quietly("artifacts of the flow run", lambda: self._show_end(report), self._repeat)

    @property
    def _repeat(self) -> str:
        """The command that makes up for what failed at the end."""
        return f"; `pipelinerl resume {self._run.run_id}` repeats this"

    def _log_report(self) -> None:
        for name in (REPORT_JSON_KEY, REPORT_HTML_KEY):
            self._tracker.log_artifact(name, self._run.store.get(name))

    def _log_models(self) -> None:
        self._write_table(MAX_STEPS)
        models = RunModels(self._run, self._follower)
        models.log_ends()
        log_traces(models.uri, models.mlflow_run, self._table.traced.values(), self._decode)

    def _show_end(self, report: Mapping[str, Any] | None) -> None:
        """Make the artifacts of a run that has ended; after a failure of the Prefect server, none is tried."""
        self._show_progress()
        rows = version_rows(self._follower.commits.newest(TABLE_VERSIONS))
        if rows:
            self._table_artifact("versions", rows, "newest weight versions")
        if report is not None:
            create_markdown_artifact(
                report_markdown(report, list(self._follower.evals.values())),
                key=self._key("report"),
                description=f"report of {self._run.run_id}",
            )
            label_flow_run({REPORT_LABEL: f"{self._run.store.url}/{REPORT_HTML_KEY}"})
        self._show_links()

    def _read(self) -> None:
        """Log new commits and evaluations, and update the view with them and the hub's live totals."""
        begun = time.monotonic()
        try:
            self._forwarder.refresh()
            hub = self._hub.look()
            self._live = hub.live if hub else {}
            progress = role_progress(self._run.store)
            self._view.update(hub, self._follower, progress, silent_seconds=self._hub.silent_seconds)
            self._check_equal_rewards()
            if begun - self._table_at >= TABLE_SECONDS:
                self._write_table()
        except StoreError as error:  # the roles have deadlines for the store; the watch tries again later
            logger.warning("could not read the run, trying again later: %s", error)
        now = time.monotonic()
        self._next_reading = now + max(READ_SECONDS, (now - begun) / READ_SHARE)

    def _log_rest(self) -> bool:
        try:
            return self._forwarder.push()
        except StoreError as error:
            logger.warning("could not read commits for MLflow, trying again: %s", error)
            return False

    def _check_equal_rewards(self) -> None:
        """If the rewards of the first steps are all equal: once per start, log a completion and its reference; after
        trainer.equal_reward_steps, drain."""
        reward = equal_reward(self.commits.values(), WARN_STEPS)
        config = self._run.config
        if reward is None or config.trains_equal_rewards:
            return
        limit = max(WARN_STEPS, config.trainer.equal_reward_steps) if config.trainer.equal_reward_steps else 0
        is_reached = self._start_step < limit <= self.committed_step < config.trainer.steps
        if is_reached and not wants_drain(self._run.store):
            logger.warning("the run drains: its rewards are all equal (trainer.equal_reward_steps=%d)", limit)
            ask_to_drain(self._run.store, by=f"trainer.equal_reward_steps={config.trainer.equal_reward_steps}")
        if self._has_warned:
            return
        self._has_warned = True
        document = config.model_dump(mode="json")
        example = example_of(self._run.store, self._follower.last, document, self._decode)
        logger.warning(
            "%s. %s Example: %s",
            headline(reward, self.committed_step, is_over=False), comparison_text(document), example_text(example),
        )  # fmt: skip

    def _write_table(self, limit: int = TABLE_BATCHES) -> None:
        """Log the table of sampled rollouts if the table has new rows; reads at most `limit` batches."""
        self._table.update(self._follower.commits, limit)
        rows = self._table.rows
        if len(rows) > self._table_rows:
            self._table_at, self._table_rows = time.monotonic(), len(rows)
            self._tracker.log_table(TABLE_NAME, COLUMNS, rows)

    def _show_progress(self) -> None:
        percent = 100.0 * max(0, self.committed_step) / self._run.config.trainer.steps
        if self._progress is None:
            made = create_progress_artifact(
                percent, key=self._key("progress"), description=f"optimizer steps of {self._run.run_id}"
            )
            self._progress = made if isinstance(made, UUID) else None
        else:
            update_progress_artifact(self._progress, percent)

    def _show_logs(self) -> None:
        """Make a table artifact: number of warnings and errors of each role and host, and the last of them."""
        rows = [
            {name: log[name] for name in ("role", "host", "lines", "warnings", "errors", "last_problem")}
            for log in all_logs(log_directory(self._run.store.url, self._run.run_id), self._run.store)
        ]
        if rows:
            self._table_artifact("logs", rows, "logs of the roles")

    def _show_failure(self, error: Exception) -> None:
        """Make an artifact: what failed, the command that continues the run, and the last lines of a role's log."""
        steps = f"{max(0, self.committed_step)} of {self._run.config.trainer.steps} steps are committed"
        resume = f"pipelinerl resume {shlex.quote(self._run.store.url)}"
        lines = [
            f"# {self._run.run_id} has failed",
            _verbatim([redact_text(str(error)).partition(LAST_LINES)[0] or type(error).__name__]),
            f"{steps}. After the cause is removed, Retry or `{resume}` continues the run.",
        ]
        directory = log_directory(self._run.store.url, self._run.run_id)
        try:
            place, last_lines = lines_of_failure(directory, self._run.store, str(error), FAILURE_LINES)
        except StoreError as unread:
            lines += [f"The logs could not be read: {unread}"]
        else:
            lines += [f"The last lines of {place}:", _verbatim(last_lines)] if place else []
        create_markdown_artifact(
            "\n\n".join(lines), key=self._key("failure"), description=f"failure of {self._run.run_id}"
        )

    def _show_links(self) -> None:
        """Make the link artifacts, each once per start."""
        links = {"page": page_url(self._run.run_id), "mlflow": self._tracker.page}
        texts = {"page": "live report", "mlflow": "page of the metrics"}
        for name, link in links.items():
            if link and name not in self._linked:
                description = f"{texts[name]} of {self._run.run_id}"
                create_link_artifact(link, link_text=texts[name], key=self._key(name), description=description)
                self._linked.add(name)

    def _table_artifact(self, name: str, rows: list[dict[str, Any]], description: str) -> None:
        create_table_artifact(rows, key=self._key(name), description=f"{description}: {self._run.run_id}")

    def _key(self, name: str) -> str:
        """Key of an artifact, in lower-case letters, digits and dashes: the preset or file and the kind. The runs of
        a preset are versions of one artifact, so that Prefect's page of the artifact has their history."""
        return f"{plain_name(self._run.run_id.rpartition('-')[0] or self._run.run_id)}-{name}"

    def _check_stall(self) -> None:
        """Raise DeadlineExceeded without a commit, a token or a start of the trainer for STALL_SECONDS, in which the
        trainer has a machine.

        This process measures all times with its own clock, because the clock of the trainer's host may differ.
        """
        seen = (self.committed_step, self._live.get("step"), self._live.get("tokens"))
        if seen != self._seen or self.waits_for_machine():
            self._seen, self._changed_at = seen, time.monotonic()
            return
        try:
            start_beat = read_record(self._run.store, role_key("trainer", "trainer"), RoleRecord).start_beat
        except MissingObject:
            start_beat = self._start_beat
        except StoreError as error:
            logger.warning("could not read whether the trainer has started: %s", error)
            return
        if start_beat != self._start_beat:
            self._start_beat, self._changed_at = start_beat, time.monotonic()
        elif time.monotonic() - self._changed_at > STALL_SECONDS:
            self._alarms.emit(RUN_STALLED, f"no commit and no token for {STALL_SECONDS:.0f} s")
            raise DeadlineExceeded(
                f"no commit and no token for {STALL_SECONDS:.0f} s at step {self.committed_step}; "
                "the logs of the roles show what they wait for. Continue with `pipelinerl resume`"
            )


def _verbatim(lines: Sequence[str]) -> str:
    """A block of Markdown, whatever backticks the lines have."""
    return "\n".join(f"    {line}" for text in lines for line in text.splitlines())


def version_rows(commits: list[Commit]) -> list[dict[str, Any]]:
    """One row per weight version, newest last: figures of its training step and of its swaps."""
    pauses: dict[int, list[float]] = {}
    for commit in commits:
        for swap in commit.swaps:
            pauses.setdefault(swap.version, []).append(swap.pause_seconds)
    return [
        {
            "version": commit.step,
            "reward": _rounded(commit.metrics.get("reward/mean")),
            "lag": _rounded(commit.metrics.get("lag/mean")),
            "ess": _rounded(commit.metrics.get("importance/ess")),
            "swaps": len(pauses.get(commit.step, ())),
            "worst_pause_ms": _rounded(max(pauses[commit.step]) * 1e3) if commit.step in pauses else None,
            "megabytes": _rounded(commit.manifest.num_bytes / 1e6) if commit.manifest else None,
            "sha256": commit.weights_digest[:12],
        }
        for commit in commits
    ]


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 3)


def _quietly(subject: str, action: Callable[[], Any], remedy: str = "") -> None:
    """Call `action`; an error is logged: a failed artifact or alarm must not end the run.

    Without the limit, Prefect's client repeats a request for a minute, in which the run is not watched.
    """
    try:
        with temporary_settings({PREFECT_CLIENT_MAX_RETRIES: 1}):
            action()
    except PydanticSerializationError as error:
        # Ctrl-C while Prefect copies its settings arrives as an error of pydantic, which has no other trace of it.
        if KeyboardInterrupt.__name__ in str(error):
            raise KeyboardInterrupt from None
        logger.warning("%s failed%s: %s", subject, remedy, error)
    except Exception as error:  # noqa: BLE001 (the run does not depend on the Prefect server, whatever the client raises)
        logger.warning("%s failed%s: %s", subject, remedy, error)
