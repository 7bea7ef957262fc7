"""The prediction of a run in closed form, from the calibration of this machine."""

import logging

from pipelinerl_core.config import RunConfig
from pipelinerl_core.errors import ConfigError
from pipelinerl_core.interfaces import ObjectStore
from pipelinerl_core.planning.cache import cached_calibration
from pipelinerl_core.planning.closed_form import run_estimate
from pipelinerl_core.run.records import PREDICTION_KEY, PredictionRecord

logger = logging.getLogger(__name__)


def write_prediction(store: ObjectStore, config: RunConfig) -> None:
    """Write prediction.json, if it is not there and this machine is calibrated for the settings."""
    calibration = cached_calibration(config)
    if calibration is None or store.exists(PREDICTION_KEY):
        return
    try:
        steps_per_second, lag = run_estimate(config, calibration.speeds_of(config), calibration.work_of(config))
    except (ConfigError, ArithmeticError) as error:  # the run does not depend on its prediction
        logger.info("the run has no prediction: %s", error)
        return
    record = PredictionRecord(source=calibration.origin, steps_per_second=steps_per_second, mean_lag=lag)
    store.put(PREDICTION_KEY, record.model_dump_json().encode())
