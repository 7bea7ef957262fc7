"""Prefect's log of a flow that fails: a traceback only for an error that this project does not raise on purpose."""

import logging
import sys

import pytest

from pipelinerl import flows
from pipelinerl_core.errors import ConfigError


@pytest.mark.parametrize("name", ["prefect.flow_runs", "prefect.task_runs"])
@pytest.mark.parametrize(("error", "has_traceback"), [(ConfigError("learner.lr=x"), False), (KeyError("x"), True)])
def test_an_error_of_this_project_is_one_line(name, error, has_traceback):
    assert flows
    logger = logging.getLogger(name)
    try:
        raise error
    except type(error):
        record = logger.makeRecord(name, logging.ERROR, "x.py", 1, "failed: %r", (error,), sys.exc_info())
    assert logger.filter(record)
    assert (record.exc_info is not None) is has_traceback
    assert repr(error) in record.getMessage()
