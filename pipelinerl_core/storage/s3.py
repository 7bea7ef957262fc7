"""An object store on Amazon S3 or on a server with the S3 protocol, through s3fs.

Nothing is cached, every request has a time limit, and requests with transient failures are repeated with growing
pauses.
"""

import functools
import os
import random
import time
import uuid
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import fsspec
from botocore.exceptions import BotoCoreError, HTTPClientError  # type: ignore[import-untyped]
from botocore.exceptions import ConnectionError as BotoConnectionError

from pipelinerl_core.errors import ConfigError, MissingObject, StoreError
from pipelinerl_core.storage.keys import check_key, check_prefix, join_key

ENDPOINT_VARIABLES = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "FSSPEC_S3_ENDPOINT_URL")

RETRY_SECONDS = 60.0
"""How long failing requests are repeated; after a longer outage the role ends and is restarted."""
ATTEMPT_SECONDS = 900.0
"""Time limit of one request of any size."""
CONNECT_SECONDS = 5
STALL_SECONDS = 15
"""Longest time without data within one request."""
_SETTLE_SECONDS = 0.5

_TRANSIENT_STATUS = frozenset({408, 409, 425, 429, 500, 502, 503, 504, 507})
_NO_ROOM_CODES = frozenset({"QuotaExceeded", "XMinioStorageFull"})
"""Codes of a full Ceph or MinIO; transient, because space may be freed."""

_Result = TypeVar("_Result")


