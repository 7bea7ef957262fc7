"""Loads the functions of the objective that are stored with a run."""

from pipelinerl_core.run.context import RunContext
from pipelinerl_core.run.user_code import stored_code
from pipelinerl_core.training.own_functions import load_own_functions


def load_stored_functions(run: RunContext) -> None:
    """Load loss.function and loss.advantage_function from the copies of the run. Raises ConfigError."""
    loss = run.config.loss
    load_own_functions(loss, {key: stored_code(run, key) for key in loss.own_functions})
