"""Writes the metrics of a run to MLflow from a buffered thread. Only the first start of a run needs MLflow.

log, log_artifact, log_table -> buffers --(every 2 s or 500 metrics)--> writer thread --> MLflow
                                                                            |
                                             if it fails: keep, try again, warn once

The tag `pipelinerl.logged` of the MLflow run names the newest step that MLflow has. The tag is written together with
the metrics of the step, so that a resume reads one tag instead of metric histories, whose size grows with the run.
"""

import fcntl
import json
import logging
import os
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypeVar
from urllib.parse import urlsplit

# mlflow reads these variables when it is imported: no telemetry, no emoji output on stdout, and no minutes of retries
# if the server is down. Values that the user has set are kept.
for _name, _value in {
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "5",
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1",
    "MLFLOW_LOGGING_LEVEL": "WARNING",
    "GIT_PYTHON_REFRESH": "quiet",
}.items():
    os.environ.setdefault(_name, _value)

from mlflow import MlflowClient  # noqa: E402
from mlflow.entities import Dataset, DatasetInput, InputTag, Metric, Param, Run, RunTag  # noqa: E402
from mlflow.exceptions import MlflowException  # noqa: E402

from pipelinerl_core.config.mlflow_login import take_login  # noqa: E402
from pipelinerl_core.errors import ConfigError  # noqa: E402
from pipelinerl_core.telemetry.datasets import DatasetNote  # noqa: E402
from pipelinerl_core.telemetry.redact import flatten, redact, redact_text  # noqa: E402
from pipelinerl_core.types import NO_STEP, LoggedStep  # noqa: E402

logger = logging.getLogger(__name__)
logging.getLogger("alembic").setLevel(logging.WARNING)
logging.getLogger("urllib3.connectionpool").setLevel(
    logging.ERROR
)  # urllib3 warns of every attempt; the tracker warns once

T = TypeVar("T")
TagTest = Callable[[Mapping[str, str]], bool]
Status = Literal["FINISHED", "FAILED", "KILLED"]

RUN_TAG = "pipelinerl.run_id"
"""Tag by which the tracker finds the MLflow run of a training run."""
URL_TAG = "pipelinerl.url"
"""Tag with the store of the training run."""
HOST_TAG = "pipelinerl.host"
"""Tag with the host of the flow: directories of two hosts may have the same path."""
LOGGED_TAG = "pipelinerl.logged"
"""Tag with the newest step whose metrics MLflow has, as JSON: step and digest of the weights after the step."""
LOST_TAG = "pipelinerl.lost_timeline"
"""Tag of an MLflow run with steps that the training run no longer has; the newest step of the training run then."""
PARENT_TAG = "mlflow.parentRunId"
"""Tag by which MLflow shows a run below its parent run."""
SAMPLE_SECONDS = 10.0
"""Shortest time between two readings of the machine."""

_SQLITE = "sqlite:///"
_CONNECT_SECONDS = 9.0
_CREATION_SECONDS = 120.0
_LOCK_POLL_SECONDS = 0.1
_FLUSH_SECONDS = 2.0
_FLUSH_METRICS = 500
# MLflow's own limits per request and value.
_MAX_BATCH_METRICS = 1000
_MAX_BATCH_PARAMS = 100
_MAX_PARAM_CHARS = 6000
_MAX_TAG_CHARS = 8000
_RESUMED_TAG = "pipelinerl.resumed."
# Which artifacts MLflow's pages show as tables.
_TABLES_TAG = "mlflow.loggedArtifacts"
_CONTEXT_TAG = "mlflow.data.context"
# Without this tag, MLflow shows the pages for language model applications instead of training.
_EXPERIMENT_TAGS = {"mlflow.experimentKind": "custom_model_development"}
_TRAINING_VIEW = "workflowType=machine_learning"
# Metrics kept during an outage; the metrics of later steps wait in the store.
_MAX_BUFFERED = 200_000
# Between two attempts during an outage.
_RETRY_SECONDS = 15.0
# How long close() waits during an outage, for a run that has ended and for a run that was stopped.
_CLOSE_SECONDS = 120.0
_STOP_SECONDS = 5.0
_CLOSE_RETRY_SECONDS = 2.0
# Refusals of an artifact, by a server that answers other requests, after which the artifact is dropped.
_MAX_REFUSALS = 3
_MAX_REASON_CHARS = 200
_MAX_COPIES = 20


