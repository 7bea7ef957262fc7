"""Prefect flows, one file each, and the command line."""

import logging

from pipelinerl_core.errors import PipelineRLError


class _NoTraceback(logging.Filter):
    """Prefect logs each error of a flow or a task with a traceback; an error of this project needs none."""

    def filter(self, record: logging.LogRecord) -> bool:
        if isinstance(record.exc_info, tuple) and isinstance(record.exc_info[1], PipelineRLError):
            record.exc_info = None
        return True


for _name in ("prefect.flow_runs", "prefect.task_runs"):
    logging.getLogger(_name).addFilter(_NoTraceback())
