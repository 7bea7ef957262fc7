"""The refusals of the hub, for both sides: the error behind each code, and what the refused peer does next."""

from enum import Enum
from typing import NamedTuple

from pipelinerl_core.errors import (
    Fenced,
    MissingObject,
    PipelineRLError,
    SchemaMismatch,
    StaleLease,
    StreamError,
    WrongPeer,
)
from pipelinerl_core.messages import Refused


class Next(Enum):
    """What a refused peer does next.

    A trainer repeats a request for rows until a deadline, unless the code is `schema` or `fenced`.
    """

    REGISTER = "register, then repeat the request"
    ASK_AGAIN = "repeat the request a little later"
    DROP = "drop what was sent, and go on"
    END = "end the role"


class Refusal(NamedTuple):
    """The meaning of one code."""

    error: type[PipelineRLError] | None
    """What the hub raised and the peer raises; None: StreamError, which names the code."""
    next: Next


REFUSALS = {
    "unknown_boot": Refusal(None, Next.REGISTER),
    "stale_lease": Refusal(StaleLease, Next.DROP),
    "schema": Refusal(SchemaMismatch, Next.END),
    "wrong_peer": Refusal(WrongPeer, Next.END),
    "fenced": Refusal(Fenced, Next.END),
    "not_reserved": Refusal(None, Next.ASK_AGAIN),
    "missing_rows": Refusal(MissingObject, Next.ASK_AGAIN),
    "internal": Refusal(None, Next.END),
}
_UNKNOWN = Refusal(None, Next.END)


def code_of(error: PipelineRLError) -> str:
    """The code with which the hub refuses a request that has raised this error."""
    found = (code for code, refusal in REFUSALS.items() if refusal.error and isinstance(error, refusal.error))
    return next(found, "internal")


def error_of(refused: Refused) -> PipelineRLError:
    """The error that a refusal is for the peer."""
    error = REFUSALS.get(refused.code, _UNKNOWN).error
    return error(refused.detail) if error else StreamError(f"the hub refused ({refused.code}): {refused.detail}")


def after(refused: Refused) -> Next:
    """What the peer does next; a code that this version does not know ends the role."""
    return REFUSALS.get(refused.code, _UNKNOWN).next