def tracking_uri(configured: str, root: str) -> str | None:
    """The tracking URI for a value of tracking.mlflow_uri; None for `none`.

    Empty: mlflow.db under the root. For a remote root, and if that file belongs to another user, it is in
    $XDG_DATA_HOME/pipelinerl (~/.local/share/pipelinerl), which this function creates.
    """
    if configured:
        return None if configured == "none" else configured
    path = root.removeprefix("file://")
    directory = Path(path).absolute()
    shared = directory / "mlflow.db"
    if "://" in path or (shared.exists() and not os.access(shared, os.W_OK)):
        directory = Path(os.environ.get("XDG_DATA_HOME") or Path.home() / ".local" / "share") / "pipelinerl"
        directory.mkdir(parents=True, exist_ok=True)
    return f"sqlite:///{directory / 'mlflow.db'}"


def run_page(uri: str, experiment_id: str, run_id: str) -> str | None:
    """Page of a run on an MLflow server; None for a database file, which has no page."""
    if not uri.startswith(("http://", "https://")):
        return None
    return f"{uri.rstrip('/')}/#/experiments/{experiment_id}/runs/{run_id}?{_TRAINING_VIEW}"


@dataclass(frozen=True, slots=True)
class _Entry:
    """Metrics that are written together."""

    metrics: list[Metric]
    logged: LoggedStep | None
    """Set if MLflow then has all metrics of this step."""


