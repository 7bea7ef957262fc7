"""The roles of a run as supervised child processes: command, environment, log file. Independent of Prefect."""

import socket
import time
from collections.abc import Callable
from threading import Event

from pipelinerl_core.config import RunConfig
from pipelinerl_core.errors import ConfigError, Fenced
from pipelinerl_core.run.context import RunContext, log_directory
from pipelinerl_core.run.drain import wants_drain
from pipelinerl_core.run.evaluations import SCHEDULED
from pipelinerl_core.run.follow import RunFollower
from pipelinerl_core.run.history import is_complete, read_epochs
from pipelinerl_core.run.hub_status import is_descendant, may_be_live, read_hub
from pipelinerl_core.run.locate import remove_shared_memory
from pipelinerl_core.run.records import EvalRecord
from pipelinerl_core.run.versions import ALL, DUE, find_commits, names_several
from pipelinerl_core.supervision.gpus import claimed_gpus
from pipelinerl_core.supervision.log_copies import copied_log
from pipelinerl_core.supervision.role_commands import role_command, role_environment
from pipelinerl_core.supervision.role_logs import RoleLog
from pipelinerl_core.supervision.role_problems import RoleProblems
from pipelinerl_core.supervision.supervise import STABLE_SECONDS, STOP_SECONDS, RoleReport, supervise_role

HUB_RETURN_SECONDS = 30.0
"""A restarted hub writes heartbeats within this time, also on busy cores; otherwise the run has stopped."""
_POLL_SECONDS = 0.5
_REPLACED_LEASES = 2.0
"""After this many lease times, hub.json no longer lists an actor that has ended."""
_HUB_FENCED_SECONDS = 10.0
"""Within this time, a hub that another start has fenced detects the fence and ends."""
TRAINER_STABLE_SECONDS = 1800.0
"""A trainer that has run for this long is stable (see `stable_seconds`)."""
TRAINER_STOP_SECONDS = 5.0
"""Between SIGTERM and SIGKILL of the trainer, which cannot end in the middle of a long step."""
HUB_STOP_SECONDS = 3.0
"""Between SIGTERM and SIGKILL of the hub, which stops last; short, so that the whole stop takes less than 10 s."""


def evaluate(run: RunContext, version: str, stop: Event, enough: float | None = None) -> list[EvalRecord] | None:
    """Run the evaluator on the versions that `version` names; None if the evaluator was stopped.

    version: first, last, all, due, scheduled, or numbers with commas; of several versions, only those without a
    record are evaluated.
    enough: after two versions with at least this accuracy, later versions are skipped.
    """
    if run.config.eval.num_prompts == 0:
        raise ConfigError(f"{run.run_id} has no held-out prompts to evaluate on: eval.num_prompts=0")
    steps = [] if version in (ALL, DUE, SCHEDULED) else [commit.step for commit in find_commits(run, version)]
    name = "evaluator-all" if names_several(version) else f"evaluator-{version}"
    # Of a live run, `last` is another version by the time that the evaluator starts.
    named = str(steps[0]) if steps and not names_several(version) else version
    arguments = {"version": named} | ({} if enough is None else {"enough": str(enough)})
    report = supervise(run, "evaluator", name, arguments, stop)
    if report.stopped:
        return None
    follower = RunFollower(run.store)
    follower.refresh()
    every = version in (ALL, DUE, SCHEDULED)
    return [
        record
        for evals in (follower.evals, *follower.set_evals.values())
        for step, record in evals.items()
        if every or step in steps
    ]


def supervise(
    run: RunContext, role: str, name: str, arguments: dict[str, str], stop: Event, *, has_hub: bool = False
) -> RoleReport:
    """`supervise_role` with the command, environment, GPUs and log file of a role of this run.

    has_hub: this process supervises the hub, too: a hub that has stopped returns, unless `stop` is set.
    """
    path = log_directory(run.store.url, run.run_id) / f"{name}.log"
    log = RoleLog(path, run.config.tracking.log_bytes, RoleProblems(name, run.token).add)
    try:
        with claimed_gpus(run.config, run.run_id, role, name, stop) as gpus, copied_log(run, name, log):
            return supervise_role(
                role_command(role, {"run": run.store.url, **arguments}),
                env={**role_environment(run.config.placement.threads, run.token), **gpus},
                log=log,
                max_restarts=run.config.placement.max_restarts,
                stop=stop,
                name=name,
                ready_check=(lambda: hub_is_up(run)) if role == "hub" else None,
                is_done=_is_done(run, role, stop, has_hub=has_hub),
                is_replaced=_is_replaced(run, role, name, stop),
                stop_seconds={"hub": HUB_STOP_SECONDS, "trainer": TRAINER_STOP_SECONDS}.get(role, STOP_SECONDS),
                stable_seconds=stable_seconds(run.config, role),
            )
    finally:
        if role == "trainer" and stop.is_set():  # between SIGTERM and its end, the trainer may publish again
            remove_shared_memory(run)


