"""The prediction of a run that is under way: from the calibration of this machine, else from its first steps."""

import logging
import threading
import time
from collections.abc import Mapping

from pipelinerl_core.config import RunConfig
from pipelinerl_core.config.load import override_config
from pipelinerl_core.errors import ConfigError
from pipelinerl_core.interfaces import ObjectStore
from pipelinerl_core.planning.cache import cached_calibration, usable_cores
from pipelinerl_core.planning.calibration import calibrate
from pipelinerl_core.planning.prediction import SHORT, Prediction, Source, predict
from pipelinerl_core.report.facts import RunFacts, read_batch, step_facts
from pipelinerl_core.run.records import PREDICTION_KEY, Commit, PredictedChange, PredictionRecord, RunRecord

logger = logging.getLogger(__name__)

FIRST_STEPS = 10
"""Steps after which a run without a calibration is predicted."""
_BATCHES = 2
"""Batches that are read for the lengths of completions."""
_CPU_SECONDS = 1.0


class OwnPrediction:
    """Writes prediction.json once, on a thread of its own. A failure is logged and has no other effect."""

    def __init__(self, store: ObjectStore, run: RunRecord, config: RunConfig) -> None:
        self._store = store
        self._run = run
        self._config = config
        self._thread: threading.Thread | None = None

    def look(self, commits: Mapping[int, Commit], newest: int) -> None:
        """Start the prediction when the run has its first steps; newest: newest committed step."""
        if self._thread is None and newest >= FIRST_STEPS:
            first = [commits[step] for step in range(1, FIRST_STEPS + 1) if step in commits]
            self._thread = threading.Thread(target=self._predict, args=(first,), name="prediction", daemon=True)
            self._thread.start()

    def join(self, seconds: float) -> None:
        """Wait for the end of the prediction."""
        if self._thread is not None:
            self._thread.join(seconds)

    def _predict(self, first: list[Commit]) -> None:
        try:
            if not self._store.exists(PREDICTION_KEY):
                record = own_prediction(self._store, self._run, self._config, first)
                self._store.put(PREDICTION_KEY, record.model_dump_json().encode())
        except Exception as error:  # noqa: BLE001 (the run does not depend on its prediction)
            logger.info("the run has no prediction: %s", error)


def own_prediction(store: ObjectStore, run: RunRecord, config: RunConfig, first: list[Commit]) -> PredictionRecord:
    """The prediction of a run from its first commits. Raises ConfigError if the work takes too long."""
    until = time.thread_time() + _CPU_SECONDS
    source: Source | None = cached_calibration(config)
    name = "calibration of this machine"
    if source is None:
        name = f"first {FIRST_STEPS} steps of the run"
        steps = tuple(step_facts(commit.step, read_batch(store, commit)) for commit in first[-_BATCHES:])
        facts = RunFacts(
            run=run, commits={commit.step: commit for commit in first}, evals={}, set_evals={}, steps=steps
        )
        source = calibrate(facts, cores=usable_cores(config), size=SHORT, until=until)
    found = predict(source, config, size=SHORT, until=until)
    return PredictionRecord(
        source=name,
        steps_per_second=found.steps_per_second,
        mean_lag=found.mean_lag,
        trainer_idle=found.trainer_idle,
        busy_slots=found.busy_slots,
        bottleneck=found.bottleneck,
        changes=_changes(source, config, found, until),
    )


def _changes(source: Source, config: RunConfig, found: Prediction, until: float) -> tuple[PredictedChange, ...]:
    """The change of a setting that fits the bottleneck; none if it is not valid or there is no time to simulate."""
    settings = {
        "generation": f"placement.actors={config.placement.actors + 1}",
        "staleness limit": f"schedule.max_lag={2 * config.schedule.max_lag + 1}",
    }
    setting = "schedule.kind=pipeline" if config.takes_turns else settings.get(found.bottleneck)
    if setting is None:
        return ()
    try:
        changed = predict(source, override_config(config, [setting]), size=SHORT, until=until)
    except ConfigError:
        return ()
    return (PredictedChange(setting=setting, ratio=changed.steps_per_second / found.steps_per_second),)
