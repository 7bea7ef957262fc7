"""Weight versions as models in MLflow: logged models of a run, versions of registered models, and their aliases.

A logged model refers to the run's store until `store_copy` gives it files. The tag HELD_OUT_TAG has the figures by
which two models are compared, because MLflow's metrics do not say on which prompts and by which reward.
"""

import hashlib
import json
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipelinerl_core.config.sections import REGISTERED_NAME
from pipelinerl_core.errors import ConfigError, PipelineRLError
from pipelinerl_core.telemetry import mlflow as tracking  # before mlflow: sets its variables
from pipelinerl_core.telemetry.redact import redact, redact_text

from mlflow import MlflowClient  # isort: skip
from mlflow.entities import LoggedModel, LoggedModelOutput, Metric, Run
from mlflow.entities.model_registry import ModelVersion
from mlflow.exceptions import MlflowException
from mlflow.models.model import MLMODEL_FILE_NAME, Model
from mlflow.utils.mlflow_tags import MLFLOW_MODEL_IS_EXTERNAL

ROLE_TAG = "pipelinerl.role"
"""Tag of a logged model: best, last, or both, of its run."""
HELD_OUT_TAG = "pipelinerl.held_out"
"""Tag of a logged model: accuracy, low, high and num_prompts of its evaluation, and `measure`: a digest of prompts,
reward and sampling. JSON; without an evaluation the tag is missing."""
ALIAS_TAG = "pipelinerl.alias"
"""Tag of a version of a registered model: why the alias moved, or why not."""
_PREVIOUS_TAG = "pipelinerl.previous."
_SOURCE = "models:/"
_MODEL_TYPE = "pipelinerl"
_MISSING = ("RESOURCE_DOES_NOT_EXIST", "INVALID_PARAMETER_VALUE")  # the latter for an alias
_DIGEST_CHARS = 12


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelNote:
    """A weight version of a run."""

    name: str
    step: int
    params: Mapping[str, str]
    """Origin: run_id, run_url, step, weights_digest, code and others."""
    metrics: Mapping[str, float]
    held_out: Mapping[str, Any]
    """Content of HELD_OUT_TAG, with `measure` still as a list; empty without an evaluation."""
    evaluated_at: float
    """Unix seconds."""


def check_name(name: str, alias: str) -> None:
    """Raise ConfigError for a name of a registered model or an alias that MLflow does not take."""
    if not re.fullmatch(REGISTERED_NAME, name) or not name:
        raise ConfigError(f"--name {name!r}: no name of a registered model. Give a name without / : . % and quotes")
    if not re.fullmatch(r"[\w-]+", alias) or alias == "latest" or re.fullmatch(r"v\d+", alias):
        raise ConfigError(f"--alias {alias!r}: give letters, digits, - and _; latest and v1 are reserved")


@contextmanager
def mlflow_errors(uri: str) -> Iterator[None]:
    """Raise PipelineRLError with one line for an error of MLflow in the block."""
    try:
        yield
    except (MlflowException, OSError) as error:
        reason = str(error).strip().partition("\n")[0][:300]
        raise PipelineRLError(f"MLflow at {redact_text(uri)}: {redact_text(reason)}") from None


