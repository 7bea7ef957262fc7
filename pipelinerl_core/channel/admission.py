"""What the hub lets in: who a peer says it is, and whether its messages are of this protocol and of its role.

One token opens the door for every role. A peer says once, when it opens its exchange, which role and name it has, and
is held to that. What only the ledger knows, whose a lease or a group is, the service checks (roles/hub/service.py).
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
"""Largest message without its rows."""

_KINDS: dict[str, tuple[type[Request], ...]] = {
    "actor": (Register, Sync, Group, Sealed, Bye),
    "trainer": (Register, Reserve, Rows, Committed, Bye),
}


def introduction(command: bytes) -> Introduction:
    """From the command of the descriptor of an exchange; FlightServerError if there is none in it."""
    try:
        return Introduction.model_validate_json(command or b"")
    except ValidationError:
        raise fl.FlightServerError(
            'an exchange opens with {"role": ..., "name": ...} as its command: role actor or trainer, and a name of '
            "1 to 100 printable characters without a slash or a dot in front"
        ) from None


def parse(metadata: bytes) -> Request:
    """The request in the metadata of a write; SchemaMismatch if there is none."""
    if len(metadata) > MAX_MESSAGE_BYTES:
        raise SchemaMismatch(f"a message of {len(metadata)} bytes, the limit is {MAX_MESSAGE_BYTES}")
    try:
        return REQUEST.validate_json(metadata)
    except ValidationError as error:
        raise SchemaMismatch(f"no request of this protocol: {first_error(error)}") from None


def id_of(metadata: bytes) -> int:
    """The id of a message that is no request, as far as it can be told; 0 otherwise."""
    if len(metadata) > MAX_MESSAGE_BYTES:
        return 0
    try:
        found = json.loads(metadata)
    except (ValueError, RecursionError):
        return 0
    number = found.get("id") if isinstance(found, dict) else None
    return number if isinstance(number, int) and 0 <= number <= MAX_COUNT else 0


def check_sender(who: Introduction, request: Request) -> None:
    """WrongPeer for a message of another role, and for a registration under another role or name."""
    if not isinstance(request, _KINDS[who.role]):
        raise WrongPeer(f"{who} sent {request.kind}: no {who.role} says that")
    if isinstance(request, Register) and (request.role, request.name) != (who.role, who.name):
        raise WrongPeer(
            f"{who} registers as {request.role}/{request.name}: a peer keeps the role and name that it "
            "opened its exchange with"
        )
