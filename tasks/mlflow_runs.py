"""The MLflow run of a run, and of a comparison: opened before run.json is written, found again on resume."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

from pipelinerl_core.comparison.results import HTML_KEY, JSON_KEY, SVG_KEY
from pipelinerl_core.config import RunConfig
from pipelinerl_core.interfaces import ObjectStore
from pipelinerl_core.run.locate import MlflowRef, code_version, git_commit
from pipelinerl_core.run.records import RunRecord
from pipelinerl_core.telemetry.datasets import run_datasets
from pipelinerl_core.telemetry.mlflow import MlflowTracker, Status, run_page, tracking_uri
from pipelinerl_core.telemetry.system import SystemSampler


class RunTracker(Protocol):
    """What a flow needs of MLflow."""

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Buffer metrics of one step."""
        ...

    def log_artifact(self, name: str, data: bytes) -> None:
        """Store a small file with the run."""
        ...

    def log_table(self, name: str, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
        """Store a table with the run that MLflow's pages show."""
        ...

    def close(self, status: Status = "FINISHED") -> None:
        """Flush and end the run."""
        ...


class NoTracker:
    """tracking.mlflow_uri=none."""

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Nothing."""

    def log_artifact(self, name: str, data: bytes) -> None:
        """Nothing."""

    def log_table(self, name: str, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
        """Nothing."""

    def close(self, status: Status = "FINISHED") -> None:
        """Nothing."""


def open_tracker(
    config: RunConfig, url: str, record: RunRecord | None, flow_run_id: str, labels: Mapping[str, str]
) -> tuple[RunTracker, MlflowRef | None]:
    """Connect for the run at `url`, new (no record yet) or resumed; ConfigError when MLflow cannot be reached.

    labels: further tags, known to whoever starts the run.
    """
    root, _, run_id = url.rpartition("/")
    uri = tracking_uri(config.tracking.chosen_uri, root)
    if uri is None:
        return NoTracker(), None
    tracker = MlflowTracker(
        uri,
        config.tracking.experiment,
        run_id,
        run_id=record.mlflow_run_id if record else None,
        tags={**run_tags(config), **_source_tags(flow_run_id), "pipelinerl.url": url, **labels},
        config=config.model_dump(mode="json"),
        datasets=run_datasets(config),
        machine=SystemSampler(url),
    )
    return tracker, MlflowRef(uri=uri, run_id=tracker.run_id)


def open_comparison(
    config: RunConfig, root: str, key: str, labels: Mapping[str, str], flow_run_id: str
) -> tuple[RunTracker, str | None]:
    """The MLflow run below which MLflow shows the runs of a comparison, and its id; None without MLflow.

    config: of one of its runs, for where MLflow is. key: of the comparison under the root.
    """
    uri = tracking_uri(config.tracking.mlflow_uri, root)
    if uri is None:
        return NoTracker(), None
    tags = {**_source_tags(flow_run_id), **labels, "pipelinerl.url": f"{root}/{key}"}
    tracker = MlflowTracker(uri, config.tracking.experiment, key.rpartition("/")[2], tags=tags)
    return tracker, tracker.run_id


@contextmanager
def closing(tracker: RunTracker) -> Iterator[None]:
    """Close it at the end of the block, with how the block ended."""
    status: Status = "KILLED"
    try:
        yield
        status = "FINISHED"
    except Exception:
        status = "FAILED"
        raise
    finally:
        tracker.close(status)


def log_comparison(tracker: RunTracker, store: ObjectStore, document: Mapping[str, Any]) -> None:
    """The files of a comparison, and the mean of each figure of each arm at step = number of runs compared."""
    for name in (JSON_KEY, SVG_KEY, HTML_KEY):
        tracker.log_artifact(name, store.get(name))
    means = {
        f"{arm}/{name}": entry["mean"]
        for arm, figures in document["arms"].items()
        for name, entry in figures.items()
        if isinstance(entry, Mapping) and isinstance(entry.get("mean"), int | float)
    }
    tracker.log(len(document["runs"]), means)


def run_tags(config: RunConfig) -> dict[str, str]:
    """What people group and filter runs by; every setting is a parameter besides."""
    return {
        "schedule": config.schedule.kind,
        "seed": str(config.seed),
        "engine": config.engine.kind,
        "learner": config.learner.kind,
        "loss": config.loss.kind,
        "placement": config.placement.kind,
        "model": config.model.path,
        "prompts": config.prompts.kind,
    }


def _source_tags(flow_run_id: str) -> dict[str, str]:
    """Where a run comes from; MLflow shows those of its own as columns."""
    commit = git_commit()
    return {
        "prefect.flow_run_id": flow_run_id,
        "pipelinerl.version": code_version(),
        "mlflow.source.name": "pipelinerl",
        "mlflow.source.type": "LOCAL",
        **({"mlflow.source.git.commit": commit} if commit else {}),
    }


def mlflow_link(ref: MlflowRef) -> str | None:
    """Page of the run on an MLflow server; None for a database file, which has no page."""
    return run_page(ref.uri, ref.run_id)
