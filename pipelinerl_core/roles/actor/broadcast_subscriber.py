"""Actor side of weights.transport=nccl: join the broadcast group of a manifest, receive versions."""

import asyncio
import logging

from pipelinerl_core.errors import EngineError, MissingObject, StoreError
from pipelinerl_core.interfaces import BroadcastReceiver, ObjectStore, WeightUpdate
from pipelinerl_core.types import WeightManifest
from pipelinerl_core.weights.broadcast import read_group

logger = logging.getLogger(__name__)


class BroadcastSubscriber:
    """Joins broadcast groups for the engine of one actor."""

    def __init__(self, receiver: BroadcastReceiver, store: ObjectStore, *, name: str) -> None:
        self._receiver = receiver
        self._store = store
        self._name = name
        self._tried = 0
        self._joining: asyncio.Task[None] | None = None

    @property
    def group(self) -> int:
        return self._receiver.group

    def should_swap(self, manifest: WeightManifest, version: int) -> bool:
        """Whether the engine, at `version`, needs the manifest's version and can read it by broadcast or from files.

        The engine needs a newer version, or the same version if it has lost its weights (`needs_weights`).
        """
        is_newer = manifest.version > version or (self._receiver.needs_weights and manifest.version == version)
        is_received = manifest.is_broadcast and manifest.group == self._receiver.group
        return is_newer and (is_received or not manifest.is_broadcast or manifest.key is not None)

    def join(self, manifest: WeightManifest) -> None:
        """Join the group that a manifest names, in the background; each group is tried once."""
        if manifest.group not in (0, self._tried) and (self._joining is None or self._joining.done()):
            self._tried = manifest.group
            self._joining = asyncio.create_task(self._join(manifest.group), name="join-group")

    def update(self, manifest: WeightManifest) -> WeightUpdate | None:
        """The update that receives a version by broadcast; None if the version must be fetched instead."""
        if not manifest.is_broadcast or manifest.group != self._receiver.group:
            return None
        return WeightUpdate(
            version=manifest.version,
            tensors={},
            num_bytes=manifest.num_bytes,
            group=manifest.group,
            broadcast_index=manifest.broadcast_index,
        )

    async def close(self) -> None:
        """Cancel a join that is in progress."""
        if self._joining is not None:
            self._joining.cancel()
            await asyncio.gather(self._joining, return_exceptions=True)

    async def _join(self, number: int) -> None:
        try:
            group = await asyncio.to_thread(read_group, self._store, number)
            if self._name in group.first_ranks:
                await self._receiver.join(group, group.first_ranks[self._name])
                logger.info("joining broadcast group %d", number)
        except (EngineError, MissingObject) as error:
            logger.warning("broadcast group %d not joined: %s", number, error)
        except StoreError as error:
            logger.warning("broadcast group %d not joined, the next call tries again: %s", number, error)
            self._tried = 0