class ModelStore:
    """The models of one MLflow server or database file. Its methods raise MlflowException."""

    def __init__(self, uri: str) -> None:
        """Raises ConfigError if the database file does not exist."""
        path = uri.removeprefix("sqlite:///")
        if path != uri and not Path(path).is_file():
            raise ConfigError(f"{redact_text(uri)}: no such file. Set MLFLOW_TRACKING_URI or --root")
        self.uri = uri
        self._client = MlflowClient(tracking_uri=uri)

    # ---- logged models -----------------------------------------------------------------------------------------

    def find_run(self, experiment: str, run_name: str, run_id: str | None) -> Run:
        """The MLflow run of a training run. Raises ConfigError if MLflow has none."""
        known = self._client.get_experiment_by_name(experiment)
        own = tracking.find_run(self._client, known.experiment_id, run_name, run_id or "") if known else None
        if own is None:
            raise ConfigError(f"MLflow at {redact_text(self.uri)} has no run of {run_name}; set MLFLOW_TRACKING_URI")
        return self._client.get_run(own)

    def log(self, run: Run, note: ModelNote) -> LoggedModel:
        """The logged model of a version, created if MLflow does not have it, with the newest evaluation."""
        digest = note.params["weights_digest"]
        own = f"name = '{note.name}' AND params.weights_digest = '{digest}'"
        known = self._client.search_logged_models([run.info.experiment_id], filter_string=own, max_results=1)
        model = known[0] if known else self._create(run, note)
        if note.held_out:
            inputs = run.inputs.dataset_inputs if run.inputs else []
            sets = [each.dataset for each in inputs if {tag.value for tag in each.tags} == {"eval"}]
            measure = [sorted([data.name, data.digest] for data in sets), note.held_out["measure"]]
            held_out = {**note.held_out, "measure": _digest(measure)}
            self._client.set_logged_model_tags(model.model_id, {HELD_OUT_TAG: json.dumps(held_out)})
            self._client.log_batch(run.info.run_id, metrics=[
                Metric(
                    key, value, round(note.evaluated_at * 1000), note.step, model_id=model.model_id,
                    dataset_name=sets[0].name if len(sets) == 1 else None,
                    dataset_digest=sets[0].digest if len(sets) == 1 else None, run_id=run.info.run_id,
                )
                for key, value in note.metrics.items()
            ])  # fmt: skip
        return self._client.get_logged_model(model.model_id)

    def set_roles(self, run: Run, roles: Mapping[str, str]) -> None:
        """Tag the models of a run with their roles. roles: model id -> role; other models lose their role."""
        own = f"source_run_id = '{run.info.run_id}'"
        for model in self._client.search_logged_models([run.info.experiment_id], filter_string=own):
            if (role := roles.get(model.model_id, "")) != model.tags.get(ROLE_TAG, ""):
                self._client.set_logged_model_tags(model.model_id, {ROLE_TAG: role})

    def _create(self, run: Run, note: ModelNote) -> LoggedModel:
        model = self._client.create_logged_model(
            run.info.experiment_id, name=note.name, source_run_id=run.info.run_id, model_type=_MODEL_TYPE,
            params=redact(note.params), tags={MLFLOW_MODEL_IS_EXTERNAL: "true"},
        )  # fmt: skip
        self._client.log_outputs(run.info.run_id, [LoggedModelOutput(model.model_id, step=note.step)])
        return self._client.finalize_logged_model(model.model_id, "READY")

    def has_copy(self, model: LoggedModel) -> bool:
        """Whether MLflow has the files of a model."""
        return MLFLOW_MODEL_IS_EXTERNAL not in model.tags

    def store_copy(self, model: LoggedModel, directory: Path) -> None:
        """Store a directory that mlflow.transformers has written as the files of a model."""
        head = Model.load(str(directory))
        head.artifact_path, head.run_id = model.artifact_location, model.source_run_id
        head.model_uuid = head.model_id = model.model_id
        head.save(str(directory / MLMODEL_FILE_NAME))
        self._client.log_model_artifacts(model.model_id, str(directory))
        self._client.delete_logged_model_tag(model.model_id, MLFLOW_MODEL_IS_EXTERNAL)

    # ---- registered models -------------------------------------------------------------------------------------

    def register(self, name: str, model: LoggedModel, description: str) -> ModelVersion:
        """The version of a registered model that is this logged model, created if it is missing."""
        source = f"{_SOURCE}{model.model_id}"
        try:
            known = self._client.search_model_versions(f"name = '{name}' AND source_path = '{source}'")
            if known:
                return known[0]
            self._client.create_registered_model(name)
        except MlflowException as error:
            if error.error_code != "RESOURCE_ALREADY_EXISTS":
                raise
        return self._client.create_model_version(
            name, source, run_id=model.source_run_id, description=description, model_id=model.model_id
        )

    def versions(self, name: str) -> list[ModelVersion]:
        """The versions of a registered model with their aliases, newest first; empty if there is no such model."""
        try:
            aliases = self._client.get_registered_model(name).aliases
        except MlflowException as error:
            if error.error_code not in _MISSING:
                raise
            return []
        versions = sorted(self._client.search_model_versions(f"name = '{name}'"), key=lambda own: -int(own.version))
        for own in versions:  # a search returns no aliases
            own.aliases = [alias for alias, version in aliases.items() if str(version) == str(own.version)]
        return versions

    def model_of(self, version: ModelVersion) -> LoggedModel | None:
        """The logged model of a version; None if the version has another source."""
        _, is_logged, model_id = (version.source or "").rpartition(_SOURCE)
        return self._client.get_logged_model(model_id) if is_logged else None

    def named(self, name: str, alias: str) -> ModelVersion | None:
        """The version that an alias names; None without it."""
        return next((own for own in self.versions(name) if alias in own.aliases), None)

    def set_alias(self, version: ModelVersion, alias: str, reason: str) -> None:
        """Let an alias name a version, and note the version that it named before, for `before`."""
        previous = self.named(version.name, alias)
        if previous is not None and previous.version != version.version:
            self._tag(version, f"{_PREVIOUS_TAG}{alias}", previous.version)
        self._client.set_registered_model_alias(version.name, alias, version.version)
        self._tag(version, ALIAS_TAG, reason)

    def restore_alias(self, name: str, alias: str) -> tuple[ModelVersion, ModelVersion]:
        """Let an alias name the version that it named before its version. Returns both, the restored one first.

        Raises ConfigError if there is none.
        """
        versions = self.versions(name)
        current = next((own for own in versions if alias in own.aliases), None)
        previous = current.tags.get(f"{_PREVIOUS_TAG}{alias}") if current is not None else None
        restored = next((own for own in versions if str(own.version) == previous), None)
        if current is None or restored is None:
            raise ConfigError(f"{name}@{alias} named no other version before")
        self._client.set_registered_model_alias(name, alias, restored.version)
        self._tag(current, ALIAS_TAG, f"{alias} was rolled back to version {restored.version}")
        return restored, current

    def note_reason(self, version: ModelVersion, reason: str) -> None:
        """Note why no alias names a version."""
        self._tag(version, ALIAS_TAG, reason)

    def _tag(self, version: ModelVersion, key: str, value: Any) -> None:
        self._client.set_model_version_tag(version.name, version.version, key, str(value))


def held_out_of(model: LoggedModel | None) -> dict[str, Any]:
    """Figures of the evaluation of a model; empty without an evaluation, or for a model of another origin."""
    tag = model.tags.get(HELD_OUT_TAG) if model is not None else None
    return dict(json.loads(tag)) if tag else {}


def _digest(values: Any) -> str:
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()[:_DIGEST_CHARS]
