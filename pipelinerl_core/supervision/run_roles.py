"""The roles of a run as supervised children: command, environment, log file. Knows nothing of Prefect."""

import socket
import time
from collections.abc import Callable
from threading import Event

from pipelinerl_core.config import RunConfig
from pipelinerl_core.errors import Fenced
from pipelinerl_core.run.context import RunContext, log_directory
from pipelinerl_core.run.drain import wants_drain
from pipelinerl_core.run.follow import RunFollower
from pipelinerl_core.run.history import is_complete, read_epochs
from pipelinerl_core.run.hub_status import is_descendant, is_live, read_hub
from pipelinerl_core.run.locate import remove_shared_memory
from pipelinerl_core.run.records import EvalRecord
from pipelinerl_core.run.versions import ALL, names_several
from pipelinerl_core.supervision.role_commands import role_command, role_environment
from pipelinerl_core.supervision.supervise import SETTLED_SECONDS, STOP_SECONDS, RoleReport, supervise_role

HUB_RETURN_SECONDS = 10.0
"""A hub that was stopped and is started again beats within this time; else the run has ended here."""
_LOOK_SECONDS = 0.5
_REPLACED_LEASES = 2.0
"""An actor that has gone is in no hub.json after so many lease times."""
_HUB_FENCED_SECONDS = 10.0
"""A hub that another start has fenced sees it and has left."""
TRAINER_SETTLED_SECONDS = 1800.0
"""A trainer that has lived for so long was started well."""
HUB_STOP_SECONDS = 3.0
"""The hub stops last and keeps nothing: a shorter grace keeps the whole stop below ten seconds."""


def evaluate(run: RunContext, version: str, stop: Event, enough: float | None = None) -> list[EvalRecord] | None:
    """Run the evaluator on what `version` names; None when it was stopped.

    version: first, last, all, or numbers with commas; of several, those already evaluated keep their record.
    enough: accuracy after which, reached twice, later ones of several versions are left out.
    """
    name = "evaluator-all" if names_several(version) else f"evaluator-{version}"
    arguments = {"version": version} | ({} if enough is None else {"enough": str(enough)})
    report = supervise(run, "evaluator", name, arguments, stop)
    if report.stopped:
        return None
    follower = RunFollower(run.store)
    follower.refresh()
    evals = follower.evals
    if version == ALL:
        return list(evals.values())
    wanted = {"first": min(evals, default=0), "last": max(evals, default=0)}
    steps = [wanted[one] if one in wanted else int(one) for one in version.split(",")]
    return [evals[step] for step in sorted(set(steps)) if step in evals]


def supervise(run: RunContext, role: str, name: str, arguments: dict[str, str], stop: Event) -> RoleReport:
    """`supervise_role` with the command, environment and log file of a role of this run."""
    try:
        return supervise_role(
            role_command(role, {"run": run.store.url, **arguments}),
            env=role_environment(run.config.placement.threads, run.token),
            log_path=log_directory(run.store.url, run.run_id) / f"{name}.log",
            max_log_bytes=run.config.tracking.log_bytes,
            max_restarts=run.config.placement.max_restarts,
            stop=stop,
            name=name,
            ready_check=(lambda: hub_is_up(run)) if role == "hub" else None,
            is_done=_is_done(run, role, stop),
            is_replaced=_is_replaced(run, role, name, stop),
            stop_seconds=HUB_STOP_SECONDS if role == "hub" else STOP_SECONDS,
            settled_seconds=settled_seconds(run.config, role),
        )
    finally:
        if role == "trainer" and stop.is_set():  # it may publish in its grace, when its flow has cleaned up already
            remove_shared_memory(run)


def settled_seconds(config: RunConfig, role: str) -> float:
    """After how long a process counts as started well.

    A trainer may wait ten minutes in vain for groups, or `trainer.collective_seconds` for ranks, in every life: with
    less than that its failures would never be counted together.
    """
    if role not in ("trainer", "trainer_node"):
        return SETTLED_SECONDS
    return max(TRAINER_SETTLED_SECONDS, 2 * config.trainer.collective_seconds)


def _is_replaced(run: RunContext, role: str, name: str, stop: Event) -> Callable[[], bool] | None:
    """What is asked of a role that was fenced."""
    if role == "actor":
        return lambda: is_replaced(run, name, stop)
    if role == "trainer":
        return lambda: trainer_is_replaced(run, stop)
    return None


def _is_done(run: RunContext, role: str, stop: Event) -> Callable[[], bool]:
    """Whether a role that left by itself has nothing to come back for."""
    if role == "evaluator":
        return lambda: True
    if role == "actor":
        return lambda: is_over(run) or hub_has_left(run, stop)
    return lambda: is_over(run)


def is_replaced(run: RunContext, name: str, stop: Event) -> bool:
    """Whether an actor that was fenced need not come back: the run goes on with the one that came, or has ended here.

    That one may have been of another start of the run, which has lost its hub to ours and is gone by now.
    """
    wait_seconds = max(_REPLACED_LEASES * run.config.placement.lease_seconds, _HUB_FENCED_SECONDS)
    if stop.wait(wait_seconds) or is_over(run) or hub_has_left(run, stop):
        return True
    hub = read_hub(run.store)
    return hub is not None and name in {key.rpartition("/")[0] for key in hub.live.get("actors", {})}


def trainer_is_replaced(run: RunContext, stop: Event) -> bool:
    """Whether a trainer that was fenced need not come back; Fenced if the run has gone to another start.

    Of two starts in the same moment the one with the newer hub goes on, whosever trainer was the later one.
    """
    if stop.wait(_HUB_FENCED_SECONDS) or is_over(run):
        return True
    newest = max((record for record in read_epochs(run.store) if record.role == "hub"), key=lambda hub: hub.epoch)
    if newest.host == socket.gethostname() and is_descendant(newest.pid):
        return False
    raise Fenced(f"trainer: another process has taken over this run (its hub is pid {newest.pid} on {newest.host})")


def hub_has_left(run: RunContext, stop: Event, seconds: float = HUB_RETURN_SECONDS) -> bool:
    """Whether nobody runs this run any more: its hub sends no beats, or is on its way out, for so long."""
    beats: set[float] = set()
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        hub = read_hub(run.store)
        if hub is not None and is_live(hub) and hub.live.get("state") == "run":
            beats.add(hub.beat)
        if len(beats) > 2:  # the first may be from before it was told to stop
            return False
        if stop.wait(_LOOK_SECONDS):
            return True
    return True


def hub_is_up(run: RunContext) -> bool:
    """Whether the hub of the run has written where it is."""
    return is_live(read_hub(run.store))


def is_over(run: RunContext) -> bool:
    """Whether the last step is committed, or the run is to drain; before that no role leaves for good by itself."""
    if wants_drain(run.store):
        return True
    return is_complete(run.store, run.config.trainer.steps)
