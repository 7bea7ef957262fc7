"""The actor's process: build engine, scorer, segments and channel, and run the loop (roles/actor/loop.py)."""

import asyncio
import sys
import threading
import time
from collections.abc import Callable

from pipelinerl_core.config.mixture import naming
from pipelinerl_core.data.segments import SegmentWriter
from pipelinerl_core.errors import ConfigError, EnvironmentFailed, EnvironmentNotStarted
from pipelinerl_core.host import own_cores
from pipelinerl_core.interfaces import BroadcastReceiver, Engine, ObjectStore
from pipelinerl_core.messages import Register
from pipelinerl_core.roles.actor.broadcast_subscriber import BroadcastSubscriber
from pipelinerl_core.roles.actor.evaluating import ActorEvaluation
from pipelinerl_core.roles.actor.loop import Actor, ActorParts
from pipelinerl_core.roles.runtime.gpu_turns import ActorTurns
from pipelinerl_core.roles.runtime.hub_link import HubLink
from pipelinerl_core.roles.runtime.inference import base_weights, open_engine
from pipelinerl_core.roles.runtime.monitor import RoleMonitor
from pipelinerl_core.roles.runtime.process import (
    RoleProcess,
    freeze_startup_objects,
    keep_freed_memory,
    keep_to_cores,
    run_role,
)
from pipelinerl_core.roles.runtime.task import Task, build_task
from pipelinerl_core.roles.runtime.token_digests import token_digests
from pipelinerl_core.run.context import RunContext
from pipelinerl_core.run.history import is_complete
from pipelinerl_core.run.reading import list_keys
from pipelinerl_core.run.records import LIVES_PREFIX, life_key
from pipelinerl_core.run.user_code import stored_code
from pipelinerl_core.weights.subscribe import WeightSubscriber


def take_life(store: ObjectStore, name: str) -> int:
    """Create the object of a new life of an actor, and return the epoch of the life.

    The epoch is the Unix time, or the largest epoch of the actor + 1: the clock may have been set back, or may be
    ahead on the host of an earlier life. No two lives share an epoch, although two processes start at the same time.
    The hub fences an actor whose epoch is not the newest.
    """
    epochs = [int(key.rpartition("/")[2]) for key in list_keys(store, f"{LIVES_PREFIX}/{name}")]
    epoch = max(int(time.time()), *(epoch + 1 for epoch in epochs), 0)
    while True:
        try:
            store.put(life_key(name, epoch), b"", create_only=True)
        except FileExistsError:
            epoch += 1
            continue
        return epoch


async def run_actor(context: RunContext, name: str, stop: threading.Event, monitor: RoleMonitor) -> None:
    """Build the parts of an actor and run it."""
    epoch = take_life(context.store, name)
    # Before the engine, which takes minutes to load: may raise ConfigError.
    tasks = {part: await _open_task(context, part, monitor) for part in context.config.parts}
    turns = ActorTurns(context, monitor.heartbeat) if context.config.gpu_turns else None
    if turns is not None:
        await turns.take()
    engine = await open_engine(context.config, run_id=context.run_id, name=name, epoch=epoch)
    segments = SegmentWriter(
        context.store,
        actor=name,
        epoch=epoch,
        run_id=context.run_id,
        max_seconds=context.config.store.segment_seconds,
        max_bytes=context.config.store.segment_bytes,
    )
    is_evaluated = context.config.eval_steps > 0 and context.config.evaluates_on_actors
    evaluation = ActorEvaluation(context, engine) if is_evaluated else None
    parts = ActorParts(
        engine=engine,
        players={part: task.player(engine) for part, task in tasks.items()},
        subscriber=WeightSubscriber(context.store, base_weights(context.config)),
        segments=segments,
        store=context.store,
        broadcasts=_broadcast_subscriber(context, engine, name),
        evaluation=evaluation,
        turns=turns,
    )

    def link(registration: Callable[[], Register]) -> HubLink:
        return HubLink(
            context.store, token=context.token, role="actor", name=name, registration=registration,
            is_over=lambda: is_complete(context.store, context.config.trainer.steps),
        )  # fmt: skip

    freeze_startup_objects()
    try:
        actor = Actor(
            context.config,
            parts,
            run_id=context.run_id,
            name=name,
            epoch=epoch,
            link=link,
            monitor=monitor,
            tokens=token_digests(context.config),
        )
        await actor.run(stop)
    finally:
        if evaluation is not None:
            await evaluation.close()
        for task in tasks.values():
            await task.close()
        await engine.close()
        if turns is not None:
            turns.close()


async def _open_task(context: RunContext, part: str, monitor: RoleMonitor) -> Task:
    """The task of a part; its environments are loaded. Raises ConfigError, and EnvironmentNotStarted, after which
    another start may succeed."""

    def count_lost(cause: str) -> None:
        monitor.metrics.add("actor_lost_scorings_total", label=cause)

    with naming(part):
        task = build_task(context.config.parts[part], stored_code(context, part), count_lost)
        if task.environments is not None:
            try:
                await task.environments.check()
            except EnvironmentFailed as error:
                await task.close()
                raise error if isinstance(error, EnvironmentNotStarted) else ConfigError(str(error)) from None
        return task


def _broadcast_subscriber(context: RunContext, engine: Engine, name: str) -> BroadcastSubscriber | None:
    if not context.config.weights.is_broadcast:
        return None
    assert isinstance(engine, BroadcastReceiver)  # the configuration allows no other engine
    return BroadcastSubscriber(engine, context.store, name=name)


def _act(own: RoleProcess) -> None:
    name = own.arguments.name
    keep_to_cores(own_cores(own.context.config, name))
    keep_freed_memory()
    asyncio.run(run_actor(own.context, name, own.stop, own.monitor))


def main() -> int:
    """Command line of the role."""
    return run_role("actor", "An actor of a run.", _act, {"--name": {"default": "actor-0"}}, name="{name}")


if __name__ == "__main__":
    sys.exit(main())
