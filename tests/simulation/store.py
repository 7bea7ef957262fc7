"""A simulated object store, which all hosts share. Its answers may be late, or wrong as docs/storage.md permits."""

import builtins
from collections.abc import Callable, Iterable

from greenlet import GreenletExit

from pipelinerl_core.errors import MissingObject, StoreUnavailable
from pipelinerl_core.run.records import parse_commit_key
from tests.simulation.world import Process, World


class Disk:
    """The objects; they outlive every process."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.objects: dict[str, bytes] = {}
        self.fails_until = 0.0
        self.fails: set[str] = set()
        """Kinds of requests that fail until then, before or after they had their effect."""
        self.fail_share = 1.0
        """Share of these requests that fail."""
        self.slow_until = 0.0
        """Until this time a request takes up to a second."""
        self.full_until = 0.0
        """Until this time no object can be written."""
        self.damaged: set[str] = set()
        """Objects that a fault has damaged."""
        self.backup: dict[str, bytes] = {}
        """Objects before their damage; copied back before the audit."""
        self.removed: dict[str, bytes] = {}
        """Segments that were deleted."""
        self.written: dict[str, int] = {}
        """Key -> number of the request that wrote the object."""
        self.segments_read: dict[str, int] = {}
        """Compacted object -> number of the request with which its writer listed the segments."""
        self.on_commit: Callable[[int], None] = lambda step: None
        """Called when a commit of a step is written."""
        self.collects_segments = False
        """`gc --rollouts` may have removed segments whose groups are all decided, without a compacted object."""
        self.collects_undecided = False
        """`gc --rollouts` of a finished run may have removed all segments."""
        self.num_requests = 0
        self.late_until = 0.0
        """Until this time some objects arrive after their writer has given up, or has ended."""


class SimulatedStore:
    """The store of a run as one process sees it."""

    def __init__(self, disk: Disk, process: Process, url: str = "s3://bucket/run") -> None:
        self.url = url
        self.disk, self._process = disk, process
        self._listings = [0, 0]
        """Numbers of the newest two listings of segments: a compaction lists them twice."""

    def put(self, key: str, data: bytes | memoryview, *, create_only: bool = False) -> None:
        self._begin("put", key)
        own = self.disk.world
        if own.now < self.disk.full_until:
            raise StoreUnavailable(f"{self.url}/{key}: no space")
        if own.now < self.disk.late_until and own.rng.random() < 0.2:
            self._put_late(key, bytes(data), create_only=create_only)
        if create_only and key in self.disk.objects:
            self._answer("put")
            raise FileExistsError(f"{self.url}/{key} exists already")
        self._arrives(key, bytes(data), self._listings[0])
        self._changed()
        self._answer("put")

    def _arrives(self, key: str, data: bytes, listing: int) -> None:
        """listing: number of the writer's request that listed the segments."""
        self.disk.objects[key] = data
        self.disk.written[key] = self.disk.num_requests
        if key.startswith("compacted/rollouts/"):
            self.disk.segments_read[key] = listing
        if key.startswith("commits/"):
            self.disk.on_commit(parse_commit_key(key)[0])

    def _put_late(self, key: str, data: bytes, *, create_only: bool) -> None:
        own, listing = self.disk.world, self._listings[0]

        def arrive() -> None:
            if not (create_only and key in self.disk.objects):
                self._arrives(key, data, listing)

        own.at(own.now + own.rng.choice([0.1, 1.0, 5.0, 20.0]) * own.rng.random(), arrive)
        if own.rng.random() < 0.5 and self._process.name != "accept-loss":  # a user would repeat the command
            self._process.kill()
            raise GreenletExit
        raise StoreUnavailable(f"{self.url}: put: timed out")

    def get(self, key: str) -> bytes:
        self._begin("get", key)
        data = self.disk.objects.get(key)
        self._answer("get")
        if data is None:
            raise MissingObject(f"no object {key!r} in {self.url}")
        return data

    def exists(self, key: str) -> bool:
        self._begin("exists", key)
        is_there = key in self.disk.objects
        self._answer("exists")
        return is_there

    def children(self) -> list[str]:
        return sorted({first for first, separator, _ in (key.partition("/") for key in self.list("")) if separator})

    def list(self, prefix: str) -> list[str]:
        self._begin("list", prefix)
        if prefix == "rollouts":
            self._listings = [self._listings[1], self.disk.num_requests]
        top = f"{prefix}/" if prefix else ""
        keys = self._listed(top)
        if self._process.lacking is not None:
            skipped, share = self._process.lacking
            self._process.lacking = (skipped - 1, share) if skipped else None
            keys = keys if skipped else keys[: int(len(keys) * share)]
        self._answer("list")
        return keys

    def _listed(self, top: str) -> builtins.list[str]:
        """The keys, not all as of the same moment."""
        before = {key for key in self.disk.objects if key.startswith(top)}
        self.disk.world.sleep(0.02 * self.disk.world.rng.random())
        after = {key for key in self.disk.objects if key.startswith(top)}
        changed = sorted(before ^ after)
        return sorted([*(before & after), *(key for key in changed if self.disk.world.rng.random() < 0.5)])

    def delete(self, keys: Iterable[str]) -> None:
        """In any order; a failure or a kill leaves the other objects."""
        self._begin("delete")
        for key in self.disk.world.rng.sample(chosen := list(keys), len(chosen)):
            data = self.disk.objects.pop(key, None)
            if data is not None and key.startswith("rollouts/"):
                self.disk.removed[key] = data
            self._changed()
            self._may_fail("delete", "not all objects are deleted")
        self._answer("delete")

    def unfinished(self) -> dict[str, int]:
        return {}

    def discard(self, names: Iterable[str]) -> None: ...

    def child(self, prefix: str) -> "SimulatedStore":
        raise NotImplementedError

    def limited(self, seconds: float) -> "SimulatedStore":
        return self

    def _begin(self, kind: str, key: str = "") -> None:
        """The request is on its way."""
        disk, own = self.disk, self.disk.world
        disk.num_requests += 1
        own.sleep(own.rng.random() * (1.0 if own.now < disk.slow_until else 0.004))
        if self._process.stall is not None and key.startswith(self._process.stall[2]):
            left, seconds, prefix = self._process.stall
            self._process.stall = (left - 1, seconds, prefix) if left else None
            own.sleep(0.0 if left else seconds)
        self._may_fail(kind, "503")

    def _answer(self, kind: str) -> None:
        """The answer is on its way; it may be lost after the request had its effect."""
        own = self.disk.world
        own.sleep(own.rng.random() * 0.002)
        self._may_fail(kind, "timed out")

    def _changed(self) -> None:
        """An object was written or deleted."""
        own = self._process
        if own.changes_left is not None:
            own.changes_left -= 1
            if own.changes_left < 0:
                own.kill()
                raise GreenletExit

    def _may_fail(self, kind: str, reason: str) -> None:
        disk, own = self.disk, self.disk.world
        if own.now < self._process.store_fails_until:
            raise StoreUnavailable(f"{self.url}: {kind}: {reason}")
        if own.now < disk.fails_until and kind in disk.fails and own.rng.random() < disk.fail_share:
            raise StoreUnavailable(f"{self.url}: {kind}: {reason}")


class PlainStore(SimulatedStore):
    """The store for an audit, outside of the simulated time."""

    def __init__(self, disk: Disk) -> None:
        world = disk.world
        super().__init__(disk, Process(world, "audit", "host", 0))

    def _listed(self, top: str) -> builtins.list[str]:
        return sorted(key for key in self.disk.objects if key.startswith(top))

    def _begin(self, kind: str, key: str = "") -> None: ...

    def _answer(self, kind: str) -> None: ...
