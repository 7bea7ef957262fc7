"""The MLflow run of a comparison: the parent of the MLflow runs of its arms and seeds."""

import re
from collections.abc import Mapping
from typing import Any

from pipelinerl_core.comparison.plan import digest_of
from pipelinerl_core.comparison.results import HTML_KEY, JSON_KEY, SVG_KEY
from pipelinerl_core.config import RunConfig
from pipelinerl_core.interfaces import ObjectStore
from pipelinerl_core.run.mlflow_run import NoTracker, RunTracker, source_tags
from pipelinerl_core.telemetry.mlflow import URL_TAG, MlflowTracker, tracking_uri

_NO_METRIC_NAME = r"[^\w. -]"
"""MLflow refuses other characters, such as the = of "learner.lr=1e-6", in names of metrics."""


def open_comparison(
    config: RunConfig, root: str, key: str, labels: Mapping[str, str], flow_run_id: str, *, is_required: bool
) -> tuple[RunTracker, str | None]:
    """Find or create the MLflow run of a comparison; returns the tracker and the run's id, None without MLflow.

    config: of any run of the comparison; names the MLflow server. key: of the comparison under the root. labels:
    further tags. is_required: raise ConfigError when MLflow cannot be reached; otherwise a later command writes the
    table to MLflow.
    """
    uri = tracking_uri(config.tracking.chosen_uri, root)
    if uri is None:
        return NoTracker(), None
    name, url = key.rpartition("/")[2], f"{root}/{key}"
    tags = {**source_tags(flow_run_id), **labels, URL_TAG: url}
    tracker = MlflowTracker(
        uri,
        config.tracking.experiment,
        name,
        tags=tags,
        is_required=is_required,
        is_own=lambda of: of.get(URL_TAG, url) == url,
    )
    return tracker, tracker.run_id or None


def log_comparison(tracker: RunTracker, store: ObjectStore, document: Mapping[str, Any]) -> None:
    """Log the files of a comparison, and the mean of each figure of each arm at step = number of runs compared."""
    for name in (JSON_KEY, SVG_KEY, HTML_KEY):
        tracker.log_artifact(name, store.get(name))
    # MLflow refuses names of metrics of more than 250 characters.
    short = {arm: arm if len(arm) <= 180 else f"{arm[:180]} {digest_of(arm)}" for arm in document["arms"]}
    means = {
        f"{re.sub(_NO_METRIC_NAME, ' ', short[arm])}/{name}": entry["mean"]
        for arm, figures in document["arms"].items()
        for name, entry in figures.items()
        if isinstance(entry, Mapping) and isinstance(entry.get("mean"), int | float)
    }
    tracker.log(len(document["runs"]), means)
