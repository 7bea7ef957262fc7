"""Weight versions of a run as models in MLflow: logged at the end of the run, registered with a copy of the weights,
and named by an alias. From an alias back to run, step, batches and code."""

import hashlib
import json
import logging
import math
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mlflow.entities import LoggedModel
from mlflow.entities.model_registry import ModelVersion

from pipelinerl_core.config.verifier import verifier_name
from pipelinerl_core.errors import ConfigError
from pipelinerl_core.run.context import RunContext
from pipelinerl_core.run.evaluations import best_version
from pipelinerl_core.run.follow import RunFollower, eval_metrics
from pipelinerl_core.run.records import EvalRecord
from pipelinerl_core.run.versions import stored_versions
from pipelinerl_core.telemetry.mlflow_models import ALIAS_TAG, ModelNote, ModelStore, held_out_of
from pipelinerl_core.telemetry.mlflow_traces import RolloutTrace, log_traces
from pipelinerl_core.tools.export import WRITE_SECONDS, export, run_tool

logger = logging.getLogger(__name__)

CHAMPION = "champion"
BEST, LAST = "best", "last"
_DIGEST_CHARS = 12


def mlflow_uri(run: RunContext) -> str:
    """The MLflow server of a run. Raises ConfigError for a run without MLflow."""
    uri = run.config.tracking.chosen_uri or run.record.mlflow_uri or "none"
    if uri == "none":
        raise ConfigError(f"{run.run_id} has no MLflow run: tracking.mlflow_uri=none")
    return uri


def log_run(run: RunContext, follower: RunFollower, traces: Sequence[RolloutTrace]) -> None:
    """Log traces, and the best evaluated and the last version of a run, to MLflow; register the best for
    tracking.register_as.

    follower: refreshed. Raises MlflowException, and the errors of `export`.
    """
    name = run.config.tracking.register_as
    if not follower.commits:
        return
    models = _RunModels(run, follower)
    last, best = max(follower.commits), best_version(follower.evals)
    roles = {last: LAST} if best in (None, last) else {best: BEST, last: LAST}
    if best == last:
        roles = {last: f"{BEST}, {LAST}"}
    models.store.set_roles(models.mlflow_run, {models.log(step).model_id: role for step, role in roles.items()})
    log_traces(models.store.uri, models.mlflow_run, traces)
    if name:
        stored = stored_versions(run.store)
        kept = best_version({step: record for step, record in follower.evals.items() if step in stored})
        if kept != best:
            logger.warning(
                "version %s is the best, but its weights are not in the store: %s registers version %s. "
                "`pipelinerl promote %s best --name %s` computes the best again; weights.keep keeps more versions",
                best, name, kept, run.run_id, name,
            )  # fmt: skip
        _challenge(models, name, last if kept is None else kept)


def promote(run: RunContext, version: str, name: str, alias: str) -> dict[str, Any]:
    """Let an alias of a registered model name a version of a run, with a copy of its weights in MLflow.

    version: best, last or the number of a step. Returns what `describe` returns, and `before`: the version that the
    alias named. Raises ConfigError if there is no such version, MlflowException, and the errors of `export`.
    """
    follower = RunFollower(run.store)
    follower.refresh()
    best = best_version(follower.evals)
    if version == BEST and best is None:
        raise ConfigError(f"{run.run_id} has no evaluation on held-out prompts. Name a step instead of `best`")
    named = str({BEST: best, LAST: max(follower.commits, default=None)}.get(version, version))
    if not (named.isdecimal() and int(named) in follower.commits):
        newest = max(follower.commits, default=None)
        raise ConfigError(f"{run.run_id} has no version {version}; the newest is {newest}. Name a step, best or last")
    models = _RunModels(run, follower)
    own = models.register(name, int(named))
    before = models.store.named(name, alias)
    models.store.set_alias(own, alias, f"{alias}: set by `pipelinerl promote`")
    entry = next(each for each in describe(models.store, name) if each["version"] == own.version)
    return {**entry, "alias": alias, "before": before.version if before else None}


def describe(store: ModelStore, name: str) -> list[dict[str, Any]]:
    """The versions of a registered model, newest first: aliases, and the run, step and code that they come from.

    Raises ConfigError without such a model, MlflowException.
    """
    versions = store.versions(name)
    if not versions:
        raise ConfigError(f"MLflow has no version of a registered model {name}")
    entries = []
    for own in versions:
        model = store.model_of(own)
        origin = model.params if model is not None else None
        entries.append({
            "name": name, "version": own.version, "aliases": own.aliases, "note": own.tags.get(ALIAS_TAG, ""),
            "held_out": held_out_of(model), "origin": dict(origin or {}), "source": own.source,
        })  # fmt: skip
    return entries


