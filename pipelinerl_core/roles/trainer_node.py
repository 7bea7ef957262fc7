"""The ranks of a trainer on one more host: they join every start of rank 0, which is on another.

rank 0 --meetings/<epoch>.json--> this role --starts--> its ranks --> torch's process group
"""

import argparse
import logging
import sys
import threading

from pipelinerl_core.config.cores import own_cores
from pipelinerl_core.records import MeetingRecord, parse_commit_key
from pipelinerl_core.roles.context import RunContext, open_run
from pipelinerl_core.roles.control import stop_when_drained
from pipelinerl_core.roles.meeting import newest_meeting
from pipelinerl_core.roles.monitor import RoleMonitor, monitored
from pipelinerl_core.roles.process import (
    configure_logging,
    die_with_parent,
    exit_codes,
    install_stop_signal,
    keep_to_cores,
)
from pipelinerl_core.roles.rank_processes import RankProcesses

logger = logging.getLogger(__name__)

_LOOK_SECONDS = 1.0


def run_node(context: RunContext, node: int, stop: threading.Event, monitor: RoleMonitor) -> None:
    """Until the run is over or `stop`: the ranks of this node for whatever start of the trainer is the newest."""
    joined = 0
    monitor.ready_unless(lambda: "")
    while not stop.is_set() and not _is_over(context):
        meeting = newest_meeting(context.store)
        if meeting is None or meeting.epoch <= joined:
            monitor.beat("waiting for rank 0")
            stop.wait(_LOOK_SECONDS)
            continue
        joined = meeting.epoch
        take_part(context, meeting, node, stop, monitor)


def take_part(
    context: RunContext, meeting: MeetingRecord, node: int, stop: threading.Event, monitor: RoleMonitor
) -> None:
    """The ranks of this node in one start of the trainer; returns when they have ended or a newer start is there."""
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
    finally:
        processes.name_the_dead()
        processes.stop(0.0 if processes.name_the_dead() is not None else _LOOK_SECONDS)


def _is_over(context: RunContext) -> bool:
    steps = [parse_commit_key(key)[0] for key in context.store.list("commits")]
    return max(steps, default=-1) >= context.config.trainer.steps


@exit_codes
def main() -> int:
    """Command line of the role."""
    parser = argparse.ArgumentParser(description="The ranks of a run's trainer on one more host.")
    parser.add_argument("--run", required=True)
    parser.add_argument("--node", type=int, required=True, help="1, 2, ...; rank 0 is on node 0")
    parser.add_argument("--parent-pid", type=int, required=True)
    arguments = parser.parse_args()
    die_with_parent(arguments.parent_pid)
    configure_logging()
    stop = install_stop_signal()
    context = open_run(arguments.run)
    keep_to_cores(own_cores(context.config, "trainer"))
    stop_when_drained(context.store, stop)
    with monitored(context, "trainer", f"trainer-node-{arguments.node}") as (timed, monitor):
        run_node(timed, arguments.node, stop, monitor)
    return 0


if __name__ == "__main__":
    sys.exit(main())
