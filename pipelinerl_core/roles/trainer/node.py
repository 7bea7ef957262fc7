"""The role that runs ranks of the trainer on a further host. The ranks join every start of rank 0.

rank 0 --meetings/<epoch>.json--> this role --starts--> its ranks --> torch's process group
"""

import logging
import sys
import threading

from pipelinerl_core.errors import StoreUnavailable
from pipelinerl_core.host import own_cores
from pipelinerl_core.roles.runtime.hub_link import HUB_DEADLINE_SECONDS
from pipelinerl_core.roles.runtime.monitor import RoleMonitor
from pipelinerl_core.roles.runtime.process import RoleProcess, keep_to_cores, run_role
from pipelinerl_core.roles.trainer.rank_processes import RANK_STOP_SECONDS, RankProcesses
from pipelinerl_core.roles.trainer.rendezvous import newest_rendezvous
from pipelinerl_core.run.context import RunContext
from pipelinerl_core.run.drain import wants_drain
from pipelinerl_core.run.history import is_complete
from pipelinerl_core.run.hub_status import HubWatch
from pipelinerl_core.run.records import RendezvousRecord

logger = logging.getLogger(__name__)

_POLL_SECONDS = 1.0


def run_node(context: RunContext, node: int, stop: threading.Event, monitor: RoleMonitor) -> None:
    """Run this node's ranks for each start of the trainer, until `stop` is set or the run is over.

    The run is over for this node in two cases:

    - The last step is committed or a drain is requested, and rank 0 has then commanded the ranks to stop. A drain
      request alone is not enough: rank 0 may read the request later, and needs these ranks for its last step.
    - The last step is committed or a drain is requested, and the hub has been silent for HUB_DEADLINE_SECONDS, after
      which every role gives up: rank 0 does not start again.

    Otherwise the node waits for the next start of rank 0.
    """
    joined = 0
    hub = HubWatch(context.store)
    monitor.set_readiness_check(lambda: "")
    while not stop.is_set():
        rendezvous = newest_rendezvous(context.store)
        if rendezvous is not None and rendezvous.epoch > joined:
            joined = rendezvous.epoch
            if run_ranks(context, rendezvous, node, stop, monitor) and _is_over(context):
                return
            continue
        hub.look()
        if hub.silent_seconds > HUB_DEADLINE_SECONDS and _is_over(context):
            logger.info("the run is over and its hub is gone: this node does not wait for rank 0")
            return
        monitor.heartbeat("waiting for rank 0")
        stop.wait(_POLL_SECONDS)


def run_ranks(
    context: RunContext, rendezvous: RendezvousRecord, node: int, stop: threading.Event, monitor: RoleMonitor
) -> bool:
    """Run this node's ranks for one start of the trainer, until the ranks have ended or a newer start is published.

    Returns True if rank 0 commanded all ranks to stop, as it does after its last commit. After `stop` the ranks have
    RANK_STOP_SECONDS to receive this command: rank 0 may be stopped at the same time, in the middle of a step.
    """
    first = node * rendezvous.per_node
    ranks = range(first, first + rendezvous.per_node)
    logger.info("ranks %d to %d join rank 0 at %s", first, ranks[-1], rendezvous.where)
    processes = RankProcesses(context.store.url)
    processes.start(ranks, rendezvous)
    try:
        while not stop.wait(_POLL_SECONDS) and not processes.have_ended() and processes.log_failures() is None:
            monitor.heartbeat(f"training with rank 0 of epoch {rendezvous.epoch}")
            try:
                newest = newest_rendezvous(context.store)
            except StoreUnavailable as error:  # a step needs no store
                logger.warning("the ranks go on without the store: %s", error)
                continue
            if newest is not None and newest.epoch > rendezvous.epoch:
                break
        if stop.is_set() and processes.log_failures() is None:
            processes.wait(RANK_STOP_SECONDS)
        have_ended = processes.have_ended()
        return processes.log_failures() is None and have_ended
    finally:
        processes.stop(0.0)


def _is_over(context: RunContext) -> bool:
    return is_complete(context.store, context.config.trainer.steps) or wants_drain(context.store)


def _join(own: RoleProcess) -> None:
    keep_to_cores(own_cores(own.context.config, "trainer"))
    run_node(own.context, own.arguments.node, own.stop, own.monitor)


def main() -> int:
    """Command line of the role."""
    node = {"type": int, "required": True, "help": "1, 2, ...; rank 0 is on node 0"}
    description = "Ranks of a run's trainer on a further host."
    return run_role("trainer", description, _join, {"--node": node}, name="trainer-node-{node}")


if __name__ == "__main__":
    sys.exit(main())
