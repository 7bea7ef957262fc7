"""What a failed request to a store means, for every store; docs/storage.md has the table.

| kind    | meaning                                                          | raised |
|---------|------------------------------------------------------------------|--------|
| missing | the store itself says that the object does not exist             | MissingObject |
| exists  | an object that was to be created exists                          | FileExistsError |
| outage  | the store, or a proxy before it, cannot answer now, or has no space | repeated, then StoreUnavailable |
| refused | a repetition gives the same answer                               | StoreError |
"""

import errno
import logging
import math
import random
import sys
import time
from collections.abc import Callable
from enum import Enum, auto
from typing import Any, TypeVar

from pipelinerl_core.errors import ConfigError, MissingObject, StoreError, StoreUnavailable

logger = logging.getLogger(__name__)

RETRY_SECONDS = 60.0
"""How long a request is repeated after its first failure; after a longer outage the role ends and is restarted."""

_FIRST_PAUSE_SECONDS = 0.1
_LONGEST_PAUSE_SECONDS = 5.0

_NO_SPACE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)  # full disk, spent quota, `ulimit -f` of this process
_NO_ANSWER = (
    errno.EIO, errno.ESTALE, errno.EREMOTEIO, errno.ENODEV, errno.ENXIO, errno.ENOTCONN, errno.ETIMEDOUT,
    errno.EHOSTDOWN, errno.EHOSTUNREACH, errno.ENETDOWN, errno.ENETUNREACH, errno.ECONNREFUSED, errno.ECONNRESET,
    errno.ECONNABORTED, errno.EPIPE,
)  # fmt: skip
_NO_RESOURCES = (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EAGAIN, errno.EBUSY, errno.EINTR)
_OUTAGES = frozenset({*_NO_SPACE, *_NO_ANSWER, *_NO_RESOURCES})
_TRANSIENT_STATUS = frozenset({408, 409, 425, 429, *range(500, 600)}) - {501, 505}
"""With the numbers of proxies that are in no standard, such as 520 to 530."""
_TRANSIENT_CODES = frozenset({"QuotaExceeded", "XMinioStorageFull", "RequestTimeout"})
"""Codes of a full Ceph or MinIO and of a stalled upload, with any status."""
_NOT_FOUND = 404
_PRECONDITION_FAILED = 412

R = TypeVar("R")


class Failure(Enum):
    """The meaning of a failed request."""

    MISSING = auto()
    EXISTS = auto()
    OUTAGE = auto()
    REFUSED = auto()
    CONFIG = auto()


class NotS3(Exception):
    """An answer with a status of success that no S3 server sends; a proxy has sent it."""


def failure_of(error: Exception) -> Failure:
    """The meaning of an error of the operating system, of s3fs, botocore or aiohttp."""
    status = status_of(error)
    if status is not None:
        return _failure_of_answer(status, _error_code(error))
    if isinstance(error, FileExistsError):
        return Failure.EXISTS
    if isinstance(error, (FileNotFoundError, NotADirectoryError, IsADirectoryError)):
        return Failure.MISSING
    if "botocore.exceptions" in sys.modules and (failure := _failure_of_client(error)):
        return failure
    if isinstance(error, (TypeError, ValueError, PermissionError)):
        return Failure.REFUSED
    if type(error) is OSError or isinstance(error, (BlockingIOError, InterruptedError)):
        return Failure.OUTAGE if error.errno in _OUTAGES else Failure.REFUSED
    return Failure.OUTAGE  # s3fs and aiohttp share no base class: timeouts, broken connections, torn documents


def _failure_of_client(error: Exception) -> Failure | None:
    """The meaning of an error of botocore; None for another error."""
    from botocore import exceptions  # type: ignore[import-untyped]  # noqa: PLC0415 - only stores on S3 need it

    if isinstance(error, (exceptions.HTTPClientError, exceptions.ConnectionError)):
        return Failure.OUTAGE
    # Not NoCredentialsError: a machine's service of credentials may be away for a moment, and a role starts again.
    if isinstance(error, (exceptions.PartialCredentialsError, exceptions.ProfileNotFound,
                          exceptions.ParamValidationError)):  # fmt: skip
        return Failure.CONFIG
    return Failure.REFUSED if isinstance(error, exceptions.BotoCoreError) else None


def _failure_of_answer(status: int, code: str) -> Failure:
    """code: of S3's own error document; "" for any other body."""
    if status == _PRECONDITION_FAILED:
        return Failure.EXISTS
    if status == _NOT_FOUND and code != "NoSuchBucket":
        # Without a document of S3, a proxy whose backend is away has answered, not the store.
        return Failure.MISSING if code else Failure.OUTAGE
    is_redirected_by_proxy = 300 <= status < 400 and not code
    is_transient = status in _TRANSIENT_STATUS or code in _TRANSIENT_CODES or is_redirected_by_proxy
    return Failure.OUTAGE if is_transient else Failure.REFUSED


def repeated(
    operation: Callable[[], R],
    verb: str,
    key: str,
    where: str,
    *,
    retry_seconds: float,
    total_seconds: float = math.inf,
    silence: str = "no answer",
) -> R:
    """The result of an operation, which is repeated during an outage until `retry_seconds` after its first failure.

    total_seconds: no repetition begins later than this after the begin. verb, key, where: for errors. silence: the
    reason of an error without a text.
    Raises MissingObject, FileExistsError, StoreUnavailable, or StoreError for an operation that was refused.
    """
    deadline = time.monotonic() + total_seconds
    pause_seconds = _FIRST_PAUSE_SECONDS
    has_warned = False
    while True:
        try:
            return operation()
        except StoreError:
            raise
        except Exception as error:  # noqa: BLE001 - the libraries of S3 share no base class
            failure = error
        kind = failure_of(failure)
        if kind is Failure.EXISTS:
            raise FileExistsError(f"{key!r} in {where} exists already") from None
        if kind is Failure.MISSING:
            raise MissingObject(f"no object {key!r} in {where}") from None
        now = time.monotonic()
        deadline = min(deadline, now + retry_seconds)
        reason = getattr(failure, "strerror", None) or str(failure) or silence
        if kind is Failure.CONFIG:
            text = " ".join(reason.split())  # botocore lists wrong parameters in lines
            raise ConfigError(f"cannot {verb} {key!r} in {where}: {text[:300]}") from failure
        if kind is Failure.REFUSED or now + pause_seconds > deadline:
            raised = StoreError if kind is Failure.REFUSED else StoreUnavailable
            raise raised(f"cannot {verb} {key!r} in {where}: {reason}") from failure
        if not has_warned:
            logger.warning("cannot %s %r in %s now, it is repeated: %s", verb, key, where, reason)
            has_warned = True
        time.sleep(pause_seconds * random.uniform(0.5, 1.0))
        pause_seconds = min(2 * pause_seconds, _LONGEST_PAUSE_SECONDS)


def _response(error: Exception) -> dict[str, Any]:
    """The S3 response of an error that s3fs has translated; empty if the error has no response."""
    response = getattr(error, "response", None) or getattr(error.__cause__, "response", None)
    return response if isinstance(response, dict) else {}


def status_of(error: Exception) -> int | None:
    """HTTP status of an answer of S3; None for another error."""
    status = _response(error).get("ResponseMetadata", {}).get("HTTPStatusCode")
    return int(status) if status is not None else None


def _error_code(error: Exception) -> str:
    """Code of S3's error document; "" for another body, for which botocore gives the status or nothing."""
    code = str(_response(error).get("Error", {}).get("Code") or "")
    return "" if code == str(status_of(error)) else code
