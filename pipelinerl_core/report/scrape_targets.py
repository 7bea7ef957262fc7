"""The live roles of a run, and /targets.json with their addresses for Prometheus' HTTP service discovery."""

import logging
import socket
import time
from collections.abc import Sequence
from typing import Any
from urllib.parse import urlsplit

from pipelinerl_core.errors import MissingObject, StoreError
from pipelinerl_core.host import is_loopback
from pipelinerl_core.interfaces import ObjectStore
from pipelinerl_core.run.reading import list_keys, read_record
from pipelinerl_core.run.records import ROLES_PREFIX, RoleRecord

logger = logging.getLogger(__name__)

_WITH_PROGRESS = ("evaluator", "trainer")
SILENCE_SECONDS = 120.0
"""Age of the last heartbeat above which a role is left out; until then, Prometheus sees the role as down."""


def live_roles(store: ObjectStore, *, roles: Sequence[str] = (), now: float | None = None) -> list[RoleRecord]:
    """Records of roles with a recent heartbeat, by role and name. roles: only these. now: Unix seconds, for tests.

    Raises StoreError if the store cannot be read; a broken record is logged and left out.
    """
    now = time.time() if now is None else now
    live = []
    for key in list_keys(store, ROLES_PREFIX):
        if roles and key.removeprefix(f"{ROLES_PREFIX}/").partition("-")[0] not in roles:
            continue
        try:
            record = read_record(store, key, RoleRecord)
        except MissingObject:  # the role has just ended
            continue
        except StoreError as error:
            logger.warning("%s", error)
            continue
        if now - record.beat < SILENCE_SECONDS:
            live.append(record)
    return sorted(live, key=lambda record: (record.role, record.name))


def role_progress(store: ObjectStore) -> str:
    """Long work of a live evaluator, or of a trainer that starts. Empty if there is none.

    Example: evaluating version 0: 300/1,000 prompts.
    """
    return next((role.progress for role in live_roles(store, roles=_WITH_PROGRESS) if role.progress), "")


def targets(store: ObjectStore) -> list[dict[str, Any]]:
    """The document of Prometheus' http_sd_configs for the roles that this host can reach. Raises StoreError.

    A role on another host that serves only its loopback address is left out.
    """
    here = socket.gethostname()
    return [
        {
            "targets": [record.url.partition("://")[2]],
            "labels": {"run": record.run_id, "role": record.role, "name": record.name, "host": record.host},
        }
        for record in live_roles(store)
        if record.host == here or not is_loopback(urlsplit(record.url).hostname or "")
    ]
