"""A start of a trainer that has no step left to train.

If the previous trainer ended after the last commit and before its report to the hub, the hub waits for this report.
"""

import logging
from contextlib import suppress
from threading import Event

from pipelinerl_core.errors import HubUnavailable, RunOver
from pipelinerl_core.messages import Register
from pipelinerl_core.roles.runtime.hub_link import HubLink
from pipelinerl_core.run.context import RunContext
from pipelinerl_core.run.drain import wants_drain
from pipelinerl_core.run.history import read_commit, read_epochs

logger = logging.getLogger(__name__)

HUB_SECONDS = 5.0
"""Deadline for finding the hub. A hub that starts later reads the commit from the store."""


def is_already_done(context: RunContext, commits: dict[int, str], stop: Event) -> bool:
    """Whether the last step is committed, or the run is to drain. In the first case the hub is informed again."""
    last = max(commits, default=-1)
    if last >= context.config.trainer.steps:
        _report_last_step(context, commits[last], stop)
        return True
    if commits and wants_drain(context.store):
        logger.info("the run is to drain: no step is trained after step %d", last)
        return True
    return False


def _report_last_step(context: RunContext, key: str, stop: Event) -> None:
    """Register as the trainer of the last commit, stored under `key`; the hub then ends the run for all roles."""
    commit = read_commit(context.store, key)
    epochs = read_epochs(context.store)
    registration = Register(
        role="trainer",
        name="trainer",
        epoch=max((record.epoch for record in epochs if record.role == "trainer"), default=commit.epoch),
        committed_step=commit.step,
        manifest=commit.manifest,
    )
    link = HubLink(
        context.store, token=context.token, role="trainer", name="trainer", registration=lambda: registration,
        deadline_seconds=HUB_SECONDS,
    )  # fmt: skip
    link.is_cancelled = stop.is_set
    with suppress(HubUnavailable, RunOver):
        link.connect()
        logger.info("reported to the hub that step %d was the last step", commit.step)
    link.close()
