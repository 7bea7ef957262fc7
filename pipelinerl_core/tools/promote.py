"""Weight versions of a run as models in MLflow: logged, registered with a copy of the weights, named by an alias."""

import hashlib
import json
import logging
import math
import os
import re
import tempfile
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from pipelinerl_core.config import RunConfig
from pipelinerl_core.config.mlflow_login import LOGIN_VARIABLES
from pipelinerl_core.config.verifier import verifier_name
from pipelinerl_core.errors import ConfigError
from pipelinerl_core.run.context import RunContext
from pipelinerl_core.run.evaluations import best_version
from pipelinerl_core.run.follow import RunFollower, eval_metrics
from pipelinerl_core.run.mlflow_run import is_original_of
from pipelinerl_core.run.records import EvalRecord
from pipelinerl_core.run.versions import is_stored, stored_weights
from pipelinerl_core.telemetry.mlflow import find_run, tracking_uri
from pipelinerl_core.telemetry.redact import redact
from pipelinerl_core.tools.export import WRITE_SECONDS, export, run_tool

from mlflow import MlflowClient  # isort: skip (after telemetry.mlflow, which sets variables)
from mlflow.entities import LoggedModel, LoggedModelOutput, Metric, RunTag
from mlflow.entities.model_registry import ModelVersion
from mlflow.exceptions import MlflowException
from mlflow.utils.mlflow_tags import MLFLOW_MODEL_IS_EXTERNAL

logger = logging.getLogger(__name__)

CHAMPION = "champion"
HELD_OUT_TAG = "pipelinerl.held_out"
"""Tag of an evaluated model, JSON: accuracy, low, high, num_prompts; measure: digest of prompts, reward, sampling."""
NOTE_TAG = "pipelinerl.note"
"""Tag of a version of a registered model: why an alias names the version, or not."""
_PREVIOUS_TAG = "pipelinerl.previous."
_NOT_IN_NAMES = re.compile(r"[/:.%\"']")
"""MLflow refuses these characters in the name of a logged model; the id of a run of a sweep has dots."""
_MODEL_ID = re.compile(r"\bm-[0-9a-f]{32}\b")


def open_mlflow(uri: str) -> MlflowClient:
    """A client for a server or a database file. Raises ConfigError without MLflow, or if the file does not exist."""
    path = uri.removeprefix("sqlite:///")
    if uri in ("", "none") or (path != uri and not Path(path).is_file()):
        raise ConfigError(f"there is no MLflow at {uri or 'none'!r}. Set MLFLOW_TRACKING_URI or --root")
    return MlflowClient(tracking_uri=uri)


def mlflow_of(run: RunContext) -> str:
    """The MLflow server or database of a run; empty without MLflow."""
    chosen, recorded = run.config.tracking.chosen_uri, run.record.mlflow_uri or ""
    if recorded and not chosen and not recorded.startswith("sqlite:"):
        return recorded
    return tracking_uri(chosen, run.store.url.rpartition("/")[0]) or ""  # a run may be a copy under another root


