"""Publish weight versions: weights, then manifest, in shared memory and, if durable, in the object store."""

import json
import logging
import socket
import time
from collections import deque
from dataclasses import asdict, replace

from pipelinerl_core.interfaces import ObjectStore
from pipelinerl_core.run.records import MANIFEST_FILE, delta_file, parse_step_key, weights_prefix
from pipelinerl_core.storage.digests import entry_of
from pipelinerl_core.types import FileEntry, WeightDelta, WeightManifest
from pipelinerl_core.weights.delta import encode_delta
from pipelinerl_core.weights.files import Snapshot
from pipelinerl_core.weights.memory import SHM_ROOT, PrivateMemory, Region, SharedFiles

logger = logging.getLogger(__name__)

# A larger difference is not worth the copy of the other version that readers keep.
_DELTA_SHARE = 0.5
# Files of so many versions are not written again: the newest one may not be announced yet.
_HELD_VERSIONS = 2


class WeightPublisher:
    """Publishes versions of one trainer epoch."""

    def __init__(
        self, store: ObjectStore, *, run_id: str, epoch: int, use_shm: bool, use_deltas: bool = False
    ) -> None:
        """use_deltas: a version that need not be durable is stored as its difference from an earlier version that is
        stored whole, if the difference is smaller."""
        self._store = store
        self._use_deltas = use_deltas
        self._whole: tuple[Snapshot, FileEntry] | None = None
        """With deltas: the newest version that was stored whole, and its file; the name is its key."""
        self._epoch = epoch
        self._shared = SharedFiles(run_id) if use_shm else None
        self._private = PrivateMemory()
        self._host = socket.gethostname()
        self._published: deque[Snapshot] = deque(maxlen=_HELD_VERSIONS)

    def memory(self, size: int) -> Region:
        """Memory for the next snapshot: in shared memory if it is used and has space."""
        if self._shared is not None:
            try:
                return self._shared.allocate(size)
            except OSError as error:
                logger.warning(
                    "%s cannot hold the weights (%s): they go through %s. Make it larger, e.g. by docker run "
                    "--shm-size; `pipelinerl doctor` says how large", SHM_ROOT, error.strerror, self._store.url,
                )  # fmt: skip
        return self._private.allocate(size)

    def publish(
        self,
        version: int,
        snapshot: Snapshot,
        *,
        durable: bool,
        again: bool = False,
        group: int = 0,
        broadcast_index: int = 0,
    ) -> WeightManifest:
        """Make a snapshot readable for actors; with durable, or if no actor can read its memory, in the store.

        again: a version that is committed is published again. It is stored whole, and no version is stored as a
        difference from it, because no commit names this copy, so that `gc` removes it.
        broadcast_index: as in the manifest; 0 if the version is not broadcast.
        """
        path = self._shared_path(version, snapshot.region)
        is_broadcast = broadcast_index > 0
        self._published.append(snapshot)
        prefix = weights_prefix(version, self._epoch)
        in_store = durable or (path is None and not is_broadcast)
        delta, data = (None, None) if durable or again or not in_store else self._delta(snapshot)
        manifest = WeightManifest(
            version=version,
            epoch=self._epoch,
            files=(snapshot.entry,),
            key=prefix if in_store else None,
            shm=path,
            host=self._host,
            published_at=time.time(),
            group=group,
            is_broadcast=is_broadcast,
            broadcast_index=broadcast_index,
            delta=delta,
        )
        if in_store:
            if delta is not None and data is not None:
                self._store.put(f"{prefix}/{delta.entry.name}", data)
            else:
                key = f"{prefix}/{snapshot.entry.name}"
                self._store.put(key, memoryview(snapshot.data))
                if self._use_deltas and not again:
                    self._whole = snapshot, replace(snapshot.entry, name=key)
            self._store.put(f"{prefix}/{MANIFEST_FILE}", json.dumps(asdict(manifest), indent=1).encode())
        return manifest

    def _delta(self, snapshot: Snapshot) -> tuple[WeightDelta | None, memoryview | None]:
        """The difference from the newest version that was stored whole; None if the whole version is better."""
        if self._whole is None:
            return None, None
        whole, base = self._whole
        data = encode_delta(whole.data, snapshot.data, int(_DELTA_SHARE * base.size))
        if data is None:
            return None, None
        return WeightDelta(entry=entry_of(delta_file(parse_step_key(base.name)[0]), data), base=base), data

    def _shared_path(self, version: int, region: Region) -> str | None:
        """The file of a version in shared memory; None if actors cannot read the memory of the snapshot."""
        if self._shared is None or region.file is None:
            return None
        try:
            region.publish(self._shared.path(version, self._epoch))
        except OSError as error:
            logger.warning("version %d is not in %s: %s", version, SHM_ROOT, error.strerror)
            return None
        return str(region.file.path)
