"""The ranks of a trainer on one more host: they join every start of rank 0, which is on another.

rank 0 --meetings/<epoch>.json--> this role --starts--> its ranks --> torch's process group
"""

import logging
import sys
import threading
import time

from pipelinerl_core.config.cores import own_cores
from pipelinerl_core.interfaces import ObjectStore
from pipelinerl_core.roles.runtime.hub_link import HUB_DEADLINE_SECONDS
from pipelinerl_core.roles.runtime.monitor import RoleMonitor
from pipelinerl_core.roles.runtime.process import RoleProcess, keep_to_cores, run_role
from pipelinerl_core.roles.trainer.rank_processes import RANK_STOP_SECONDS, RankProcesses
from pipelinerl_core.roles.trainer.rendezvous import newest_meeting
from pipelinerl_core.run.context import RunContext
from pipelinerl_core.run.drain import wants_drain
from pipelinerl_core.run.history import is_complete
from pipelinerl_core.run.hub_status import read_hub
from pipelinerl_core.run.records import RendezvousRecord

logger = logging.getLogger(__name__)

_LOOK_SECONDS = 1.0


def run_node(context: RunContext, node: int, stop: threading.Event, monitor: RoleMonitor) -> None:
    """Until rank 0 has let go of this node and the run is over, or `stop`: its ranks for the trainer's newest start.

    A run that drains ends when rank 0 says so: it may see the wish later than others, and without these ranks it
    could not take its last step. One that fails is started again and needs them. One that let them go while the run
    was not over comes back, whatever is wished meanwhile. Without a hub for so long that every role would have given
    it up, nobody comes any more.
    """
    joined = 0
    hub = _HubWatch(context.store)
    monitor.ready_unless(lambda: "")
    while not stop.is_set():
        meeting = newest_meeting(context.store)
        if meeting is not None and meeting.epoch > joined:
            joined = meeting.epoch
            if take_part(context, meeting, node, stop, monitor) and _is_over(context):
                return
            continue
        if hub.silent_seconds() > HUB_DEADLINE_SECONDS and _is_over(context):
            logger.info("the run is over and has no hub any more: rank 0 is not waited for")
            return
        monitor.beat("waiting for rank 0")
        stop.wait(_LOOK_SECONDS)


class _HubWatch:
    """For how long the hub has not rewritten hub.json, by this process's clock."""

    def __init__(self, store: ObjectStore) -> None:
        self._store = store
        self._beat: float | None = None
        self._since = time.monotonic()

    def silent_seconds(self) -> float:
        """Counts from the last call that has found a new beat."""
        hub = read_hub(self._store)
        now = time.monotonic()
        if hub is not None and hub.beat != self._beat:
            self._beat, self._since = hub.beat, now
        return now - self._since


def take_part(
    context: RunContext, meeting: RendezvousRecord, node: int, stop: threading.Event, monitor: RoleMonitor
) -> bool:
    """The ranks of this node in one start of the trainer; returns when they have ended or a newer start is there.

    True when rank 0 told all of them to end, which it does after its last commit. After `stop` they have a few
    seconds for it: rank 0 may be asked to stop at the same time, in the middle of a step.
    """
    first = node * meeting.per_node
    ranks = range(first, first + meeting.per_node)
    logger.info("ranks %d to %d join rank 0 at %s", first, ranks[-1], meeting.where)
    processes = RankProcesses(context.store.url)
    processes.start(
        ranks, where=meeting.where, size=meeting.size, per_node=meeting.per_node, device=meeting.device,
        seconds=meeting.seconds,
    )  # fmt: skip
    try:
        while not stop.wait(_LOOK_SECONDS) and not processes.have_ended():
            monitor.beat(f"training with rank 0 of epoch {meeting.epoch}")
            newest = newest_meeting(context.store)
            if processes.name_the_dead() is not None or (newest is not None and newest.epoch > meeting.epoch):
                break
        if stop.is_set() and processes.name_the_dead() is None:
            processes.await_end(RANK_STOP_SECONDS)
        return processes.have_ended() and processes.name_the_dead() is None
    finally:
        processes.name_the_dead()
        processes.stop(0.0)


def _is_over(context: RunContext) -> bool:
    return is_complete(context.store, context.config.trainer.steps) or wants_drain(context.store)


def _join(own: RoleProcess) -> None:
    keep_to_cores(own_cores(own.context.config, "trainer"))
    run_node(own.context, own.arguments.node, own.stop, own.monitor)


def main() -> int:
    """Command line of the role."""
    node = {"type": int, "required": True, "help": "1, 2, ...; rank 0 is on node 0"}
    description = "The ranks of a run's trainer on one more host."
    return run_role("trainer", description, _join, {"--node": node}, name="trainer-node-{node}")


if __name__ == "__main__":
    sys.exit(main())