class RunModels:
    """The models of one run in MLflow. The methods raise MlflowException and the errors of `export`."""

    def __init__(self, run: RunContext, follower: RunFollower) -> None:
        """follower: refreshed. Raises ConfigError if MLflow has no run of this run."""
        self._run, self._follower = run, follower
        self.uri = mlflow_of(run)
        self.client = open_mlflow(self.uri)
        experiment = self.client.get_experiment_by_name(run.config.tracking.experiment)
        known = (run.run_id, run.record.mlflow_run_id or "", lambda tags: not is_original_of(run.store.url, tags))
        run_id = find_run(self.client, experiment.experiment_id, *known) if experiment else None
        if run_id is None:
            raise ConfigError(f"MLflow has no run of {run.run_id}. Set MLFLOW_TRACKING_URI to the server of the run")
        self.mlflow_run = self.client.get_run(run_id)

    def log_ends(self) -> None:
        """Log the best evaluated and the last version; after the last step, register for tracking.register_as."""
        evals, last = self._follower.evals, max(self._follower.commits)
        best = best_version(evals)
        ends = {"last": last} if best is None else {"best": best, "last": last}
        tags = [RunTag(f"pipelinerl.{role}", self.log(step).name) for role, step in ends.items()]
        self.client.log_batch(self.mlflow_run.info.run_id, tags=tags)
        name = self._run.config.tracking.register_as
        if name and last >= self._run.config.trainer.steps:
            stored, commits = stored_weights(self._run.store), self._follower.commits
            # The weights of others would be trained again.
            candidates = {step: own for step, own in evals.items() if is_stored(commits, step, stored)}
            most = max((own.num_prompts for own in candidates.values()), default=0)  # others are not comparable
            best = best_version({step: own for step, own in candidates.items() if own.num_prompts == most})
            self._challenge(name, last if best is None else best)

    def log(self, step: int) -> LoggedModel:
        """The logged model of a version, created if it is missing, with the newest evaluation of the version."""
        run, info = self._run, self.mlflow_run.info
        origin = redact({
            "run_id": run.run_id, "run_url": run.store.url, "step": str(step),
            "weights_digest": self._follower.commits[step].weights_digest, "base_model": run.config.model.path,
            "code": run.record.code_version, "config_digest": _digest(run.config.model_dump(mode="json")),
        })  # fmt: skip
        name = _NOT_IN_NAMES.sub("-", f"{run.run_id}-v{step}")
        tags = {MLFLOW_MODEL_IS_EXTERNAL: "true"}
        wanted = f"name = '{name}' AND params.weights_digest = '{origin['weights_digest']}'"
        model = next(iter(self.client.search_logged_models([info.experiment_id], filter_string=wanted)), None)
        if model is None:
            model = self.client.create_logged_model(info.experiment_id, name, info.run_id, tags, origin, "pipelinerl")
            self.client.log_outputs(info.run_id, [LoggedModelOutput(model.model_id, step=step)])
            self.client.finalize_logged_model(model.model_id, "READY")
        record = self._follower.evals.get(step)
        if record is not None and record.known_accuracy is not None:
            self._log_evaluation(model.model_id, record)
        return self.client.get_logged_model(model.model_id)

    def _log_evaluation(self, model_id: str, record: EvalRecord) -> None:
        config, run_id = self._run.config, self.mlflow_run.info.run_id
        inputs = self.mlflow_run.inputs.dataset_inputs if self.mlflow_run.inputs else ()
        sets = [own.dataset for own in inputs if "eval" in [tag.value for tag in own.tags]]
        measure = [  # what decides whether two accuracies measure the same
            sorted([own.name, own.digest] for own in sets), [own.weight for own in config.mixture.values()],
            {part: _measure(own.for_evaluation) for part, own in config.parts.items()},
            {key: digest for key, digest in self._run.record.code.items() if not key.startswith("loss.")},
            [record.temperature, record.top_p, record.num_prompts],
        ]  # fmt: skip
        figures = record.model_dump(include={"accuracy", "low", "high", "num_prompts"})
        tag = json.dumps({**figures, "measure": _digest(measure)})
        self.client.set_logged_model_tags(model_id, {HELD_OUT_TAG: tag})
        of = {"dataset_name": sets[0].name, "dataset_digest": sets[0].digest} if len(sets) == 1 else {}
        of |= {"model_id": model_id, "run_id": run_id}
        at, step = round(record.finished_at * 1000), record.version
        metrics = [Metric(key, value, at, step, **of) for key, value in eval_metrics(record).items()]
        self.client.log_batch(run_id, metrics=metrics)

    def register(self, name: str, step: int) -> ModelVersion:
        """The version of a registered model that is a version of the run, with a copy of the weights."""
        model = self.log(step)
        if MLFLOW_MODEL_IS_EXTERNAL in model.tags:
            with tempfile.TemporaryDirectory(prefix="pipelinerl-") as temporary:
                directory, target = Path(temporary) / model.name, Path(temporary) / "mlflow"
                export(self._run.store.url, directory, str(step))
                arguments = {"directory": str(directory), "target": str(target), "model-id": model.model_id,
                             "max-tokens": str(self._run.config.rollouts.max_tokens)}  # fmt: skip
                login = {name: os.environ[name] for name in LOGIN_VARIABLES if name in os.environ}
                seconds = f"{WRITE_SECONDS:.0f}"  # of one upload; 5 s in this process
                env = {**login, "MLFLOW_TRACKING_URI": self.uri, "MLFLOW_HTTP_REQUEST_TIMEOUT": seconds}
                run_tool(self._run, "pipelinerl_core.tools.write_mlflow", arguments, WRITE_SECONDS, env)
            self.client.delete_logged_model_tag(model.model_id, MLFLOW_MODEL_IS_EXTERNAL)
        # With a database, MLflow looks for models:/ID at its default URI instead of the client's.
        source = model.model_uri if self.uri.startswith("http") else model.artifact_location
        if known := self.client.search_model_versions(f"name = '{name}' AND source_path = '{source}'"):
            return known[0]
        with suppress(MlflowException):  # it exists; the next request names any other error
            self.client.create_registered_model(name)
        text = f"Version {step} of {self._run.run_id}. Its batches: `pipelinerl trace {self._run.run_id} v{step}`"
        return self.client.create_model_version(
            name, source, model.source_run_id, description=text, model_id=model.model_id
        )

    def _challenge(self, name: str, step: int) -> None:
        """Register a version; move the alias `champion` if the version is better, or if there is no champion."""
        own, champion = self.register(name, step), named(self.client, name, CHAMPION)
        if NOTE_TAG in own.tags or (champion is not None and champion.version == own.version):
            return  # compared at an earlier end of the run
        _, figures = facts_of(self.client, own)
        is_better, why = bool(figures), "no champion before" if figures else "no held-out accuracy"
        if champion is not None:
            is_better, why = better(figures, facts_of(self.client, champion)[1])
            why = f"{why} (version {champion.version})"
        note = f"{'' if is_better else 'not '}{CHAMPION}: {why}"
        logger.info("version %d of this run is version %s of %s in MLflow, %s", step, own.version, name, note)
        if is_better:
            set_alias(self.client, own, CHAMPION, note)
        else:
            self.client.set_model_version_tag(name, own.version, NOTE_TAG, note)


