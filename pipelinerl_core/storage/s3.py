"""An object store on Amazon S3 or on a server with the S3 protocol, through s3fs.

Nothing is cached, every request has a time limit, and requests with transient failures are repeated with growing
pauses. Large objects are written and read in parts. Time limits and repetitions hold for one part: an object of any
size has the time that it needs, and a failure costs one part.
"""

import functools
import logging
import math
import os
import uuid
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from http import HTTPStatus
from typing import Any, TypeVar

import fsspec
from fsspec.asyn import sync

from pipelinerl_core.errors import ConfigError, MissingObject, StoreError, StoreUnavailable
from pipelinerl_core.storage.exclusive import create_exclusively
from pipelinerl_core.storage.failures import RETRY_SECONDS, NotS3, repeated, status_of
from pipelinerl_core.storage.keys import check_key, check_prefix, is_visible, join_key

logger = logging.getLogger(__name__)

ENDPOINT_VARIABLES = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "FSSPEC_S3_ENDPOINT_URL")

ATTEMPT_SECONDS = 300.0
"""Time limit of one request, of at most PART_BYTES."""
PART_BYTES = 32 << 20
"""Larger objects are written and read in parts of this size."""
MAX_PARTS = 10_000
"""S3's limit; larger objects have larger parts."""
PARALLEL_PARTS = 4
PARALLEL_DELETES = 8
ABANDONED_SECONDS = 3600.0
"""A multipart upload that got no part for this long has no writer: a live writer fails earlier."""
CONNECT_SECONDS = 5
STALL_SECONDS = 15
"""Longest time without data within one request."""
_UPLOAD = "?uploadId="

_OUT_OF_RANGE = 416
R = TypeVar("R")


