"""The refusal codes of the hub: the error that each code stands for, and the next action of the refused peer."""

from enum import Enum
from typing import NamedTuple

from pipelinerl_core.errors import (
    ConfigError,
    Expelled,
    Fenced,
    MissingObject,
    NotReserved,
    PipelineRLError,
    SchemaMismatch,
    StaleLease,
    StoreUnavailable,
    StreamError,
    WrongPeer,
)
from pipelinerl_core.messages import Refused


class Next(Enum):
    """The next action of a refused peer.

    A trainer repeats a request for rows for 30 s, unless the code is `schema`, `fenced` or `not_reserved`.
    """

    REGISTER = "register, then repeat the request"
    ASK_AGAIN = "repeat the request a little later"
    DROP = "drop what was sent, and go on"
    RESERVE = "reserve the step again"
    END = "end the role"


class Refusal(NamedTuple):
    """The meaning of one code."""

    error: type[PipelineRLError] | None
    """The error that the hub raised and the peer raises. None: the peer raises StreamError with the code."""
    next: Next


REFUSALS = {
    "unknown_boot": Refusal(None, Next.REGISTER),
    "stale_lease": Refusal(StaleLease, Next.DROP),
    "schema": Refusal(SchemaMismatch, Next.END),
    "wrong_peer": Refusal(WrongPeer, Next.END),
    "config": Refusal(ConfigError, Next.END),
    "fenced": Refusal(Fenced, Next.END),
    "expelled": Refusal(Expelled, Next.END),
    "not_reserved": Refusal(NotReserved, Next.RESERVE),
    "missing_rows": Refusal(MissingObject, Next.ASK_AGAIN),
    "store": Refusal(StoreUnavailable, Next.END),
    "internal": Refusal(None, Next.END),
}
_UNKNOWN = Refusal(None, Next.END)


def code_of(error: PipelineRLError) -> str:
    """The code of the refusal for an error of the hub."""
    codes = (code for code, refusal in REFUSALS.items() if refusal.error and isinstance(error, refusal.error))
    return next(codes, "internal")


def error_of(refused: Refused) -> PipelineRLError:
    """The error that the peer raises for a refusal."""
    error = REFUSALS.get(refused.code, _UNKNOWN).error
    return error(refused.detail) if error else StreamError(f"the hub refused ({refused.code}): {refused.detail}")


def after(refused: Refused) -> Next:
    """The next action of the peer; an unknown code ends the role."""
    return REFUSALS.get(refused.code, _UNKNOWN).next
