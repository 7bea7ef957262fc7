"""Where the roles of a run are started: on this host, or as deployments on work pools. Nothing else knows which.

`Crew.start` is the one placement function; the flows see only names, whether a role has ended, and what ended it.
"""

import logging
import os
import secrets
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from threading import Event
from typing import Any, Protocol
from uuid import UUID

from prefect import get_client
from prefect.blocks.system import Secret
from prefect.client.schemas.filters import (
    FlowRunFilter,
    FlowRunFilterState,
    FlowRunFilterStateType,
    FlowRunFilterTags,
)
from prefect.client.schemas.objects import FlowRun, State, StateType
from prefect.client.schemas.sorting import FlowRunSort
from prefect.deployments import run_deployment
from prefect.exceptions import ObjectNotFound
from prefect.futures import PrefectFuture
from prefect.states import Cancelled, Cancelling

from pipelinerl.tasks.role_tasks import NODE_PREFIX, run_actor, run_evaluation, run_hub, run_trainer, run_trainer_node
from pipelinerl_core.errors import ConfigError, DeadlineExceeded, Fenced, PipelineRLError
from pipelinerl_core.restart_budget import RestartBudget
from pipelinerl_core.run.context import TOKEN_VARIABLE, RunContext
from pipelinerl_core.supervision.run_roles import is_over
from pipelinerl_core.supervision.supervise import STABLE_SECONDS, RoleFailed, restart_rule

logger = logging.getLogger(__name__)

HUB, TRAINER = "hub", "trainer"
WORKERS_SECONDS = 5.0
"""While the workers end, the hub still answers them; then it is stopped too."""
STOP_SECONDS = 9.5
"""The whole crew is gone within this time."""
EVALUATION_SECONDS = 1800.0
"""Deadline of one evaluation."""
_POLL_DEPLOYMENT_SECONDS = 5.0
_POLL_SECONDS = 0.5


_ALIVE = [StateType.SCHEDULED, StateType.PENDING, StateType.RUNNING, StateType.PAUSED]


class Member(Protocol):
    """One started role."""

    def begin(self) -> None:
        """Start it, if it is not running already."""
        ...

    def has_ended(self) -> bool:
        """Whether it ended by itself or was stopped."""
        ...

    def check(self) -> None:
        """Raise what made it fail, if it failed."""
        ...

    def stop(self) -> None:
        """Ask it to stop; returns at once."""
        ...


class LocalMember:
    """A role that a task of this flow run supervises on this host."""

    def __init__(self, submit: Callable[[Event], PrefectFuture[Any]], changed: Event) -> None:
        self._submit = submit
        self._stop = Event()
        self._ended = Event()
        self._changed = changed

    def begin(self) -> None:
        """Start it; who may have to stop it knows it by now."""
        self._future = self._submit(self._stop)
        self._future.add_done_callback(self._note_end)

    def _note_end(self, future: PrefectFuture[Any]) -> None:
        self._ended.set()
        self._changed.set()

    def has_ended(self) -> bool:
        """Whether its task is over."""
        return self._ended.is_set()

    def check(self) -> None:
        """Raise the error of its task."""
        if self._ended.is_set():
            self._future.result()

    def stop(self) -> None:
        """The supervising thread sees it within a poll."""
        self._stop.set()