class S3Store:
    """Objects under s3://bucket/prefix. Credentials and endpoint come from the standard AWS_* variables or files."""

    def __init__(
        self,
        url: str,
        *,
        retry_seconds: float = RETRY_SECONDS,
        attempt_seconds: float = ATTEMPT_SECONDS,
        total_seconds: float = math.inf,
        client: Any = None,
    ) -> None:
        """total_seconds: no repetition begins later than this after the begin of a request. client: of another store;
        a client takes 0.2 s and 15 MB."""
        self._root = url.removeprefix("s3://").strip("/")
        if not self._root.partition("/")[0]:
            raise ConfigError(f"{url!r} names no bucket; write s3://bucket/prefix")
        self.url = f"s3://{self._root}"
        self._retry_seconds = retry_seconds
        self._attempt_seconds = attempt_seconds
        self._total_seconds = total_seconds
        self._endpoint = next((os.environ[name] for name in ENDPOINT_VARIABLES if os.environ.get(name)), None)
        if self._endpoint and not self._endpoint.startswith(("http://", "https://")):
            raise ConfigError(f"the endpoint of S3 is {self._endpoint!r}: write http://HOST:PORT or https://HOST")
        self._fs: Any = client or self._open_client()

    def _open_client(self) -> Any:
        files: Any = fsspec.filesystem(
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
        files.retries = 1
        return files

    def put(self, key: str, data: bytes | memoryview, *, create_only: bool = False) -> None:
        """Write a whole object; readers see the old or the new object.

        create_only uses If-None-Match if the store supports it (`is_conditional`), otherwise `create_exclusively`.
        """
        if create_only and not self.is_conditional:
            create_exclusively(self, key, bytes(data))
            return
        if create_only:
            if self.exists(key):
                raise FileExistsError(f"{self.url}/{key} exists already")
            self.create(key, bytes(data))
            return
        if len(data) > PART_BYTES:
            self._put_parts(key, memoryview(data).cast("B"))
            return
        self._request("write", key, "put_object", **self._target(key), Body=bytes(data), expects="ETag")

    def _put_parts(self, key: str, data: memoryview) -> None:
        """Write a large object as a multipart upload, which is ended after a failure: its parts take space."""
        target, writer = self._target(key), uuid.uuid4().hex
        metadata = {"writer": writer}
        created = self._request(
            "write", key, "create_multipart_upload", **target, Metadata=metadata, expects="UploadId"
        )
        upload = {**target, "UploadId": created["UploadId"]}
        size = max(PART_BYTES, -(-len(data) // MAX_PARTS))

        def put(number: int) -> dict[str, Any]:
            body = bytes(data[(number - 1) * size : number * size])
            verb = f"write part {number} of"
            answer = self._request(verb, key, "upload_part", **upload, PartNumber=number, Body=body, expects="ETag")
            return {"PartNumber": number, "ETag": answer["ETag"]}

        threads = ThreadPoolExecutor(PARALLEL_PARTS, thread_name_prefix="s3-parts")
        try:
            try:
                parts = list(threads.map(put, range(1, -(-len(data) // size) + 1)))
            finally:
                threads.shutdown(cancel_futures=True)
            self._complete(key, upload, parts, writer)
        except BaseException:
            self._end_upload(upload)
            raise

    def _complete(self, key: str, upload: dict[str, str], parts: list[dict[str, Any]], writer: str) -> None:
        try:
            made = {"Parts": parts}
            self._request("write", key, "complete_multipart_upload", **upload, MultipartUpload=made, expects="ETag")
        except MissingObject:
            # The store has no such upload: an earlier attempt may have completed it, and the answer was lost.
            if not self.exists(key) or self._head(key).get("Metadata", {}).get("writer") != writer:
                raise StoreError(f"cannot write {key!r} in {self.url}: the store has no such upload") from None

    def _end_upload(self, upload: dict[str, str]) -> None:
        """Remove the parts of an upload. If the store does not answer, `unfinished` finds the upload later."""
        try:
            self._fs.call_s3("abort_multipart_upload", **upload, timeout=STALL_SECONDS)
        except Exception as error:  # noqa: BLE001 - the caller raises the error of the write
            logger.debug("the upload of %s was not ended: %s", upload["Key"], error)

    @functools.cached_property
    def is_conditional(self) -> bool:
        """Whether the store supports If-None-Match, tested by two writes of a small object. Raises StoreError.

        All processes of a run must find the same: during an outage of the store, no process may guess.
        """
        key = f"check-{uuid.uuid4().hex}"
        try:
            self.create(key, b"first")
            self.create(key, b"second")
        except FileExistsError:
            return True
        except StoreError as error:
            if isinstance(error, StoreUnavailable):
                raise
            return False  # a store may also refuse requests with If-None-Match
        finally:
            self.delete([key])
        return False

    def create(self, key: str, data: bytes) -> None:
        """One PUT with If-None-Match. If the store supports it and the key exists, FileExistsError."""
        writer = uuid.uuid4().hex
        options = {"IfNoneMatch": "*", "Metadata": {"writer": writer}}
        try:
            self._request("write", key, "put_object", **self._target(key), Body=data, **options, expects="ETag")
        except FileExistsError:
            # An earlier attempt of this writer may have arrived although its answer was lost (the HTTP client repeats
            # too).
            if self._head(key).get("Metadata", {}).get("writer") != writer:
                raise

    def get(self, key: str) -> bytes:
        """The whole object; a large one in parts, several at once: one stream does not fill a network."""

        def read(start: int) -> tuple[bytes, int]:
            return self._call("read", key, functools.partial(self._read, self._target(key), start))

        first, size = read(0)
        if len(first) == size:
            return first
        threads = ThreadPoolExecutor(PARALLEL_PARTS, thread_name_prefix="s3-get")
        try:
            parts = threads.map(read, range(PART_BYTES, size, PART_BYTES))
            data = b"".join([first, *(part for part, _ in parts)])
        finally:
            threads.shutdown(cancel_futures=True)
        if len(data) != size:
            raise StoreUnavailable(f"cannot read {key!r} in {self.url}: {len(data)} of {size} bytes arrived")
        return data

    def _read(self, target: dict[str, str], start: int, timeout: float) -> tuple[bytes, int]:
        """Up to PART_BYTES from `start`, and the size of the object; no bytes at or after its end."""

        async def ask() -> tuple[bytes, int]:
            answer = await self._fs._call_s3("get_object", **target, Range=f"bytes={start}-{start + PART_BYTES - 1}")
            async with answer["Body"] as body:
                data: bytes = await body.read()
            is_part = answer.get("ResponseMetadata", {}).get("HTTPStatusCode") == HTTPStatus.PARTIAL_CONTENT
            _check_from_s3("get_object", answer, "ContentRange" if is_part else "ETag")
            return data, int(answer.get("ContentRange", "").rpartition("/")[2] or len(data))

        try:
            read: tuple[bytes, int] = sync(self._fs.loop, ask, timeout=timeout)
        except Exception as error:
            if status_of(error) == _OUT_OF_RANGE:
                return b"", start
            raise
        return read

    def exists(self, key: str) -> bool:
        """One listing, which only an S3 server answers; a HEAD has no body that tells S3's 404 from a proxy's."""
        target = self._target(key)["Key"]
        pages = self._pages(key, target, Delimiter="/")
        return any(entry["Key"] == target for page in pages for entry in page.get("Contents", ()))

    def written_at(self, key: str) -> float:
        target = self._target(key)["Key"]
        entries = (entry for page in self._pages(key, target, Delimiter="/") for entry in page.get("Contents", ()))
        return next((entry["LastModified"].timestamp() for entry in entries if entry["Key"] == target), 0.0)

    def children(self) -> list[str]:
        pages = self._pages("", self._prefix(""), Delimiter="/")
        paths = [entry["Prefix"].rstrip("/") for page in pages for entry in page.get("CommonPrefixes", ())]
        return sorted(filter(is_visible, (path.rpartition("/")[2] for path in paths)))

    def list(self, prefix: str) -> list[str]:
        return [*self.sizes(prefix)]

    def sizes(self, prefix: str) -> dict[str, int]:
        pages = self._pages(prefix, self._prefix(prefix))
        start = len(self._prefix(""))
        sizes = {entry["Key"][start:]: int(entry["Size"]) for page in pages for entry in page.get("Contents", ())}
        return {key: sizes[key] for key in sorted(filter(is_visible, sizes))}

    def _prefix(self, prefix: str) -> str:
        """The prefix of keys below `prefix` within the bucket."""
        inner = join_key(self._root, check_prefix(prefix)).partition("/")[2]
        return f"{inner}/" if inner else ""

    def _pages(self, key: str, prefix: str, **options: Any) -> Iterator[dict[str, Any]]:
        """The pages of a listing. Every S3 server says whether a page is the last one; nothing else is a listing."""
        options |= {"Bucket": self._root.partition("/")[0], "Prefix": prefix}
        while True:
            page = self._request("list", key, "list_objects_v2", **options, expects="IsTruncated")
            yield page
            if not page["IsTruncated"]:
                return
            if "NextContinuationToken" not in page:
                raise StoreUnavailable(
                    f"cannot list {key!r} in {self.url}: a page names no next page and is not the last"
                )
            options["ContinuationToken"] = page["NextContinuationToken"]

    def delete(self, keys: Iterable[str]) -> None:
        keys = list(keys)
        if len(keys) < 2:
            for key in keys:
                self._delete(key)
            return
        threads = ThreadPoolExecutor(PARALLEL_DELETES, "s3-delete")  # not all servers delete several per request
        try:
            for _ in threads.map(self._delete, keys):
                pass
        except RuntimeError:  # the interpreter ends, and begins no thread any more
            for key in keys:
                self._delete(key)
        finally:
            threads.shutdown(cancel_futures=True)

    def _delete(self, key: str) -> None:
        with suppress(MissingObject):
            self._request("delete", key, "delete_object", **self._target(key))

    def unfinished(self) -> dict[str, int]:
        """Multipart uploads of killed writers, as "<key>?uploadId=<id>". Their parts take space.

        Ages are differences between times of the store. A store that cannot list uploads has none.
        """
        try:
            return dict(self._abandoned_uploads())
        except StoreError as error:
            logger.warning("unfinished multipart uploads cannot be listed: %s", error)
            return {}

    def _abandoned_uploads(self) -> Iterator[tuple[str, int]]:
        bucket, _, prefix = self._root.partition("/")
        marker: dict[str, str] = {}
        while True:
            page = self._request(
                "list uploads of", prefix, "list_multipart_uploads",
                Bucket=bucket, Prefix=f"{prefix}/" if prefix else "", **marker,
            )  # fmt: skip
            for upload in page.get("Uploads", ()):
                target = {"Bucket": bucket, "Key": upload["Key"], "UploadId": upload["UploadId"]}
                parts = [*self._parts(target)]
                newest = max([upload["Initiated"], *(part["LastModified"] for part in parts)])
                if (_time_of(page) - newest).total_seconds() > ABANDONED_SECONDS:
                    key = f"{bucket}/{upload['Key']}".removeprefix(f"{self._root}/")
                    yield f"{key}{_UPLOAD}{upload['UploadId']}", sum(part.get("Size", 0) for part in parts)
            if not page.get("IsTruncated"):
                return
            marker = {"KeyMarker": page["NextKeyMarker"], "UploadIdMarker": page["NextUploadIdMarker"]}

    def _parts(self, target: dict[str, str]) -> Iterator[dict[str, Any]]:
        """All parts of an upload; a page has up to 1000."""
        marker: dict[str, Any] = {}
        while True:
            page = self._request("list parts of", target["Key"], "list_parts", **target, **marker)
            yield from page.get("Parts", ())
            if not page.get("IsTruncated"):
                return
            marker = {"PartNumberMarker": page["NextPartNumberMarker"]}

    def discard(self, names: Iterable[str]) -> None:
        """End the uploads that `unfinished` returned."""
        for name in names:
            key, _, upload_id = name.rpartition(_UPLOAD)
            with suppress(MissingObject):
                target = self._target(key)
                self._request("end an upload of", key, "abort_multipart_upload", **target, UploadId=upload_id)

    def child(self, prefix: str) -> "S3Store":
        return S3Store(
            f"{self.url}/{check_key(prefix)}",
            retry_seconds=self._retry_seconds,
            attempt_seconds=self._attempt_seconds,
            total_seconds=self._total_seconds,
            client=self._fs,
        )

    def limited(self, seconds: float) -> "S3Store":
        return S3Store(self.url, attempt_seconds=seconds, total_seconds=seconds, client=self._fs)

    def _head(self, key: str) -> dict[str, Any]:
        return self._request("look up", key, "head_object", **self._target(key), expects="ContentLength")

    def _request(self, verb: str, key: str, method: str, *, expects: str = "", **arguments: Any) -> dict[str, Any]:
        """The answer to one request of the S3 API; repeated during an outage.

        expects: a field that the answer of every S3 server has; an answer without the field is a proxy's.
        """

        def ask(timeout: float) -> dict[str, Any]:
            answer: dict[str, Any] = self._fs.call_s3(method, **arguments, timeout=timeout)
            _check_from_s3(method, answer, expects)
            return answer

        return self._call(verb, key, ask)

    def _target(self, key: str) -> dict[str, str]:
        bucket, _, name = self._path(key).partition("/")
        return {"Bucket": bucket, "Key": name}

    def _path(self, key: str) -> str:
        return f"{self._root}/{check_key(key)}"

    def _call(self, verb: str, key: str, operation: Callable[[float], R]) -> R:
        where = f"{self.url} at {self._endpoint or 'the AWS endpoint'}"
        silence = f"no answer within {self._attempt_seconds:g} s"
        return repeated(
            functools.partial(operation, self._attempt_seconds), verb, key, where,
            retry_seconds=self._retry_seconds, total_seconds=self._total_seconds, silence=silence,
        )  # fmt: skip


def _check_from_s3(method: str, answer: dict[str, Any], expects: str) -> None:
    """Raise NotS3 for an answer with status 200 that a proxy has sent."""
    kind = answer.get("ResponseMetadata", {}).get("HTTPHeaders", {}).get("content-type", "")
    if expects and expects not in answer:
        raise NotS3(f"the answer is not one of S3 ({method} without {expects}); a proxy may have sent it")
    if method == "delete_object" and "html" in kind:
        raise NotS3(f"the answer to {method} is a web page; a proxy may have sent it")


def _time_of(answer: dict[str, Any]) -> datetime:
    """The time of the store at an answer."""
    date = answer.get("ResponseMetadata", {}).get("HTTPHeaders", {}).get("date")
    return parsedate_to_datetime(date) if date else datetime.now(UTC)
