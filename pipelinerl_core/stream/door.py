"""What the hub lets in: who a peer says it is, and whether its messages are of this protocol and of its role.

One token opens the door for every role. A peer says once, when it opens its exchange, which role and name it has, and
is held to that. What only the ledger knows, whose a lease or a group is, the service checks (roles/hub_service.py).
"""

import json
from typing import NamedTuple

import pyarrow.flight as fl
from pydantic import ValidationError

from pipelinerl_core.errors import SchemaMismatch, WrongPeer
from pipelinerl_core.messages import (
    REQUEST,
    Bye,
    Committed,
    Group,
    Register,
    Request,
    Reserve,
    Rows,
    Sealed,
    Sync,
)

MAX_MESSAGE_BYTES = 8 << 20
"""Largest message without its rows."""

_KINDS: dict[str, tuple[type[Request], ...]] = {
    "actor": (Register, Sync, Group, Sealed, Bye),
    "trainer": (Register, Reserve, Rows, Committed, Bye),
}
_MAX_NAME = 100  # characters


class Introduction(NamedTuple):
    """Who a peer said it is when it opened its exchange."""

    role: str
    name: str

    def __str__(self) -> str:
        """The form of log lines: "<role>/<name>"."""
        return f"{self.role}/{self.name}"


def introduction(command: bytes) -> Introduction:
    """From the descriptor {"role": ..., "name": ...} of an exchange; anything else raises FlightServerError."""
    try:
        fields = json.loads(command)
        role, name = fields["role"], fields["name"]
    except (ValueError, TypeError, KeyError, RecursionError):
        role = name = None
    if role not in tuple(_KINDS) or not isinstance(name, str) or not _is_plain(name):
        raise fl.FlightServerError(
            'an exchange opens with {"role": ..., "name": ...} as its command: role actor or trainer, and a name of '
            f"1 to {_MAX_NAME} printable characters without a slash"
        )
    return Introduction(role, name)


def _is_plain(name: str) -> bool:
    """A name becomes a part of object keys and of log lines."""
    return 0 < len(name) <= _MAX_NAME and name.isprintable() and not {"/", "\\"} & set(name)


def parse(metadata: bytes) -> Request:
    """The request in the metadata of a write; SchemaMismatch if there is none."""
    if len(metadata) > MAX_MESSAGE_BYTES:
        raise SchemaMismatch(f"a message of {len(metadata)} bytes, the limit is {MAX_MESSAGE_BYTES}")
    try:
        return REQUEST.validate_json(metadata)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        place = ".".join(str(part) for part in first["loc"])
        raise SchemaMismatch(f"no request of this protocol: {place + ': ' if place else ''}{first['msg']}") from None


def id_of(metadata: bytes) -> int:
    """The id of a message that is no request, as far as it can be told; 0 otherwise."""
    if len(metadata) > MAX_MESSAGE_BYTES:
        return 0
    try:
        found = json.loads(metadata)
    except (ValueError, RecursionError):
        return 0
    number = found.get("id") if isinstance(found, dict) else None
    return number if isinstance(number, int) else 0


def check_sender(who: Introduction, request: Request) -> None:
    """WrongPeer for a message of another role, and for a registration under another role or name."""
    if not isinstance(request, _KINDS[who.role]):
        raise WrongPeer(f"{who} sent {request.kind}: no {who.role} says that")
    if isinstance(request, Register) and (request.role, request.name) != who:
        raise WrongPeer(
            f"{who} registers as {request.role}/{request.name[:_MAX_NAME]}: a peer keeps the role and name that it "
            "opened its exchange with"
        )