def stable_seconds(config: RunConfig, role: str) -> float:
    """Seconds after which a process of a role counts as stable, which resets the count of restarts.

    Longer than the trainer's waits (`group_seconds` for groups, `trainer.collective_seconds` for ranks): otherwise
    each failed wait would reset the count, and the trainer would restart forever.
    """
    if role not in ("trainer", "trainer_node"):
        return STABLE_SECONDS
    return max(TRAINER_STABLE_SECONDS, 2 * config.trainer.collective_seconds, 2 * config.group_seconds)


def _is_replaced(run: RunContext, role: str, name: str, stop: Event) -> Callable[[], bool] | None:
    """The check whether another process has replaced a fenced role; None if a fenced role never restarts."""
    if role == "actor":
        return lambda: actor_is_replaced(run, name, stop)
    if role == "trainer":
        return lambda: trainer_is_replaced(run, stop)
    return None


def _is_done(run: RunContext, role: str, stop: Event, *, has_hub: bool) -> Callable[[], bool]:
    """The check whether a role that ended with code 0 has finished its work."""
    if role == "evaluator":
        return lambda: True
    if role == "actor" and not has_hub:
        return lambda: is_over(run) or hub_has_stopped(run, stop)
    return lambda: is_over(run)


def actor_is_replaced(run: RunContext, name: str, stop: Event) -> bool:
    """Whether a fenced actor must not restart, because another actor of its name is live, or the run has stopped.

    The other actor may belong to a fenced start of the run; the wait lets that actor end first.
    """
    wait_seconds = max(_REPLACED_LEASES * run.config.placement.lease_seconds, _HUB_FENCED_SECONDS)
    if stop.wait(wait_seconds) or is_over(run) or hub_has_stopped(run, stop):
        return True
    hub = read_hub(run.store)
    return hub is not None and name in {key.rpartition("/")[0] for key in hub.live.get("actors", {})}


def trainer_is_replaced(run: RunContext, stop: Event) -> bool:
    """Whether a fenced trainer must not restart; raises Fenced if another start of the run has fenced this start.

    Of two simultaneous starts, the start with the newer hub continues, whichever trainer is newer.
    """
    if stop.wait(_HUB_FENCED_SECONDS) or is_over(run):
        return True
    newest = max((record for record in read_epochs(run.store) if record.role == "hub"), key=lambda hub: hub.epoch)
    if newest.host == socket.gethostname() and is_descendant(newest.pid):
        return False
    raise Fenced(f"trainer: another process has taken over this run (its hub is pid {newest.pid} on {newest.host})")


def hub_has_stopped(run: RunContext, stop: Event, seconds: float = HUB_RETURN_SECONDS) -> bool:
    """Whether the run has stopped: for `seconds`, its hub writes no heartbeat, or writes that it stops."""
    beats: set[float] = set()
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        hub = read_hub(run.store)
        if hub is not None and may_be_live(hub) and hub.live.get("state") == "run":
            beats.add(hub.beat)
        if len(beats) > 2:  # the first heartbeat may be older than the request to stop
            return False
        if stop.wait(_POLL_SECONDS):
            return True
    return True


def hub_is_up(run: RunContext) -> bool:
    """Whether the hub of the run, which is a process of this host, has published its address and is live."""
    return may_be_live(read_hub(run.store))


def is_over(run: RunContext) -> bool:
    """Whether the last step is committed or a drain is requested; until then, roles that end are restarted."""
    if wants_drain(run.store):
        return True
    return is_complete(run.store, run.config.trainer.steps)