class S3Store:
    """Objects under s3://bucket/prefix. Credentials and endpoint come from the standard AWS_* variables or files."""

    def __init__(
        self, url: str, *, retry_seconds: float = RETRY_SECONDS, attempt_seconds: float = ATTEMPT_SECONDS
    ) -> None:
        self._root = url.removeprefix("s3://").strip("/")
        if not self._root.partition("/")[0]:
            raise ConfigError(f"{url!r} names no bucket; write s3://bucket/prefix")
        self.url = f"s3://{self._root}"
        self._retry_seconds = retry_seconds
        self._attempt_seconds = attempt_seconds
        self._endpoint = next((os.environ[name] for name in ENDPOINT_VARIABLES if os.environ.get(name)), None)
        self._fs: Any = fsspec.filesystem(
            "s3",
            skip_instance_cache=True,
            use_listings_cache=False,
            endpoint_url=self._endpoint,
            config_kwargs={
                # Many compatible stores reject the CRC32 that botocore adds by default since 1.36.
                "request_checksum_calculation": "when_required",
                "response_checksum_validation": "when_required",
                "connect_timeout": CONNECT_SECONDS,
                "read_timeout": STALL_SECONDS,
                "retries": {"total_max_attempts": 1},  # `_call` repeats; two retry loops would multiply
                "s3": {"addressing_style": "path" if self._endpoint else "auto"},
            },
        )
        self._fs.retries = 1

    def put(self, key: str, data: bytes | memoryview, *, create_only: bool = False) -> None:
        """Write a whole object; readers see the old or the new object.

        create_only is atomic if the store supports If-None-Match (`is_conditional`). Otherwise the object is read
        again after a moment: of several concurrent writers the last writer succeeds, and the others get
        FileExistsError.
        """
        if create_only:
            self._create_once(key, bytes(data))
            return
        path = self._path(key)
        self._call("write", key, lambda timeout: self._fs.pipe_file(path, bytes(data), timeout=timeout))

    @functools.cached_property
    def is_conditional(self) -> bool:
        """Whether the store supports If-None-Match, tested by two writes of a small object."""
        key = f"check-{uuid.uuid4().hex}"
        try:
            self.create(key, b"first")
            self.create(key, b"second")
        except FileExistsError:
            return True
        except StoreError:
            return False  # a store may also refuse requests with If-None-Match
        finally:
            self.delete([key])
        return False

    def _create_once(self, key: str, data: bytes) -> None:
        begun = time.monotonic()
        if self.exists(key):
            raise FileExistsError(f"{self.url}/{key} exists already")
        if self.is_conditional:
            self.create(key, data)
            return
        self.put(key, data)
        # A writer that has not found the object writes within about the time that `exists` and `put` take.
        time.sleep(_SETTLE_SECONDS + 2 * (time.monotonic() - begun))
        if self.get(key) != data:
            raise FileExistsError(f"{self.url}/{key} was created by another writer at the same time")

    def create(self, key: str, data: bytes) -> None:
        """One PUT with If-None-Match. If the store supports it and the key exists, FileExistsError."""
        path, writer = self._path(key), uuid.uuid4().hex

        def write(timeout: float) -> None:
            self._fs.pipe_file(path, data, mode="create", Metadata={"writer": writer}, timeout=timeout)

        try:
            self._call("write", key, write)
        except FileExistsError:
            # An earlier attempt of this writer may have arrived although its answer was lost (the HTTP client repeats
            # too).
            if self._head(key).get("Metadata", {}).get("writer") != writer:
                raise

    def get(self, key: str) -> bytes:
        path = self._path(key)
        data: bytes = self._call(
            "read", key, lambda timeout: self._fs.cat_file(path, max_concurrency=1, timeout=timeout)
        )
        return data

    def exists(self, key: str) -> bool:
        """One HEAD request, never from a cache. A prefix of other keys is not an object."""
        try:
            self._head(key)
        except MissingObject:
            return False
        return True

    def list(self, prefix: str) -> list[str]:
        top = join_key(self._root, check_prefix(prefix))
        try:
            found = self._call("list", prefix, lambda timeout: self._fs.find(f"{top}/", timeout=timeout))
        except MissingObject:
            return []
        return sorted(path.removeprefix(f"{self._root}/") for path in found if path.startswith(f"{top}/"))

    def delete(self, keys: Iterable[str]) -> None:
        """Remove objects one by one; missing objects are ignored."""
        for key in keys:
            try:
                self._call("delete", key, functools.partial(self._remove, self._path(key)))
            except MissingObject:
                continue

    def child(self, prefix: str) -> "S3Store":
        return S3Store(
            f"{self.url}/{check_key(prefix)}",
            retry_seconds=self._retry_seconds,
            attempt_seconds=self._attempt_seconds,
        )

    def limited(self, seconds: float) -> "S3Store":
        return S3Store(self.url, retry_seconds=seconds, attempt_seconds=seconds)

    def _head(self, key: str) -> dict[str, Any]:
        bucket, _, name = self._path(key).partition("/")
        head: dict[str, Any] = self._call(
            "look up", key, lambda timeout: self._fs.call_s3("head_object", Bucket=bucket, Key=name, timeout=timeout)
        )
        return head

    def _remove(self, path: str, timeout: float) -> None:
        self._fs.rm_file(path, timeout=timeout)

    def _path(self, key: str) -> str:
        return f"{self._root}/{check_key(key)}"

    def _call(self, verb: str, key: str, operation: Callable[[float], _Result]) -> _Result:
        """Repeat `operation(timeout)` until it succeeds, fails with a final error, or retry_seconds have passed."""
        deadline = time.monotonic() + self._retry_seconds
        pause_seconds = 0.1
        while True:
            try:
                return operation(self._attempt_seconds)
            except Exception as error:  # noqa: BLE001 - s3fs, botocore and aiohttp share no base class
                failure = error
            if _status(failure) == 412 or isinstance(failure, FileExistsError):
                raise FileExistsError(f"{self.url}/{key} exists already") from None
            if _error_code(failure) != "NoSuchBucket" and isinstance(failure, FileNotFoundError):
                raise MissingObject(f"no object {key!r} in {self.url}") from None
            if _is_final(failure) or time.monotonic() + pause_seconds > deadline:
                where = self._endpoint or "the AWS endpoint"
                reason = str(failure) or f"no answer within {self._attempt_seconds:g} s"
                raise StoreError(f"cannot {verb} {key!r} in {self.url} at {where}: {reason}") from failure
            time.sleep(pause_seconds * random.uniform(0.5, 1.0))
            pause_seconds = min(2 * pause_seconds, 5.0)


def _response(error: Exception) -> dict[str, Any]:
    """The S3 response of an error that s3fs has translated; empty if the error has no response."""
    response = getattr(error, "response", None) or getattr(error.__cause__, "response", None)
    return response if isinstance(response, dict) else {}


def _status(error: Exception) -> int | None:
    status = _response(error).get("ResponseMetadata", {}).get("HTTPStatusCode")
    return int(status) if status is not None else None


def _error_code(error: Exception) -> str | None:
    code = _response(error).get("Error", {}).get("Code")
    return str(code) if code is not None else None


def _is_final(error: Exception) -> bool:
    """Whether a repetition cannot help: the store refused the request, or the request could not be built."""
    status = _status(error)
    if status is not None:
        return status not in _TRANSIENT_STATUS and _error_code(error) not in _NO_ROOM_CODES
    if isinstance(error, (HTTPClientError, BotoConnectionError)):
        return False
    return isinstance(error, (BotoCoreError, TypeError, ValueError, PermissionError))
