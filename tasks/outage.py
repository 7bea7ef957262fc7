"""Outages of the store: a flow run of a deployment is scheduled again, any other flow run becomes Crashed.

The next start waits until the store is back. The flow run of a deployment does not become Crashed: the automation
pipelinerl-resume would schedule it while its old process still runs. The worker would then report the end of the old
process, and remove its directory, as if they belonged to the new start.
"""

import logging
import time
import uuid
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from http import HTTPStatus
from threading import Event
from typing import Any
from uuid import UUID

import httpx
from prefect import get_client
from prefect.client.schemas.objects import State
from prefect.exceptions import Pause
from prefect.runtime import deployment, flow_run
from prefect.settings import PREFECT_CLIENT_MAX_RETRIES, get_current_settings, temporary_settings
from prefect.states import AwaitingRetry, Crashed

from pipelinerl.tasks.automations import OUTAGE_MESSAGE
from pipelinerl_core.errors import ConfigError, DeadlineExceeded, PipelineRLError, StoreError, StoreUnavailable
from pipelinerl_core.run.locate import local_directory
from pipelinerl_core.run.records import RUN_KEY
from pipelinerl_core.storage.object_store import CHECK_SECONDS, open_store
from pipelinerl_core.supervision.checks import check_http
from pipelinerl_core.telemetry.redact import redact_text

logger = logging.getLogger(__name__)

RETRY_SECONDS = 60.0
"""Until the next start of a flow run of a deployment; its process ends within seconds."""
STORE_SECONDS = 86_400.0
"""Deadline of the wait for the store at a repeated start."""
SERVER_SECONDS = 600.0
"""Deadline of the wait of a worker's flow run for the Prefect server at its end."""
_POLL_SECONDS = 15.0
_POLL_SERVER_SECONDS = 1.0


def crashed_by_outage(url: str, error: PipelineRLError) -> State[Any] | None:
    """The state Crashed if `error` ended the run at `url` because the store does not answer, else None."""
    if not isinstance(error, StoreUnavailable) and _answers(url):
        return None
    return Crashed(
        message=f"{OUTAGE_MESSAGE} ({url}). When the store is back, Retry or "
        f"`pipelinerl resume {url.rpartition('/')[2]}` continues the run. {error}"
    )


def schedule_again(crashed: State[Any]) -> None:
    """Schedule this flow run, if a worker has started it, with the message of `crashed`, and end its process.

    Raises Pause, on which Prefect ends the process. Returns if no worker has started this flow run, or if the Prefect
    server does not answer.
    """
    if not deployment.id or not flow_run.id:
        return
    at = datetime.now(UTC) + timedelta(seconds=RETRY_SECONDS)
    state: State[Any] = AwaitingRetry(scheduled_time=at, message=crashed.message)
    try:
        with get_client(sync_client=True) as client:
            client.set_flow_run_state(UUID(str(flow_run.id)), state, force=True)
    except Exception as error:  # noqa: BLE001 (whatever the client raises, the state Crashed is left)
        logger.warning("this flow run could not be scheduled again: %s", error)
        return
    logger.warning("%s. The next start is in %.0f s", crashed.message, RETRY_SECONDS)
    raise Pause(state=state)


def check_prefect(url: str) -> None:
    """The Prefect server of the settings, at `url`, answers and accepts the login. Raises ConfigError."""
    check_http("PREFECT_API_URL", url)
    try:  # the health page needs no login
        with temporary_settings({PREFECT_CLIENT_MAX_RETRIES: 0}), get_client(sync_client=True) as client:
            client.read_work_pools(limit=1)
    except (httpx.TransportError, RuntimeError) as error:
        raise ConfigError(
            f"PREFECT_API_URL={redact_text(url)}: {redact_text(str(error) or type(error).__name__)}"
        ) from None
    except httpx.HTTPStatusError as error:
        answered = f"{error.response.status_code} {error.response.reason_phrase}"
        if error.response.status_code not in (HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN):
            raise ConfigError(f"PREFECT_API_URL={redact_text(url)}: the server answered {answered}") from None
        raise ConfigError(
            f"PREFECT_API_URL={redact_text(url)}: the server refuses the login ({answered}). Set "
            "PREFECT_API_AUTH_STRING, or PREFECT_API_KEY for Prefect Cloud"
        ) from None


def server_answers(seconds: float) -> bool:
    """Whether the Prefect server, if a server is set, answers within a deadline.

    If a server is away at the end of a flow, Prefect's client repeats its request for a minute. Then Prefect raises
    the error, and proposes the state Failed for a flow that has returned its result. Therefore the flows ask first,
    and raise Pause if there is no answer: Prefect then ends without a further request.
    """
    url = get_current_settings().api.url
    deadline = time.monotonic() + seconds
    while url and time.monotonic() < deadline:
        # Prefect's client has the login, headers and certificates of the settings, and repeats without a deadline.
        with temporary_settings({PREFECT_CLIENT_MAX_RETRIES: 0}), get_client(sync_client=True) as client:
            if client.api_healthcheck() is None:
                return True
        time.sleep(_POLL_SERVER_SECONDS)
    return not url


def _answers(url: str) -> bool:
    try:
        open_store(url).limited(CHECK_SECONDS).exists(RUN_KEY)
    except StoreUnavailable:
        return False
    except StoreError:
        return True  # the store has refused the request
    return True


def await_store(url: str, stop: Event | None = None) -> None:
    """Wait until the store at a URL accepts a small object, or until `stop` is set. Raises DeadlineExceeded after a
    day.

    Returns if the store refuses the object, or is a directory that this host does not have: the checks of the start
    report this.
    """
    directory = local_directory(url)
    if directory is not None:
        try:
            directory.stat()
        except (FileNotFoundError, NotADirectoryError):
            return
        except OSError:
            pass  # an outage, for which the requests below wait
    store, key = open_store(url).limited(CHECK_SECONDS), f"check-{uuid.uuid4().hex}"
    deadline = time.monotonic() + STORE_SECONDS
    has_warned = False
    pause: Callable[[float], object] = time.sleep if stop is None else stop.wait
    while True:
        try:
            store.put(key, b"check")
            store.delete([key])
            return
        except StoreUnavailable as error:
            if time.monotonic() > deadline:
                raise DeadlineExceeded(
                    f"the store {url} has not answered for {STORE_SECONDS / 3600:.0f} h. Continue with Retry"
                ) from error
            if not has_warned:
                logger.warning("waiting at most %.0f h for the store: %s", STORE_SECONDS / 3600, error)
                has_warned = True
        except StoreError:
            return
        if pause(_POLL_SECONDS):
            return  # stopped
