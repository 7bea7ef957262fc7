"""Checks who a peer is, and that its messages follow the protocol and belong to its role.

All roles use the same token. A peer names its role and name once, when it opens its exchange, and may not use others
later. The hub service checks which peer owns a lease or a group (roles/hub/service.py).
"""

import json

import pyarrow.flight as fl
from pydantic import ValidationError

from pipelinerl_core.errors import SchemaMismatch, WrongPeer
from pipelinerl_core.messages import (
    REQUEST,
    Bye,
    Committed,
    Group,
    Introduction,
    Register,
    Request,
    Reserve,
    Rows,
    Sealed,
    Sync,
)
from pipelinerl_core.ranges import MAX_COUNT, first_error

MAX_MESSAGE_BYTES = 8 << 20
"""Largest message, rows excluded."""

_KINDS: dict[str, tuple[type[Request], ...]] = {
    "actor": (Register, Sync, Group, Sealed, Bye),
    "trainer": (Register, Reserve, Rows, Committed, Bye),
}


def introduction(command: bytes) -> Introduction:
    """Parse the command of an exchange's descriptor. Raises FlightServerError if it is no introduction."""
    try:
        return Introduction.model_validate_json(command or b"")
    except ValidationError:
        raise fl.FlightServerError(
            'the command of an exchange is {"role": ..., "name": ...}: role actor or trainer, and a name of 1 to 100 '
            "printable characters, without a slash and without a leading dot"
        ) from None


def parse(metadata: bytes) -> Request:
    """Parse the request in the metadata of a write. Raises SchemaMismatch if it is no valid request."""
    if len(metadata) > MAX_MESSAGE_BYTES:
        raise SchemaMismatch(f"a message of {len(metadata)} bytes, the limit is {MAX_MESSAGE_BYTES}")
    try:
        return REQUEST.validate_json(metadata)
    except ValidationError as error:
        raise SchemaMismatch(f"not a valid request: {first_error(error)}") from None


def id_of(metadata: bytes) -> int:
    """The id of an invalid message, for its refusal; 0 if the message has no readable id."""
    if len(metadata) > MAX_MESSAGE_BYTES:
        return 0
    try:
        message = json.loads(metadata)
    except (ValueError, RecursionError):
        return 0
    number = message.get("id") if isinstance(message, dict) else None
    return number if isinstance(number, int) and 0 <= number <= MAX_COUNT else 0


def check_sender(who: Introduction, request: Request) -> None:
    """Raises WrongPeer for a message of another role, and for a registration under another role or name."""
    if not isinstance(request, _KINDS[who.role]):
        raise WrongPeer(f"{who} sent {request.kind}: role {who.role} may not send it")
    if isinstance(request, Register) and (request.role, request.name) != (who.role, who.name):
        raise WrongPeer(
            f"{who} registers as {request.role}/{request.name}: the role and name must be those of its exchange"
        )
