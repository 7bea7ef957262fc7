"""The MLflow run of a training run: opened before run.json is written, found again when the run is resumed."""

import re
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

from pipelinerl_core.config import RunConfig
from pipelinerl_core.errors import ConfigError, PipelineRLError
from pipelinerl_core.interfaces import Tracker
from pipelinerl_core.run.context import log_directory
from pipelinerl_core.run.local_files import parent_of
from pipelinerl_core.run.locate import MlflowRef, code_version, local_directory, own_commit, owner_of
from pipelinerl_core.run.records import RUN_KEY, RunRecord
from pipelinerl_core.run.user_code import code_commits
from pipelinerl_core.storage.object_store import open_store
from pipelinerl_core.telemetry.datasets import run_datasets
from pipelinerl_core.telemetry.mlflow import HOST_TAG, LOGGED_TAG, URL_TAG, MlflowTracker, Status, tracking_uri
from pipelinerl_core.telemetry.system import SystemSampler
from pipelinerl_core.telemetry.wandb import WandbTracker
from pipelinerl_core.types import LoggedStep

_NOT_IN_KEYS = re.compile(r"[^\w-]")
"""Characters that are replaced in the key of a tag: MLflow refuses most of them, and reads others as a path."""


class RunTracker(Tracker, Protocol):
    """The methods of MlflowTracker that a flow calls."""

    @property
    def page(self) -> str | None:
        """Page of the run on a server; None without a page."""

    def log_artifact(self, name: str, data: bytes) -> None:
        """Store a small file with the run."""

    def log_table(self, name: str, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
        """Store a table with the run; MLflow's pages show the table."""

    def close(self, status: Status = "FINISHED", feed: Callable[[], bool] = lambda: True) -> None:
        """Log what `feed` still has, flush the buffers and end the MLflow run."""


class NoTracker:
    """The tracker for tracking.mlflow_uri=none: discards everything."""

    logged: LoggedStep | None = None
    room = 0
    page: str | None = None

    def log(
        self, step: int, metrics: Mapping[str, float], *, at: float | None = None, weights_digest: str = ""
    ) -> None:
        """Do nothing."""

    def start_over(self, step: int) -> None:
        """Do nothing."""

    def log_artifact(self, name: str, data: bytes) -> None:
        """Do nothing."""

    def log_table(self, name: str, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
        """Do nothing."""

    def close(self, status: Status = "FINISHED", feed: Callable[[], bool] = lambda: True) -> None:
        """Do nothing."""


def open_tracker(
    config: RunConfig, url: str, record: RunRecord | None, flow_run_id: str, labels: Mapping[str, str]
) -> tuple[RunTracker, MlflowRef | None]:
    """Find or create the MLflow run of the run at `url`; None for its reference without MLflow.

    record: run.json of a run that is resumed, None for a new run. labels: further tags. For a new run, ConfigError if
    MLflow cannot be reached; a resume does not wait for MLflow.
    """
    root, _, run_id = url.rpartition("/")
    uri = tracking_uri(config.tracking.chosen_uri, root)
    tracker: RunTracker = NoTracker()
    mlflow = None
    owner = record.owner if record else owner_of(config)
    commits = record.commits if record else code_commits(config)
    tags = {
        **label_tags(config, owner),
        **source_tags(flow_run_id),
        **run_tags(config, commits),
        URL_TAG: url,
        **labels,
    }

    def is_own(of: Mapping[str, str]) -> bool:
        """A new run takes the MLflow run of an earlier start that failed before run.json, but none of another run."""
        if record is not None:
            return not is_original_of(url, of)
        names = (URL_TAG,) if local_directory(url) is None else (URL_TAG, HOST_TAG)
        return LOGGED_TAG not in of and all(of.get(name) == tags[name] for name in names)

    if uri is not None:
        tracker = MlflowTracker(
            uri,
            config.tracking.experiment,
            run_id,
            run_id=record.mlflow_run_id if record else None,
            tags=tags,
            config=config.model_dump(mode="json"),
            datasets=run_datasets(config),
            machine=SystemSampler(url),
            is_required=record is None,
            is_own=is_own,
        )
        mlflow = MlflowRef(uri=uri, run_id=tracker.run_id)
    if config.tracking.wandb:
        try:
            tracker = WandbTracker(
                tracker,
                run_id,
                config.tracking.experiment,
                directory=log_directory(url, run_id) / ".wandb",  # hidden, because it has links
                tags=tags,
                config=config.model_dump(mode="json"),
                has_inner=mlflow is not None,
                is_required=record is None,
            )
        except ConfigError:
            tracker.close("FAILED")
            raise
    return tracker, mlflow


def is_original_of(url: str, tags: Mapping[str, str]) -> bool:
    """Whether the run at `url` is a copy of a run, with these tags in MLflow, that is still there, as far as this
    process can see."""
    other = tags.get(URL_TAG, "")
    try:
        here, there = local_directory(url), local_directory(other)
        if here is not None and there is not None and there.exists() and here.samefile(there):
            return False  # by another path
        return other not in ("", url) and open_store(other).exists(RUN_KEY)
    except (PipelineRLError, OSError):
        return False


@contextmanager
def closing(tracker: RunTracker) -> Iterator[None]:
    """Close the tracker at the end of the block, with the status with which the block ended."""
    status: Status = "KILLED"
    try:
        yield
        status = "FINISHED"
    except Exception:
        status = "FAILED"
        raise
    finally:
        tracker.close(status)


def label_tags(config: RunConfig, owner: str) -> dict[str, str]:
    """Tags, owner and description of the user: the tag `team:alice` is tag.team = alice, `x` is tag.x = true."""
    pairs = (tag.partition(":") for tag in config.tracking.tags)
    return {
        **{f"tag.{_NOT_IN_KEYS.sub('_', key.strip())[:200]}": value.strip() or "true" for key, _, value in pairs},
        **({"mlflow.user": owner} if owner else {}),
        **({"mlflow.note.content": config.tracking.notes} if config.tracking.notes else {}),
    }


def run_tags(config: RunConfig, commits: Mapping[str, str]) -> dict[str, str]:
    """Tags to group and filter runs by in MLflow; all settings are logged as parameters too.

    commits: of the git checkouts with the user's own files, as in RunRecord.commits.
    """
    return {
        "schedule": config.schedule.kind,
        "seed": str(config.seed),
        "engine": config.engine.kind,
        "learner": config.learner.kind,
        "loss": config.loss.kind,
        "placement": config.placement.kind,
        "model": config.model.path,
        "prompts": "mixture" if config.mixture else config.prompts.kind,
        **({"pipelinerl.parent": parent} if (parent := parent_of(config)) else {}),
        **({"mlflow.source.git.commit": ", ".join(sorted({*commits.values()}))} if commits else {}),
    }


def source_tags(flow_run_id: str) -> dict[str, str]:
    """Flow run, version and commit that a run comes from. MLflow shows the mlflow.source tags as columns."""
    commit = own_commit()
    return {
        "prefect.flow_run_id": flow_run_id,
        HOST_TAG: socket.gethostname(),
        "pipelinerl.version": code_version(),
        "mlflow.source.name": "pipelinerl",
        "mlflow.source.type": "LOCAL",
        **({"mlflow.source.git.commit": commit} if commit else {}),
    }