class DeployedMember:
    """A role that a deployment's flow run supervises, on whatever machine its work pool has.

    One that an earlier start of the train flow has left is taken over: it has its model loaded, and finds the new
    hub. When that run crashes, because its process or machine is gone, another one takes its place; one that somebody
    has cancelled is not replaced. The new one has a newer epoch: should the old one live on unseen, it is fenced.
    """

    def __init__(self, deployment: str, parameters: dict[str, Any], name: str, max_restarts: int) -> None:
        """`max_restarts`: in a row; a life of STABLE_SECONDS starts the count again."""
        self._deployment = deployment
        self._tag = f"pipelinerl.run:{parameters['run_url'].rstrip('/').rpartition('/')[2]}"
        self._parameters = parameters
        self._name = name
        self._budget = RestartBudget(
            max_restarts, restart_rule(max_restarts), clock=time.monotonic, stable_seconds=STABLE_SECONDS
        )
        self._is_stopping = False
        self._follow(self._left_by_earlier_start() or self._start())

    def begin(self) -> None:
        """It has begun."""

    def _follow(self, run: FlowRun) -> None:
        self._id: UUID = run.id
        self._state: State[Any] | None = run.state
        self._polled_at = time.monotonic()

    def _left_by_earlier_start(self) -> FlowRun | None:
        wanted = FlowRunFilter(
            tags=FlowRunFilterTags(all_=[self._tag]),
            state=FlowRunFilterState(type=FlowRunFilterStateType(any_=_ALIVE)),
        )
        with get_client(sync_client=True) as client:
            found = client.read_flow_runs(flow_run_filter=wanted, sort=FlowRunSort.START_TIME_DESC)
        for run in found:
            if run.parameters == self._parameters:
                logger.info("%s: flow run %s of an earlier start goes on", self._name, run.id)
                return run
        return None

    def _start(self) -> FlowRun:
        # timeout=0: returns as soon as the run is scheduled. Its state is ours to follow and to end.
        started = run_deployment(
            self._deployment, parameters=self._parameters, timeout=0, as_subflow=False, tags=[self._tag]
        )
        if not isinstance(started, FlowRun):
            raise TypeError(f"run_deployment gave {type(started).__name__} outside of an event loop")
        logger.info("%s: deployment %s, flow run %s", self._name, self._deployment, started.id)
        return started

    def has_ended(self) -> bool:
        """Whether its flow run is in a final state, for good; asks the API every few seconds."""
        if not self._is_final() and time.monotonic() - self._polled_at >= _POLL_DEPLOYMENT_SECONDS:
            self._polled_at = time.monotonic()
            _quietly(f"{self._name}: could not read flow run {self._id}", self._refresh)
        if self._may_restart():
            _quietly(f"{self._name}: could not be started again", self._restart)
        return self._is_final() and not self._may_restart()

    def _is_final(self) -> bool:
        return self._state is not None and self._state.is_final()

    def _refresh(self) -> None:
        with get_client(sync_client=True) as client:
            try:
                self._state = client.read_flow_run(self._id).state
            except ObjectNotFound:
                self._state = Cancelled(message="the flow run was deleted")

    def _may_restart(self) -> bool:
        is_crashed = self._state is not None and self._state.is_crashed()
        return is_crashed and not self._is_stopping and not self._budget.is_spent

    def _restart(self) -> None:
        crashed = self._id
        self._follow(self._start())
        self._budget.take()
        logger.warning("%s: flow run %s has crashed; %s", self._name, crashed, self._budget.restart_text)

    def check(self) -> None:
        """RoleFailed unless it completed or was cancelled."""
        state = self._state
        if state is not None and (state.is_failed() or state.is_crashed()):
            tried = f", {self._budget.spent_text}" if state.is_crashed() and self._budget.is_spent else ""
            raise RoleFailed(f"{self._name}: its flow run {self._id} is {state.name}: {state.message}{tried}")

    def stop(self) -> None:
        """Cancel the flow run; its worker signals it, and its flow stops the child."""
        self._is_stopping = True
        if not self._is_final():
            _quietly(f"{self._name}: could not cancel flow run {self._id}", self._cancel)
            self._polled_at = 0.0

    def _cancel(self) -> None:
        with get_client(sync_client=True) as client:
            client.set_flow_run_state(self._id, Cancelling(message="the train flow has ended"))


