"""Prefect's log of a flow that fails: a traceback only for an error that this project does not raise on purpose."""

import logging

import pytest

from pipelinerl import flows
from pipelinerl_core.errors import ConfigError


@pytest.mark.parametrize("name", ["prefect.flow_runs", "prefect.task_runs"])
@pytest.mark.parametrize(("error", "has_traceback"), [(ConfigError("learner.lr=x"), False), (KeyError("x"), True)])
def test_an_error_of_this_project_is_one_line(caplog, name, error, has_traceback):
    assert flows
    logger = logging.getLogger(name)
    logger.propagate, propagates = True, logger.propagate
    try:
        raise error
    except type(error):
        logger.exception("Encountered exception during execution: %r", error)
    finally:
        logger.propagate = propagates
    assert ("Traceback" in caplog.text) is has_traceback
    assert str(error) in caplog.text
