"""Whether a drain request from before a crash still holds when a flow run starts again."""

import logging
from uuid import UUID

from pipelinerl.tasks.automations import was_resumed
from pipelinerl_core.interfaces import ObjectStore
from pipelinerl_core.run.drain import clear_drain_request, drained_by, wants_drain

logger = logging.getLogger(__name__)

BY_STATE = "Prefect: "
"""Beginning of `by` in a request that a flow run makes because of its own state, for example Suspended."""


def clear_earlier_drain_request(store: ObjectStore, flow_run_id: str) -> None:
    """Delete the run's drain request, unless the automation pipelinerl-resume started this flow run.

    A user who starts or retries a run wants further steps. If the automation resumes a run that crashed while it
    drained, the request of a user holds: the run takes no further step and ends as Drained. A request that the flow
    run made because of its own state ends with that start.
    """
    if wants_drain(store) and not drained_by(store).startswith(BY_STATE) and _was_resumed(flow_run_id):
        logger.info("the run was asked to drain before the crash: it takes no further step")
    else:
        clear_drain_request(store)


def _was_resumed(flow_run_id: str) -> bool:
    try:
        return was_resumed(UUID(flow_run_id))
    except Exception as error:  # noqa: BLE001 (the run does not depend on the Prefect server, whatever the client raises)
        logger.warning(
            "could not read from the Prefect server what scheduled flow run %s (%s): the drain request is deleted",
            flow_run_id,
            error,
        )
        return False