def promote(run: RunContext, version: str, name: str, alias: str) -> None:
    """Let an alias of a registered model name a version of a run: best, last or the number of a step. Raises
    ConfigError if there is none, and as RunModels."""
    follower = RunFollower(run.store)
    follower.refresh()
    newest, best = max(follower.commits, default=None), best_version(follower.evals)
    step = str({"best": best, "last": newest}.get(version, version))
    if not (step.isdecimal() and int(step) in follower.commits):
        raise ConfigError(f"{run.run_id} has no version {version!r}; the newest is {newest}. Name a step, last, or "
                          "best (of the versions that are evaluated with an interval)")  # fmt: skip
    models = RunModels(run, follower)
    set_alias(models.client, models.register(name, int(step)), alias, f"{alias}: set by `pipelinerl promote`")


def set_alias(client: MlflowClient, own: ModelVersion, alias: str, note: str) -> None:
    """Let an alias name a version, and note why, and the version that it named before, for `rollback`."""
    before = named(client, own.name, alias)
    if before is not None and before.version != own.version:
        client.set_model_version_tag(own.name, own.version, f"{_PREVIOUS_TAG}{alias}", before.version)
        note += f"; before: version {before.version}"
    client.set_registered_model_alias(own.name, alias, own.version)
    client.set_model_version_tag(own.name, own.version, NOTE_TAG, note)


def rollback(client: MlflowClient, name: str, alias: str) -> None:
    """Let an alias name the version that it named before its version. Raises ConfigError if there is none."""
    current = named(client, name, alias)
    previous = current.tags.get(f"{_PREVIOUS_TAG}{alias}") if current else None
    if current is None or previous is None:
        raise ConfigError(f"{name}@{alias} named no other version before")
    client.set_registered_model_alias(name, alias, previous)
    client.set_model_version_tag(name, current.version, NOTE_TAG, f"{alias} was rolled back to version {previous}")


def describe(client: MlflowClient, name: str) -> list[dict[str, Any]]:
    """The versions of a registered model, newest first, with aliases and origins. ConfigError without versions."""
    versions = sorted(client.search_model_versions(f"name = '{name}'"), key=lambda own: -int(own.version))
    if not versions:
        raise ConfigError(f"MLflow has no version of a registered model {name}")
    aliases, entries = client.get_registered_model(name).aliases, []
    for own in versions:
        origin, figures = facts_of(client, own)
        names = sorted(alias for alias, version in aliases.items() if str(version) == str(own.version))
        entry = {"version": str(own.version), "aliases": names, "note": own.tags.get(NOTE_TAG, "")}
        entries.append({**entry, "origin": origin, "held_out": figures})
    return entries


def better(own: Mapping[str, Any], other: Mapping[str, Any]) -> tuple[bool, str]:
    """Whether a held-out accuracy (as in HELD_OUT_TAG) is better than another, and why: the 95 % interval of the
    difference, which follows from the intervals of both as in `weighted_mean`, is above 0."""
    if own.get("low") is None:
        return False, "no held-out accuracy with an interval"
    if other.get("measure") != own["measure"] or other.get("high") is None:
        return False, "not comparable: other held-out prompts, reward or sampling"
    difference = own["accuracy"] - other["accuracy"]
    low = difference - math.hypot(own["accuracy"] - own["low"], other["high"] - other["accuracy"])
    figures = f"held-out accuracy {own['accuracy']:.3f} against {other['accuracy']:.3f}"
    return low > 0, f"{figures}, the 95 % interval of the difference begins at {low:+.3f}"


def named(client: MlflowClient, name: str, alias: str) -> ModelVersion | None:
    """The version that an alias names; None without it."""
    version: ModelVersion | None = _if_there(partial(client.get_model_version_by_alias, name, alias))
    return version


def facts_of(client: MlflowClient, version: ModelVersion) -> tuple[dict[str, str], dict[str, Any]]:
    """Origin of a version, and the content of HELD_OUT_TAG; both are empty for another origin or a deleted model."""
    model_id = _MODEL_ID.search(version.source or "")
    model = _if_there(partial(client.get_logged_model, model_id[0])) if model_id else None
    if model is None or "weights_digest" not in (model.params or {}):
        return {}, {}
    return dict(model.params), json.loads(model.tags.get(HELD_OUT_TAG, "{}"))


def _if_there(call: Callable[[], Any]) -> Any:
    try:
        return call()
    except MlflowException as error:
        if error.error_code in ("RESOURCE_DOES_NOT_EXIST", "INVALID_PARAMETER_VALUE"):
            return None
        raise


def _measure(config: RunConfig) -> list[Any]:
    """What a reward measures, in the configuration of an evaluation."""
    reward = config.reward.model_dump(mode="json", include={"weights", "timeout_reward"})
    environment = config.environment.model_dump(mode="json", exclude={"workers"})
    return [verifier_name(config), reward, environment, config.rollouts.max_tokens]


def _digest(values: Any) -> str:
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()[:12]