class MlflowTracker:
    """Writes the metrics of one run. Thread-safe."""

    def __init__(
        self,
        uri: str,
        experiment: str,
        run_name: str,
        *,
        run_id: str | None = None,
        tags: Mapping[str, str] | None = None,
        config: Mapping[str, object] | None = None,
        datasets: Sequence[DatasetNote] = (),
        machine: Callable[[], Mapping[str, float]] | None = None,
        is_required: bool = True,
        is_own: TagTest = lambda tags: True,
    ) -> None:
        """Find or create the run.

        is_required: connect now; raises ConfigError if this fails, for a server after 9 s. Otherwise the writer
        thread connects, and tries again after failures.
        A run is found by `run_id`, else by the tag of `run_name` in the experiment, if `is_own` accepts its tags:
        another run may have the same name. `config`, nested or not, becomes parameters with dotted keys; secrets are
        redacted there and in `tags`. `machine` is called every 10 s on the writer thread; its metrics are logged at
        step = seconds since the start of the MLflow run.
        """
        self._uri = take_login(uri)  # of run.json of an earlier release
        self._experiment = experiment
        self._run_name = run_name
        self._tags = redact({RUN_TAG: run_name, **(tags or {})})
        self._params = redact(flatten(config or {}))
        self._datasets = datasets
        self._machine = machine
        self._is_own = is_own
        self._sampled_at = time.monotonic()
        self.run_id = run_id or ""
        self.page: str | None = None
        """Page of the run on an MLflow server."""
        self.logged: LoggedStep | None = None
        """Newest step that MLflow has; None while MLflow has not answered."""
        self.num_lost = 0
        """Metrics dropped because of an outage of MLflow."""
        self.num_failures = 0
        """Failed attempts to write."""
        self._is_away = False
        """The newest request has failed."""
        self._lost_at: int | None = None
        self._began = 0.0
        self._tables: list[dict[str, str]] = []
        self._buffer: deque[_Entry] = deque()
        self._num_buffered = 0
        self._lock = threading.Lock()
        self._wake = threading.Event()
        self._files: dict[str, bytes] = {}
        self._refusals: dict[str, int] = {}
        self._feed: Callable[[], bool] = lambda: True
        self._is_closing = False
        self._close_at = 0.0
        if is_required:
            self._connect_now()
        self._writer = threading.Thread(target=self._write, name="mlflow", daemon=True)
        self._writer.start()

    @property
    def room(self) -> int:
        return _MAX_BUFFERED - self._num_buffered

    def log(
        self, step: int, metrics: Mapping[str, float], *, at: float | None = None, weights_digest: str = ""
    ) -> None:
        """Buffer metrics of one step; metrics beyond `room` are dropped. at: Unix seconds.

        If the same values are logged again with the same `at`, MLflow stores one. weights_digest: of a training step,
        which is then `logged`.
        """
        timestamp = round((time.time() if at is None else at) * 1000)
        made = [Metric(key, float(value), timestamp, step) for key, value in metrics.items()]
        logged = LoggedStep(step, weights_digest) if weights_digest else None
        with self._lock:
            if self.room <= 0:
                self.num_lost += len(made)
                return
            while len(made) > _MAX_BATCH_METRICS:
                self._buffer.append(_Entry(made[:_MAX_BATCH_METRICS], None))
                del made[:_MAX_BATCH_METRICS]
            self._buffer.append(_Entry(made, logged))
            self._num_buffered += len(metrics)
            is_full = self._num_buffered >= _FLUSH_METRICS
        if is_full:
            self._wake.set()

    def start_over(self, step: int) -> None:
        """Continue in a new MLflow run, because this one has steps of a timeline that the training run has lost.

        The writer thread marks the old run. step: newest step of the training run. `logged` is None until the new run
        is open.
        """
        with self._lock:
            self.logged, self._lost_at = None, step
            self._buffer.clear()
            self._num_buffered = 0

    def log_artifact(self, name: str, data: bytes) -> None:
        """Buffer a small file; a newer file of the same name replaces the older."""
        with self._lock:
            self._files[name] = data

    def log_table(self, name: str, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
        """Buffer a table, which MLflow's pages show; `name` ends in .json, `rows` hold JSON values."""
        self.log_artifact(name, json.dumps({"columns": list(columns), "data": list(map(list, rows))}).encode())
        entry = {"path": name, "type": "table"}
        with self._lock:
            if entry not in self._tables:
                self._tables = [*self._tables, entry]

    def close(self, status: Status = "FINISHED", feed: Callable[[], bool] = lambda: True) -> None:
        """Flush, end the MLflow run with `status`, and stop the writer. Further calls do nothing.

        feed: logs further metrics if there is room; True if none are left. Called on the writer thread.

        During an outage, close() waits at most 120 s, for a run that was stopped 5 s. The stored objects of the run
        keep the data, and a resume of the run writes the data to MLflow.
        """
        if self._is_closing:
            return
        limit_seconds = _STOP_SECONDS if status == "KILLED" else _CLOSE_SECONDS
        self._close_at = time.monotonic() + limit_seconds
        self._feed, self._is_closing = feed, True
        self._wake.set()
        self._writer.join(_CLOSE_RETRY_SECONDS)
        if self._writer.is_alive() and (self._left or self.logged is None):
            unwritten = self._left or "metrics"
            logger.warning("MLflow does not answer: waiting at most %.0f s to write %s", limit_seconds, unwritten)
        self._writer.join(limit_seconds)
        left = self._left
        if self._writer.is_alive() or left or self.logged is None:
            self.num_lost += self._num_buffered
            logger.warning(
                "MLflow did not answer at the end: %s were not written; `pipelinerl resume` of the run writes them",
                left or "some metrics",
            )
            return
        self._try("end of run", partial(self._client.set_terminated, self.run_id, status))

    @property
    def _left(self) -> str:
        """Counts of unwritten metrics and files as text; empty if all are written."""
        counts = {"metrics": self._num_buffered + self.num_lost, "files": len(self._files)}
        return " and ".join(f"{count} {name}" for name, count in counts.items() if count)

    def _connect_now(self) -> None:
        try:
            is_local = urlsplit(self._uri).scheme.startswith("sqlite")
            opened = self._open() if is_local else _within(_CONNECT_SECONDS, self._open)
        except (MlflowException, OSError, TimeoutError) as error:
            raise ConfigError(
                f"tracking.mlflow_uri={redact_text(self._uri)}: MLflow cannot be reached or used ({_reason(error)}). "
                "Start the server, correct the URI, or set tracking.mlflow_uri=none"
            ) from None
        self._use(*opened)

    def _use(self, client: MlflowClient, run: Run) -> None:
        self._client = client
        self._began = run.info.start_time / 1000
        self._lost_at = None
        with self._lock:
            known = json.loads(run.data.tags.get(_TABLES_TAG, "[]"))
            self._tables = [*known, *(entry for entry in self._tables if entry not in known)]
        self.run_id = run.info.run_id
        self.page = run_page(self._uri, run.info.experiment_id, run.info.run_id)
        self.logged = _logged_step(run.data.tags.get(LOGGED_TAG, ""))

    def _open(self) -> tuple[MlflowClient, Run]:
        """The MLflow run, found or created. The number of requests does not depend on the age of the run."""
        with _creation(self._uri):
            client = MlflowClient(tracking_uri=self._uri)
            experiment_id = _experiment_id(client, self._uri, self._experiment)
        if self._lost_at is not None:
            _mark_lost(client, self.run_id, self._run_name, self._lost_at)
        run_id = find_run(client, experiment_id, self._run_name, self.run_id, self._is_own)
        if run_id is None:
            run_id = client.create_run(experiment_id, run_name=self._run_name).info.run_id
        run = client.get_run(run_id)
        client.update_run(run_id, status="RUNNING")
        tags = [RunTag(key, value[:_MAX_TAG_CHARS]) for key, value in self._tags.items()]
        client.log_batch(run_id, tags=tags)
        new = [
            Param(key, value[:_MAX_PARAM_CHARS]) for key, value in self._params.items() if key not in run.data.params
        ]
        # MLflow's parameters cannot be changed.
        changed = [
            RunTag(f"{_RESUMED_TAG}{key}", value[:_MAX_TAG_CHARS])
            for key, value in self._params.items()
            if run.data.params.get(key, value[:_MAX_PARAM_CHARS]) != value[:_MAX_PARAM_CHARS]
            or f"{_RESUMED_TAG}{key}" in run.data.tags
        ]
        for start in range(0, len(changed), _MAX_BATCH_PARAMS):
            client.log_batch(run_id, tags=changed[start : start + _MAX_BATCH_PARAMS])
        for start in range(0, len(new), _MAX_BATCH_PARAMS):
            client.log_batch(run_id, params=new[start : start + _MAX_BATCH_PARAMS])
        known = {dataset_input.dataset.digest for dataset_input in run.inputs.dataset_inputs} if run.inputs else set()
        inputs = [_input(note) for note in self._datasets if note.digest not in known]
        if inputs:
            client.log_inputs(run_id, inputs)
        return client, run

    def _write(self) -> None:
        is_away = False
        while not self._is_closing:
            self._wake.wait(_RETRY_SECONDS if is_away else _FLUSH_SECONDS)
            self._wake.clear()
            if not self._is_closing:
                self._sample()
                is_away = not self._flush()
        while True:
            is_fed = self._feed()
            is_away = not self._flush()
            if (is_fed and not is_away) or time.monotonic() >= self._close_at:
                return
            if is_away:
                time.sleep(_CLOSE_RETRY_SECONDS)

    def _sample(self) -> None:
        """Log the system metrics if they are due."""
        is_due = time.monotonic() - self._sampled_at >= SAMPLE_SECONDS
        if self._machine is None or self.logged is None or not is_due or self.room <= 0:
            return  # without room in an outage: the steps are in the store, the machine's samples are not kept
        self._sampled_at = time.monotonic()
        try:
            self.log(max(0, round(time.time() - self._began)), self._machine())
        except Exception as error:  # noqa: BLE001 - an error of the sampler must not end the writer
            logger.warning("system metrics are off after an error: %s", _reason(error))
            self._machine = None

    def _flush(self) -> bool:
        """Write all buffered data; False if a write failed, in which case the rest stays buffered."""
        if self.logged is None and not self._try("the run", lambda: self._use(*self._open())):
            return False
        while batch := self._next_batch():
            metrics = [metric for entry in batch for metric in entry.metrics]
            logged = next((entry.logged for entry in reversed(batch) if entry.logged is not None), None)
            tags = [RunTag(LOGGED_TAG, json.dumps(logged._asdict()))] if logged else []
            if not self._try("metrics", partial(self._client.log_batch, self.run_id, metrics=metrics, tags=tags)):
                with self._lock:
                    self._buffer.extendleft(reversed(batch))
                    self._num_buffered += len(metrics)
                return False
        return all(self._upload(name) for name in list(self._files))

    def _next_batch(self) -> list[_Entry]:
        """The oldest entries, as many as one request takes."""
        batch: list[_Entry] = []
        num_metrics = 0
        with self._lock:
            while self._buffer and num_metrics + len(self._buffer[0].metrics) <= _MAX_BATCH_METRICS:
                batch.append(self._buffer.popleft())
                num_metrics += len(batch[-1].metrics)
            self._num_buffered -= num_metrics
        return batch

    def _upload(self, name: str) -> bool:
        """Write one file, and its table tag if it is a table; then drop it unless a newer one has replaced it."""
        data, entry = self._files[name], {"path": name, "type": "table"}
        with tempfile.TemporaryDirectory() as directory:
            path = Path(directory) / Path(name).name
            path.write_bytes(data)
            is_written = self._try(f"artifact {name}", partial(self._client.log_artifact, self.run_id, str(path)))
        if is_written and entry in self._tables:
            tag = RunTag(_TABLES_TAG, json.dumps(self._tables))
            is_written = self._try(f"tag {_TABLES_TAG}", partial(self._client.log_batch, self.run_id, tags=[tag]))
        is_refused = not is_written and self._is_refused(name)
        with self._lock:
            if (is_written or is_refused) and self._files[name] is data:
                del self._files[name]
        return is_written or is_refused

    def _is_refused(self, name: str) -> bool:
        """Whether a file is dropped: MLflow answers other requests but has refused the file three times."""
        if self._try("a test request", partial(self._client.get_run, self.run_id)):
            self._refusals[name] = self._refusals.get(name, 0) + 1
        if self._refusals.get(name, 0) < _MAX_REFUSALS:
            return False
        logger.warning(
            "MLflow answers but has refused the artifact %s %d times: the artifact is left out", name, _MAX_REFUSALS
        )
        return True

    def _try(self, subject: str, call: Callable[[], object]) -> bool:
        try:
            call()
        except Exception as error:  # noqa: BLE001 - an error of tracking must not end the run
            self.num_failures += 1
            level = logging.DEBUG if self._is_away else logging.WARNING
            self._is_away = True
            logger.log(
                level,
                "could not write %s to MLflow (%s), trying again later; the run continues",
                subject,
                _reason(error),
            )
            return False
        self._is_away = False
        return True


def _input(note: DatasetNote) -> DatasetInput:
    source, profile = redact_text(json.dumps(note.source)), json.dumps({"num_prompts": note.num_prompts})
    columns = [{"name": name, "type": "string", "required": True} for name in note.columns]
    schema = json.dumps({"mlflow_colspec": columns})
    dataset = Dataset(note.name, note.digest, note.source_type, source, schema, profile if note.num_prompts else None)
    return DatasetInput(dataset, [InputTag(_CONTEXT_TAG, note.context)])


@contextmanager
def _creation(uri: str) -> Iterator[None]:
    """Lets one process at a time create the tables of a database file: of two that create them, MLflow fails one.

    Raises TimeoutError.
    """
    database = uri.removeprefix(_SQLITE)
    if database == uri:
        yield
        return
    with Path(f"{database}.lock").open("w") as lock:
        deadline = time.monotonic() + _CREATION_SECONDS
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise TimeoutError(
                        f"another process has held {lock.name} for {_CREATION_SECONDS:.0f} s"
                    ) from None
                time.sleep(_LOCK_POLL_SECONDS)
        yield


def _experiment_id(client: MlflowClient, uri: str, name: str) -> str:
    experiment = client.get_experiment_by_name(name)
    if experiment is not None:
        return str(experiment.experiment_id)
    # Beside the database instead of in the working directory.
    database = uri.removeprefix(_SQLITE)
    location = (Path(database).absolute().parent / "mlartifacts" / name).as_uri() if database != uri else None
    try:
        return str(client.create_experiment(name, location, _EXPERIMENT_TAGS))
    except MlflowException:
        experiment = client.get_experiment_by_name(name)  # another run has just created it
        if experiment is None:
            raise
        return str(experiment.experiment_id)


def find_run(client: MlflowClient, experiment_id: str, run_name: str, run_id: str, is_own: TagTest) -> str | None:
    """Id of the MLflow run of a training run: `run_id` if MLflow has it, else by its tag; None without it.

    Left out are MLflow runs whose tags `is_own` refuses.
    """
    if run_id:
        try:
            run = client.get_run(run_id)
            is_active = run.info.lifecycle_stage == "active"  # deleted in the UI otherwise
            if is_active and LOST_TAG not in run.data.tags and is_own(run.data.tags):
                return str(run.info.run_id)
        except MlflowException as error:
            if error.error_code != "RESOURCE_DOES_NOT_EXIST":
                raise
            logger.warning("MLflow has no run %s, so its database was replaced; creating a new MLflow run", run_id)
    quoted = run_name.replace("'", "")
    runs = client.search_runs(
        [experiment_id], filter_string=f"tags.`{RUN_TAG}` = '{quoted}'", max_results=_MAX_COPIES
    )
    return next((str(run.info.run_id) for run in runs if is_own(run.data.tags)), None)


def _mark_lost(client: MlflowClient, run_id: str, run_name: str, step: int) -> None:
    """End an MLflow run with steps that the training run has lost, and give it another name."""
    logger.warning(
        "MLflow's run %s has metrics of steps that the store does not have: the store has commits up to step %d and "
        "was restored from an older copy. The MLflow run is renamed; a new MLflow run gets all steps", run_id, step,
    )  # fmt: skip
    name = f"{run_name} (lost timeline, replaced at step {step})"
    client.log_batch(run_id, tags=[RunTag(RUN_TAG, name), RunTag(LOST_TAG, str(step))])
    client.update_run(run_id, status="KILLED", name=name)


def _logged_step(tag: str) -> LoggedStep:
    try:
        return LoggedStep(**json.loads(tag))
    except (ValueError, TypeError):
        return NO_STEP  # no tag: MLflow has no step yet


def _reason(error: BaseException) -> str:
    return redact_text(str(error)).strip().partition("\n")[0][:_MAX_REASON_CHARS]


def _within(seconds: float, call: Callable[[], T]) -> T:
    """The result of `call`, or TimeoutError; after a timeout the call continues in a daemon thread."""
    results: list[T] = []
    errors: list[BaseException] = []

    def work() -> None:
        try:
            results.append(call())
        except BaseException as error:  # noqa: BLE001 - handed to the caller below
            errors.append(error)

    thread = threading.Thread(target=work, name="mlflow-connect", daemon=True)
    thread.start()
    thread.join(seconds)
    if thread.is_alive():
        raise TimeoutError(f"no answer within {seconds:.0f} s")
    if errors:
        raise errors[0]
    return results[0]
