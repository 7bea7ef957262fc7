"""A start of the trainer after its last step: it may only have to tell the hub.

One that died between its last commit and the word of it leaves a hub that waits for ever.
"""

import logging
from contextlib import suppress
from threading import Event

from pipelinerl_core.errors import HubUnavailable, RunOver
from pipelinerl_core.messages import Register
from pipelinerl_core.roles.runtime.hub_link import HubLink
from pipelinerl_core.run.context import RunContext
from pipelinerl_core.run.drain import wants_drain
from pipelinerl_core.run.history import read_commit
from pipelinerl_core.run.records import EpochRecord

logger = logging.getLogger(__name__)

HUB_SECONDS = 5.0
"""For a hub to be found: one that comes later reads the commit itself."""


def is_already_done(context: RunContext, commits: dict[int, str], epochs: list[EpochRecord], stop: Event) -> bool:
    """Whether the last step is committed, which the hub hears again then, or the run is to drain."""
    last = max(commits, default=-1)
    if last >= context.config.trainer.steps:
        _report_last_step(context, commits[last], epochs, stop)
        return True
    if commits and wants_drain(context.store):
        logger.info("asked to drain: nothing is done after step %d", last)
        return True
    return False


def _report_last_step(context: RunContext, key: str, epochs: list[EpochRecord], stop: Event) -> None:
    """Register as the trainer that has committed the last step, under `key`; the hub then lets everybody go."""
    commit = read_commit(context.store, key)
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
    link.gives_up = stop.is_set
    with suppress(HubUnavailable, RunOver):
        link.connect()
        logger.info("the hub knows that step %d was the last one", commit.step)
    link.close()
