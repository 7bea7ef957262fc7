"""The MLflow run of a run: opened before run.json is written, found again on resume."""

from collections.abc import Mapping
from importlib import import_module
from typing import Protocol

from pipelinerl_core.config import RunConfig
from pipelinerl_core.records import RunRecord
from pipelinerl_core.tracking.mlflow import MlflowTracker, Status, tracking_uri
from tasks.runs import MlflowRef


class RunTracker(Protocol):
    """What a flow needs of MLflow."""

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Buffer metrics of one step."""
        ...

    def log_artifact(self, name: str, data: bytes) -> None:
        """Store a small file with the run."""
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

    def close(self, status: Status = "FINISHED") -> None:
        """Nothing."""


def open_tracker(
    config: RunConfig, url: str, record: RunRecord | None, flow_run_id: str
) -> tuple[RunTracker, MlflowRef | None]:
    """Connect for the run at `url`, new (no record yet) or resumed; ConfigError when MLflow cannot be reached."""
    root, _, run_id = url.rpartition("/")
    uri = tracking_uri(config.tracking.chosen_uri, root)
    if uri is None:
        return NoTracker(), None
    tracker = MlflowTracker(
        uri,
        config.tracking.experiment,
        run_id,
        run_id=record.mlflow_run_id if record else None,
        tags={"pipelinerl.url": url, "prefect.flow_run_id": flow_run_id},
        config=config.model_dump(mode="json"),
    )
    return tracker, MlflowRef(uri=uri, run_id=tracker.run_id)


def mlflow_link(ref: MlflowRef) -> str | None:
    """Page of the run on an MLflow server; None for a database file, which has no page."""
    if not ref.uri.startswith(("http://", "https://")):
        return None
    # Not at the top: pipelinerl_core.tracking.mlflow sets what mlflow reads when it is first imported.
    experiment = import_module("mlflow").MlflowClient(tracking_uri=ref.uri).get_run(ref.run_id).info.experiment_id
    return f"{ref.uri.rstrip('/')}/#/experiments/{experiment}/runs/{ref.run_id}"
