"""Trainer side of weights.transport=nccl: versions go from memory to memory by broadcast, or through the store.

publish (by broadcast, or durable) --> commit --> announce --> deliver (broadcast; durable if the broadcast fails)
"""

import logging
import socket
from collections.abc import Mapping

from pipelinerl_core.config import RunConfig
from pipelinerl_core.errors import BroadcastError
from pipelinerl_core.interfaces import ObjectStore
from pipelinerl_core.ledger.groups import ActorKey
from pipelinerl_core.messages import ActorSample
from pipelinerl_core.roles.runtime.device import model_device
from pipelinerl_core.types import WeightManifest
from pipelinerl_core.weights.broadcast import WeightBroadcaster
from pipelinerl_core.weights.files import Snapshot
from pipelinerl_core.weights.publish import WeightPublisher

logger = logging.getLogger(__name__)


def joined_groups(actors: Mapping[str, ActorSample], *, silent_seconds: float) -> dict[str, int]:
    """Name of each active actor -> number of the broadcast group that the actor reports, 0 for none.

    actors: "<actor>/<epoch>" -> ActorSample, from a reservation. An actor is active if its sample is at most
    silent_seconds older than the newest sample; of several epochs the newest counts.
    """
    newest = max((sample.at for sample in actors.values()), default=0.0)
    newest_groups: dict[str, tuple[int, int]] = {}
    for key, sample in actors.items():
        actor = ActorKey.parse(key)
        if sample.at >= newest - silent_seconds and actor.epoch >= newest_groups.get(actor.name, (-1, 0))[0]:
            newest_groups[actor.name] = (actor.epoch, sample.counters.broadcast_group)
    return {name: group for name, (_, group) in newest_groups.items()}


class BroadcastPublisher:
    """Publishes versions by broadcast if every active actor can receive them, else as WeightPublisher does."""

    def __init__(self, store: ObjectStore, publisher: WeightPublisher, config: RunConfig, *, epoch: int) -> None:
        self._publisher = publisher
        self._silent_seconds = config.placement.lease_seconds
        self._broadcaster = WeightBroadcaster(
            store,
            epoch=epoch,
            workers_per_actor=config.engine.tensor_parallel * config.engine.data_parallel,
            host=config.weights.broadcast_host
            or ("127.0.0.1" if config.placement.kind == "local" else socket.gethostname()),
            deadline_seconds=config.weights.broadcast_seconds,
            on_gpu=model_device(config).type == "cuda",
        )
        self._newest: tuple[WeightManifest, Snapshot] | None = None

    def publish(
        self, version: int, snapshot: Snapshot, *, durable: bool, actors: Mapping[str, ActorSample]
    ) -> WeightManifest:
        """Publish a version; returns the manifest to commit and announce before `deliver`."""
        joined = joined_groups(actors, silent_seconds=self._silent_seconds)
        index = self._broadcaster.next_index if self._broadcaster.ensure_group(joined, snapshot.tensors) else 0
        manifest = self._publisher.publish(
            version, snapshot, durable=durable, group=self._broadcaster.number, broadcast_index=index
        )
        self._newest = manifest, snapshot
        return manifest

    def deliver(self) -> WeightManifest | None:
        """Broadcast the announced version. If the broadcast fails, returns a manifest to announce in its place."""
        if self._newest is None or not self._newest[0].is_broadcast:
            return None
        manifest, snapshot = self._newest
        try:
            self._broadcaster.send(snapshot.tensors)
        except BroadcastError as error:
            logger.warning("version %d goes through the store: %s", manifest.version, error)
            return self._store_newest()
        return None

    def store_if_unreachable(self, actors: Mapping[str, ActorSample]) -> WeightManifest | None:
        """If an active actor is not in the newest version's group, store the version; returns its new manifest."""
        manifest = None if self._newest is None else self._newest[0]
        if manifest is None or manifest.key is not None:
            return None
        joined = joined_groups(actors, silent_seconds=self._silent_seconds)
        if all(group == manifest.group for group in joined.values()):
            return None
        logger.info("version %d goes through the store for actors outside of its group", manifest.version)
        return self._store_newest()

    def close(self) -> None:
        self._broadcaster.close()

    def _store_newest(self) -> WeightManifest:
        assert self._newest is not None
        manifest, snapshot = self._newest
        manifest = self._publisher.publish(manifest.version, snapshot, durable=True, group=self._broadcaster.number)
        self._newest = manifest, snapshot
        return manifest
