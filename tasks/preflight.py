"""The Prefect task that checks a configuration before a run starts."""

import logging

from prefect import task
from prefect.cache_policies import NO_CACHE

from pipelinerl_core.config import RunConfig
from pipelinerl_core.report.query.database import check_alarm_query
from pipelinerl_core.run.context import RunContext
from pipelinerl_core.supervision.checks import check_all

logger = logging.getLogger(__name__)


@task(name="preflight", task_run_name="preflight", persist_result=False, cache_policy=NO_CACHE)
def preflight(config: RunConfig, root: str, *, run: RunContext | None = None) -> None:
    """Raise ConfigError, one line, if a run with this configuration cannot work. run: the run, if it exists."""
    if run is None:  # a run that exists goes on; its alarm says what is wrong
        check_alarm_query(config)
    for line in check_all(config, root, run=run):
        logger.info("%s", line)