class Crew:
    """The roles of one run."""

    def __init__(self, run: RunContext) -> None:
        self._run = run
        self._members: dict[str, Member] = {}
        self._changed = Event()
        self._is_pooled = run.config.placement.kind == "work_pools"
        self._is_fenced = False
        """Another start of the run goes on: it has taken over what deployments run for this one."""
        if self._is_pooled:
            Secret(value=run.token).save(secret_name(run.run_id), overwrite=True)

    def start(self, name: str) -> None:
        """Start `hub`, `trainer` or an actor. The hub is always a child of this flow.

        A trainer on several hosts is started on each of them.
        """
        self._begin(name, self._place(name))
        if name == TRAINER and self._is_pooled:
            for node in range(1, self._run.config.placement.trainer_nodes):
                self._begin(f"{NODE_PREFIX}{node}", self._place(f"{NODE_PREFIX}{node}"))

    def _begin(self, name: str, member: Member) -> None:
        self._members[name] = member  # first: Ctrl-C may come at any moment
        member.begin()

    def evaluate(self, version: str, enough: float | None = None) -> None:
        """Evaluate `first`, `last` or `all` on this host and wait for it; raises what made it or another role fail.

        enough: accuracy after which, reached twice, the later versions of `all` are left out.
        """
        name = f"evaluator-{version}"
        self._begin(
            name, LocalMember(lambda stop: run_evaluation.submit(self._run, version, stop, enough), self._changed)
        )
        deadline = time.monotonic() + EVALUATION_SECONDS
        while not self.has_ended(name):
            if time.monotonic() > deadline:
                raise DeadlineExceeded(f"{name}: not done after {EVALUATION_SECONDS:.0f} s. Lower eval.num_prompts")
            self.wait(_POLL_SECONDS)

    def _place(self, name: str) -> Member:
        run, url, restarts = self._run, self._run.store.url, self._run.config.placement.max_restarts
        if name == HUB:
            return LocalMember(lambda stop: run_hub.submit(run, stop), self._changed)
        if self._is_pooled:
            if name == TRAINER:
                return DeployedMember("trainer/trainer", {"run_url": url}, name, restarts)
            if name.startswith(NODE_PREFIX):
                node = int(name.removeprefix(NODE_PREFIX))
                return DeployedMember("trainer/trainer", {"run_url": url, "node": node}, name, restarts)
            return DeployedMember("actor/actor", {"run_url": url, "name": name}, name, restarts)
        if name == TRAINER:
            return LocalMember(lambda stop: run_trainer.submit(run, stop), self._changed)
        if name.startswith(NODE_PREFIX):
            return LocalMember(lambda stop: run_trainer_node.submit(run, name, stop), self._changed)
        return LocalMember(lambda stop: run_actor.submit(run, name, stop), self._changed)

    def has_ended(self, name: str) -> bool:
        """Whether a role is over; raises whatever made any role fail."""
        for other, member in self._members.items():
            if member.has_ended():
                try:
                    member.check()
                except Fenced:
                    self._is_fenced = True
                    raise
                self._check_node(other)
        return self._members[name].has_ended()

    def _check_node(self, name: str) -> None:
        """A host of the trainer that has left, cancelled perhaps, before the run is over."""
        if name.startswith(NODE_PREFIX) and self._is_pooled and not is_over(self._run):
            raise RoleFailed(
                f"{name}: its flow run has ended, and without its ranks no step can be taken. `pipelinerl resume "
                f"{self._run.run_id}` starts it again; trainer.ranks and placement.trainer_nodes may be lower then"
            )

    def wait(self, seconds: float) -> None:
        """Sleep, or until a role of this host ends."""
        self._changed.wait(seconds)
        self._changed.clear()

    def wait_until(self, what: str, condition: Callable[[], bool], seconds: float) -> None:
        """Wait for a condition; raises what ended a role meanwhile, or DeadlineExceeded with its name."""
        deadline = time.monotonic() + seconds
        while not condition():
            for name in self._members:
                if self.has_ended(name):
                    raise RoleFailed(f"{name}: ended while waiting for {what}")
            if time.monotonic() > deadline:
                raise DeadlineExceeded(f"{what}: not there after {seconds:.0f} s; the roles' logs say what they do")
            self.wait(_POLL_SECONDS)

    def stop(self) -> None:
        """Stop everything: workers first, while the hub still answers them; then the hub. Never raises for a role.

        A second Ctrl-C cuts the wait for the workers short, and a third the one for all: everybody is told even so,
        for the flow waits for the threads that supervise them.
        """
        members = self._members
        if self._is_fenced:
            members = {name: member for name, member in members.items() if isinstance(member, LocalMember)}
        workers = [member for name, member in members.items() if name != HUB]
        begun = time.monotonic()
        everyone = list(members.values())
        try:
            _tell_to_stop(workers)
            self._await(workers, begun + WORKERS_SECONDS)
        finally:
            _tell_to_stop(everyone)
            self._await(everyone, begun + STOP_SECONDS)
        if self._is_pooled and not self._is_fenced:
            name = secret_name(self._run.run_id)
            _quietly(f"could not delete the Secret block {name}", lambda: Secret.delete(name))
            self._is_pooled = False  # a second stop finds nothing to do

    def _await(self, members: list[Member], deadline: float) -> None:
        while time.monotonic() < deadline and not all(member.has_ended() for member in members):
            self.wait(min(_POLL_SECONDS, max(0.0, deadline - time.monotonic())))


def _tell_to_stop(members: list[Member]) -> None:
    """Each of them, whatever happens in between: a deployment is told by a call that takes its time."""
    with ExitStack() as stack:
        for member in reversed(members):
            stack.callback(member.stop)


def _quietly(failure: str, action: Callable[[], Any]) -> None:
    """Call the Prefect API; an outage of its server must neither end a run nor keep it from being stopped."""
    try:
        action()
    except Exception as error:  # noqa: BLE001 (whatever the client raises: the run does not depend on it)
        logger.warning("%s: %s", failure, error)


def secret_name(run_id: str) -> str:
    """Prefect Secret block with the hub token of a run on work pools."""
    return f"pipelinerl-{run_id}"


def hub_token(run: RunContext) -> str:
    """The token for a start of a run: the one that is set, else the one that roles on work pools have, or a new one.

    They live on when the train flow is killed, and find its successor's hub.
    """
    token = os.environ.get(TOKEN_VARIABLE, "")
    if not token and run.config.placement.kind == "work_pools":
        with suppress(ConfigError):
            token = load_token(run.run_id)
    return token or secrets.token_urlsafe(32)


def load_token(run_id: str) -> str:
    """The hub token of a run, from its Secret block; ConfigError when there is none."""
    try:
        block = Secret.load(secret_name(run_id))
    except ValueError as error:
        raise ConfigError(
            f"no Prefect Secret block {secret_name(run_id)}: is the train flow running? ({error})"
        ) from None
    if not isinstance(block, Secret):
        raise PipelineRLError(f"{secret_name(run_id)} is no Secret block")
    return str(block.get())