def better(own: Mapping[str, Any], other: Mapping[str, Any]) -> tuple[bool, str]:
    """Whether a held-out accuracy is better than another, and why: the 95 % interval of the difference is above 0.

    Both as of HELD_OUT_TAG. The interval follows from the intervals of both, as in `weighted_mean`.
    """
    if not own.get("measure") or own.get("low") is None:
        return False, "no held-out accuracy with an interval"
    if other.get("measure") != own["measure"] or other.get("high") is None:
        return False, "not comparable: other held-out prompts, reward or sampling"
    difference = own["accuracy"] - other["accuracy"]
    low = difference - math.hypot(own["accuracy"] - own["low"], other["high"] - other["accuracy"])
    figures = f"held-out accuracy {own['accuracy']:.3f} against {other['accuracy']:.3f}, the 95 % interval of the"
    return low > 0, f"{figures} difference begins at {low:+.3f}"


def _challenge(models: "_RunModels", name: str, step: int) -> None:
    """Register a version; move the alias `champion` if the version is better, or if there is no champion."""
    own = models.register(name, step)
    champion = models.store.named(name, CHAMPION)
    if champion is not None and champion.version == own.version:
        return
    held_out = held_out_of(models.store.model_of(own))
    if champion is None:
        is_better = bool(held_out)
        reason = "the first version with a held-out accuracy" if is_better else "no held-out accuracy"
    else:
        is_better, reason = better(held_out, held_out_of(models.store.model_of(champion)))
        reason = f"{reason} (version {champion.version})"
    if is_better:
        models.store.set_alias(own, CHAMPION, f"{CHAMPION}: {reason}")
    else:
        models.store.note_reason(own, f"not {CHAMPION}: {reason}")
    logger.info(
        "version %s of the registered model %s is version %d of this run; it is %s%s: %s",
        own.version, name, step, "" if is_better else "not ", CHAMPION, reason,
    )  # fmt: skip


class _RunModels:
    """The models of one run in MLflow."""

    def __init__(self, run: RunContext, follower: RunFollower) -> None:
        """follower: refreshed. Raises ConfigError if MLflow has no run of this run, MlflowException."""
        self._run = run
        self._follower = follower
        self.store = ModelStore(mlflow_uri(run))
        self.mlflow_run = self.store.find_run(run.config.tracking.experiment, run.run_id, run.record.mlflow_run_id)

    def log(self, step: int) -> LoggedModel:
        return self.store.log(self.mlflow_run, model_note(self._run, self._follower, step))

    def register(self, name: str, step: int) -> ModelVersion:
        """The version of a registered model that is a version of the run; copies the weights if they are missing."""
        model = self.log(step)
        if not self.store.has_copy(model):
            with tempfile.TemporaryDirectory(prefix="pipelinerl-") as temporary:
                directory, target = Path(temporary) / model.name, Path(temporary) / "mlflow"
                export(self._run.store.url, directory, str(step))
                limit = str(self._run.config.rollouts.max_tokens)
                arguments = {"directory": str(directory), "target": str(target), "max-tokens": limit}
                run_tool(self._run, "pipelinerl_core.tools.write_mlflow", arguments, WRITE_SECONDS)
                self.store.store_copy(model, target)
        figures = held_out_of(model)
        accuracy = f", held-out accuracy {figures['accuracy']:.3f}" if figures else ""
        origin = f"Version {step} of {self._run.run_id}{accuracy}. `pipelinerl trace {self._run.run_id} v{step}`"
        return self.store.register(name, model, origin)


def model_note(run: RunContext, follower: RunFollower, step: int) -> ModelNote:
    """A weight version of a run for MLflow."""
    config, commit, record = run.config, follower.commits[step], follower.evals.get(step)
    sets = [each[step] for each in follower.set_evals.values() if step in each]
    metrics = {key: value for each in (record, *sets) if each for key, value in eval_metrics(each).items()}
    document = json.dumps(config.model_dump(mode="json"), sort_keys=True)
    return ModelNote(
        name=f"{run.run_id}-v{step}",
        step=step,
        params={
            "run_id": run.run_id,
            "run_url": run.store.url,
            "step": str(step),
            "weights_digest": commit.weights_digest,
            "base_model": config.model.path,
            "code": run.record.code_version,
            "user_code": ", ".join(sorted({*run.record.commits.values(), *run.record.packages.values()})) or "none",
            "config_digest": hashlib.sha256(document.encode()).hexdigest()[:_DIGEST_CHARS],
        },
        metrics=metrics,
        held_out=_held_out(run, record) if record and record.known_accuracy is not None else {},
        evaluated_at=record.finished_at if record else 0.0,
    )


def _held_out(run: RunContext, record: EvalRecord) -> dict[str, Any]:
    """Content of HELD_OUT_TAG. The measure has what decides whether two accuracies measure the same, beside the
    prompts, which are in MLflow's run: the reward, its weights in a mixture, and the sampling."""
    config = run.config
    code = {key: digest for key, digest in run.record.code.items() if not key.startswith("loss.")}
    parts = [
        [name, verifier_name(part), config.mixture[name].weight if name else 1.0]
        for name, part in config.parts.items()
    ]
    return {
        "accuracy": record.accuracy, "low": record.low, "high": record.high, "num_prompts": record.num_prompts,
        "measure": [parts, code, record.temperature, record.top_p, config.eval.max_tokens],
    }  # fmt: skip
