"""Starts and stops the roles of a run, on this host or as deployments on work pools.

The flows call RunRoles with names of roles and do not depend on where a role runs.
"""

import hashlib
import logging
import math
import re
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from contextvars import ContextVar
from dataclasses import dataclass
from threading import Event
from typing import Any
from uuid import UUID, uuid4

from prefect import get_client
from prefect.blocks.system import Secret
from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas.filters import (
    FlowRunFilter,
    FlowRunFilterState,
    FlowRunFilterStateType,
    FlowRunFilterTags,
)
from prefect.client.schemas.objects import FlowRun, State, StateType
from prefect.client.schemas.sorting import FlowRunSort
from prefect.context import FlowRunContext
from prefect.deployments import run_deployment
from prefect.exceptions import ObjectNotFound
from prefect.futures import PrefectFuture
from prefect.runtime import flow_run
from prefect.states import Cancelled, Cancelling

from pipelinerl.tasks.outage import SERVER_SECONDS, server_answers
from pipelinerl.tasks.role_tasks import NODE_PREFIX, run_evaluation, run_role
from pipelinerl_core.config import RunConfig
from pipelinerl_core.config.gpu_counts import gpus_of
from pipelinerl_core.errors import ConfigError, DeadlineExceeded, Fenced, PipelineRLError, TrainingDiverged
from pipelinerl_core.restart_budget import RestartBudget
from pipelinerl_core.run.context import RunContext, given_token, last_resume_at
from pipelinerl_core.run.evaluations import SCHEDULED
from pipelinerl_core.run.locate import new_run_id
from pipelinerl_core.run.records import eval_key
from pipelinerl_core.storage.object_store import open_store
from pipelinerl_core.supervision.fit import container_bytes
from pipelinerl_core.supervision.run_roles import is_over
from pipelinerl_core.supervision.supervise import STABLE_SECONDS, RoleFailed, restart_rule

logger = logging.getLogger(__name__)

HUB, TRAINER, EVALUATOR, ACTOR = "hub", "trainer", "evaluator", "actor"
EVALUATOR_PREFIX = "evaluator-"
_ENOUGH = "@"
"""In the name of an evaluator: between the versions and the accuracy that is enough."""
WORKERS_SECONDS = 5.0
"""Deadline for the end of actors and trainer; the hub, which they need until then, is stopped afterwards."""
STOP_SECONDS = 9.5
"""Deadline for the end of all roles, the hub included."""
MACHINE_SECONDS = 86_400.0
"""Time for which a run waits for workers, for example in the queue of a cluster."""
_POLL_DEPLOYMENT_SECONDS = 5.0
_POLL_SECONDS = 0.5


_ALIVE = [StateType.SCHEDULED, StateType.PENDING, StateType.RUNNING, StateType.PAUSED]


@dataclass(frozen=True, slots=True)
class RunThread:
    """What the code that carries out a run in a thread, for a comparison or a sweep, needs from the main thread."""

    stop: Event
    """Set to stop the run: Ctrl-C interrupts the main thread only."""
    is_alone: bool
    """No other run may run in this process at the same time."""


RUN_THREAD: ContextVar[RunThread | None] = ContextVar("run_thread", default=None)


class LocalRole:
    """A role that a task of this flow run supervises on this host."""

    def __init__(self, submit: Callable[[Event], PrefectFuture[Any]], changed: Event) -> None:
        self._submit = submit
        self._stop = Event()
        self._ended = Event()
        self._changed = changed

    def begin(self) -> None:
        """Submit the task that supervises the role."""
        self._future = self._submit(self._stop)
        self._future.add_done_callback(self._note_end)

    def _note_end(self, future: PrefectFuture[Any]) -> None:
        self._ended.set()
        self._changed.set()

    def is_running(self) -> bool:
        """Whether the task of the role has not ended."""
        return not self.has_ended()

    def has_ended(self) -> bool:
        """Whether the task of the role has ended."""
        return self._ended.is_set()

    def check(self) -> None:
        """Raise the error of the task, if the task has failed."""
        if self._ended.is_set():
            self._future.result()

    def stop(self) -> None:
        """Set the stop event, which the supervising thread polls; does not wait."""
        self._stop.set()


class DeployedRole:
    """A role that the flow run of a deployment supervises, on a machine of a work pool.

    If an earlier start of the train flow has left a live flow run of the role, this flow run is used: its model is
    loaded, and the role connects to the new hub. If the flow run crashes because its process or machine is gone, a
    new flow run replaces it; a cancelled flow run is not replaced. The replacement has a newer epoch, so the hub
    fences the old role if the old role is still alive.
    """

    def __init__(
        self,
        deployment: str,
        parameters: dict[str, Any],
        name: str,
        max_restarts: int,
        variables: Mapping[str, Any] | None = None,
    ) -> None:
        """max_restarts: in a row; the count begins again after the role has run for STABLE_SECONDS.

        variables: job variables of the flow run; those that the job template of the work pool lacks are left out.
        """
        self._deployment = deployment
        self._variables = variables or {}
        self._run_id = parameters["run_url"].rstrip("/").rpartition("/")[2]
        self._parameters = parameters
        self._name = name
        self._seconds_running = 0.0
        """Of all flow runs of the role, without their time in the queue of the work pool."""
        self._budget = RestartBudget(
            max_restarts, restart_rule(max_restarts), clock=lambda: self._seconds_running,
            stable_seconds=STABLE_SECONDS,
        )  # fmt: skip
        self._is_stopping = False
        server_answers(SERVER_SECONDS)  # otherwise the requests below say what is wrong
        self._follow(self._left_by_earlier_start() or self._start())

    def begin(self) -> None:
        """Do nothing: the constructor has found or started the flow run."""

    def _follow(self, run: FlowRun) -> None:
        self._id: UUID = run.id
        self._state: State[Any] | None = run.state
        self._polled_at = self._counted_at = time.monotonic()

    def _left_by_earlier_start(self) -> FlowRun | None:
        wanted = FlowRunFilter(
            tags=FlowRunFilterTags(all_=[run_tag(self._run_id)]),
            state=FlowRunFilterState(type=FlowRunFilterStateType(any_=_ALIVE)),
        )
        with get_client(sync_client=True) as client:
            flow_runs = client.read_flow_runs(flow_run_filter=wanted, sort=FlowRunSort.START_TIME_DESC)
        resumed_at = last_resume_at(open_store(self._parameters["run_url"]))
        for run in flow_runs:  # labels have the MLflow run of a comparison, which is unknown while MLflow is away
            if {**run.parameters, "labels": None} != {**self._parameters, "labels": None}:
                continue
            if run.start_time is None or run.start_time.timestamp() >= resumed_at:
                logger.info("%s: using flow run %s of an earlier start", self._name, run.id)
                return run
            logger.info("%s: flow run %s has settings from before the resume: it is cancelled", self._name, run.id)
            with get_client(sync_client=True) as client:
                client.set_flow_run_state(run.id, Cancelling(), force=True)
        return None

    def _start(self) -> FlowRun:
        # timeout=0: returns once the flow run is scheduled; this object polls the state and cancels the flow run.
        started = run_deployment(
            self._deployment,
            parameters=self._parameters,
            timeout=0,
            tags=[run_tag(self._run_id)],
            flow_run_name=f"{self._run_id}-{self._name}",
            job_variables=self._known_variables(),
            # Prefect's client repeats a request whose answer is lost, and must not start a second flow run.
            idempotency_key=str(uuid4()),
        )
        if not isinstance(started, FlowRun):
            raise TypeError(f"run_deployment returned {type(started).__name__} instead of a FlowRun")
        logger.info("%s: deployment %s, flow run %s", self._name, self._deployment, started.id)
        return started

    def _known_variables(self) -> dict[str, Any]:
        """The job variables that the job template of the deployment's work pool has."""
        if not self._variables:
            return {}
        with get_client(sync_client=True) as client:
            pool = client.read_deployment_by_name(self._deployment).work_pool_name
            template = client.read_work_pool(pool).base_job_template if pool else {}
        known = template.get("variables", {}).get("properties", {})
        return {name: value for name, value in self._variables.items() if name in known}

    def is_running(self) -> bool:
        """Whether the flow run was Running when last read; not while it waits for a slot or a worker."""
        return self._state is not None and self._state.is_running()

    def has_ended(self) -> bool:
        """Whether the flow run is in a final state and is not replaced; reads the state from the API every 5 s."""
        if not self._is_final() and time.monotonic() - self._polled_at >= _POLL_DEPLOYMENT_SECONDS:
            self._polled_at = time.monotonic()
            _quietly(f"{self._name}: could not read flow run {self._id}", self._refresh)
        if self._may_restart():
            _quietly(f"{self._name}: could not be started again", self._restart)
        return self._is_final() and not self._may_restart()

    def _is_final(self) -> bool:
        return self._state is not None and self._state.is_final()

    def _refresh(self) -> None:
        now = time.monotonic()
        if self.is_running():
            self._seconds_running += now - self._counted_at
        self._counted_at = now
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
        """Raise RoleFailed if the flow run has failed or crashed, or the error that nothing starts again."""
        state = self._state
        if state is not None and (state.is_failed() or state.is_crashed()):
            tried = f", {self._budget.spent_text}" if state.is_crashed() and self._budget.is_spent else ""
            kinds = (ConfigError, TrainingDiverged)  # Prefect's message has the name of the class
            error = next((kind for kind in kinds if f": {kind.__name__}: " in (state.message or "")), RoleFailed)
            raise error(f"{self._name}: its flow run {self._id} is {state.name}: {state.message}{tried}")

    def stop(self) -> None:
        """Cancel the flow run: the worker signals its process, and the flow stops the role. Does not wait.

        A flow run that another flow run has started, for example an equal sweep, is left to it while that runs.
        """
        self._is_stopping = True
        if not self._is_final():
            _quietly(f"{self._name}: could not cancel flow run {self._id}", self._cancel)
            self._polled_at = 0.0

    def _cancel(self) -> None:
        with get_client(sync_client=True) as client:
            if owner := _other_owner(client, self._id):
                logger.warning("%s: flow run %s goes on for flow run %s (%s), which has started it", self._name,
                               self._id, owner.name, owner.id)  # fmt: skip
                self._state = Cancelled(message="left to the flow run that has started it")
                return
            client.set_flow_run_state(
                self._id, Cancelling(message="the flow run that started this flow run has ended")
            )


def _other_owner(client: SyncPrefectClient, flow_run_id: UUID) -> FlowRun | None:
    """The flow run that has started this flow run, if it is another than the current and is running."""
    try:
        parent_task = client.read_flow_run(flow_run_id).parent_task_run_id
        owner_id = client.read_task_run(parent_task).flow_run_id if parent_task is not None else None
        if owner_id is None or str(owner_id) == str(flow_run.id):
            return None
        owner = client.read_flow_run(owner_id)
    except ObjectNotFound:  # a user has deleted it
        return None
    return owner if owner.state is not None and owner.state.is_running() else None


Role = LocalRole | DeployedRole
"""A role of a run, wherever it runs."""


class RunRoles:
    """The roles of one run: starts them, checks them and stops them."""

    def __init__(self, run: RunContext, on_wait: Callable[[], None] = lambda: None) -> None:
        """on_wait: called about once a second while this object waits."""
        self._run = run
        self._on_wait = on_wait
        self._members: dict[str, Role] = {}
        self._changed = Event()
        self._is_pooled = run.config.placement.kind == "work_pools"
        self._waiting_since: float | None = None
        self._is_fenced = False
        """A newer start of the run uses the flow runs of the deployments; this start must not cancel them."""
        self._has_evaluator_failed = False
        if self._is_pooled:
            Secret(value=run.token).save(secret_name(run.store.url), overwrite=True)

    def start(self, name: str) -> None:
        """Start `hub`, `trainer`, `evaluator` (beside training) or an actor. The hub runs on this host.

        On work pools, a trainer on several hosts is started on each host.
        """
        self._begin(name, self._create(name))
        if name == TRAINER and self._is_pooled:
            for node in range(1, self._run.config.placement.trainer_nodes):
                self._begin(f"{NODE_PREFIX}{node}", self._create(f"{NODE_PREFIX}{node}"))

    def _begin(self, name: str, member: Role) -> None:
        self._members[name] = member  # before the start, so that a Ctrl-C during the start stops the role too
        member.begin()

    def wait_for_machine(self) -> bool:
        """Whether a flow run of the trainer or of an evaluation waits for a worker, or every flow run of an actor.

        False after MACHINE_SECONDS of waiting, so that the deadlines of the caller end the wait.
        """
        waiting = {
            name for name, member in self._members.items() if not member.is_running() and not member.has_ended()
        }
        actors = {name for name in self._members if name.startswith("actor-")}
        is_needed = any(name.startswith((TRAINER, EVALUATOR_PREFIX)) for name in waiting)
        if not is_needed and not (actors and actors <= waiting):
            self._waiting_since = None
            return False
        if self._waiting_since is None:
            self._waiting_since = time.monotonic()
            logger.warning(
                "waiting at most %.0f h for workers: %s", MACHINE_SECONDS / 3600, ", ".join(sorted(waiting))
            )
        return time.monotonic() - self._waiting_since < MACHINE_SECONDS

    def evaluate(self, version: str, enough: float | None = None) -> None:
        """Evaluate `first`, `last` or `all` on this host and wait for the result; raises the error of a failed role.

        An evaluator beside training evaluates the first and the last version too, unless it has ended.
        enough: accuracy after which, once two versions have reached it, the later versions of `all` are left out.
        """
        deadline = time.monotonic() + self._run.config.evaluation_seconds
        name = f"{EVALUATOR_PREFIX}{version}"
        wanted = eval_key(0 if version == "first" else self._run.config.trainer.steps)
        while EVALUATOR in self._members and not self.has_ended(EVALUATOR):
            if self._run.store.exists(wanted):
                return
            deadline = self._wait_for_evaluation(name, deadline)
        if EVALUATOR in self._members and self._run.store.exists(wanted):
            return
        self._begin(name, self._evaluator(version, enough))
        while not self.has_ended(name):
            deadline = self._wait_for_evaluation(name, deadline)

    def _wait_for_evaluation(self, name: str, deadline: float) -> float:
        """Wait a moment; returns the deadline, which moves while the evaluation waits for a worker."""
        seconds = self._run.config.evaluation_seconds
        if self.wait_for_machine():
            deadline = time.monotonic() + seconds
        if time.monotonic() > deadline:
            raise DeadlineExceeded(f"{name}: not done after {seconds:.0f} s. Set a lower eval.num_prompts")
        self.wait(_POLL_SECONDS)
        return deadline

    def _create(self, name: str) -> Role:
        run, url, restarts = self._run, self._run.store.url, self._run.config.placement.max_restarts
        if name == HUB:
            return self._on_this_host(HUB, name, {})
        if name == EVALUATOR:
            return self._evaluator(SCHEDULED)
        if name.startswith(EVALUATOR_PREFIX):  # as a flow run on the actors' work pool
            version, _, enough = name.removeprefix(EVALUATOR_PREFIX).partition(_ENOUGH)
            return self._evaluator(version, float(enough) if enough else None)
        if self._is_pooled:
            if name.startswith((TRAINER, NODE_PREFIX)):
                node = {} if name == TRAINER else {"node": int(name.removeprefix(NODE_PREFIX))}
                variables = job_variables(run.config, TRAINER)
                return DeployedRole("trainer/trainer", {"run_url": url, **node}, name, restarts, variables)
            parameters = {"run_url": url, "name": name}
            return DeployedRole("actor/actor", parameters, name, restarts, job_variables(run.config, ACTOR))
        if name == TRAINER:
            return self._on_this_host(TRAINER, name, {})
        if name.startswith(NODE_PREFIX):
            return self._on_this_host("trainer_node", name, {"node": name.removeprefix(NODE_PREFIX)})
        return self._on_this_host(ACTOR, name, {"name": name})

    def _on_this_host(self, role: str, name: str, arguments: dict[str, str]) -> LocalRole:
        run, has_hub = self._run, HUB in self._members
        task = run_role.with_options(name=role.replace("_", "-"))
        return LocalRole(lambda stop: task.submit(run, role, name, arguments, stop, has_hub=has_hub), self._changed)

    def _evaluator(self, version: str, enough: float | None = None) -> Role:
        """On work pools, an evaluator that needs vLLM or a GPU runs where actors run: this host may have neither."""
        config = self._run.config
        if self._is_pooled and (config.engine.has_workers or gpus_of(config, EVALUATOR)):
            name, restarts = f"{EVALUATOR_PREFIX}{version}", config.placement.max_restarts
            if enough is not None:
                name += f"{_ENOUGH}{enough}"
            parameters = {"run_url": self._run.store.url, "name": name}
            return DeployedRole("actor/actor", parameters, name, restarts, job_variables(config, ACTOR))
        return LocalRole(lambda stop: run_evaluation.submit(self._run, version, stop, enough), self._changed)

    def has_ended(self, name: str) -> bool:
        """Whether a role has ended; raises the error of any failed role but the evaluator, which is logged once."""
        for other, member in self._members.items():
            if member.has_ended():
                try:
                    member.check()
                except Fenced:
                    self._is_fenced = True
                    raise
                except Exception as error:
                    if other != EVALUATOR:
                        raise
                    self._note_failed_evaluator(error)
                self._check_node(other)
        return self._members[name].has_ended()

    def _note_failed_evaluator(self, error: Exception) -> None:
        if not self._has_evaluator_failed:
            logger.warning("no further evaluations during training: %s", error)
        self._has_evaluator_failed = True

    def _check_node(self, name: str) -> None:
        """Raise RoleFailed if a further host of the trainer has ended before the run, for example was cancelled."""
        if name.startswith(NODE_PREFIX) and self._is_pooled and not is_over(self._run):
            raise RoleFailed(
                f"{name}: its flow run has ended, and the trainer cannot take a step without its ranks. Continue "
                f"with `pipelinerl resume {self._run.run_id}`; if the host is gone, lower trainer.ranks and "
                "placement.trainer_nodes"
            )

    def wait(self, seconds: float) -> None:
        """Wait until a role of this host ends, at most `seconds`. Raises KeyboardInterrupt, once, at a stop of the
        comparison of the run."""
        self._changed.wait(seconds)
        self._changed.clear()
        if (thread := RUN_THREAD.get()) is not None and thread.stop.is_set():
            RUN_THREAD.set(None)
            raise KeyboardInterrupt
        self._on_wait()

    def wait_until(self, condition_name: str, condition: Callable[[], bool], seconds: float) -> None:
        """Wait for a condition; raises the error of a role that ends meanwhile, or DeadlineExceeded.

        condition_name: the condition as the errors name it.
        """
        deadline = time.monotonic() + seconds
        while not condition():
            for name in self._members:
                if self.has_ended(name) and name != EVALUATOR:
                    raise RoleFailed(f"{name}: ended while waiting for {condition_name}")
            if self.wait_for_machine():
                deadline = time.monotonic() + seconds
            if time.monotonic() > deadline:
                raise DeadlineExceeded(
                    f"{condition_name}: not there after {seconds:.0f} s. See the logs of the roles"
                )
            self.wait(_POLL_SECONDS)

    def stop(self, *, keep_evaluator: bool = False) -> None:
        """Stop all roles: actors and trainer, which need the hub until then, then the hub. Raises no error of a role.

        keep_evaluator: the evaluator goes on, because it needs no other role; the caller may begin evaluations.

        A second Ctrl-C ends the wait for actors and trainer, a third Ctrl-C the wait for all roles. All roles receive
        the request to stop even then, because the flow waits for the threads that supervise them.
        """
        members = {name: member for name, member in self._members.items() if name != EVALUATOR or not keep_evaluator}
        if self._is_fenced:
            members = {name: member for name, member in members.items() if isinstance(member, LocalRole)}
        workers = [member for name, member in members.items() if name != HUB]
        begun = time.monotonic()
        all_members = list(members.values())
        try:
            request_stop(workers)
            self._await(workers, begun + WORKERS_SECONDS)
        finally:
            request_stop(all_members)
            self._await(all_members, begun + STOP_SECONDS)
        for name in members:  # an error of a stopped role no longer counts
            del self._members[name]
        if self._is_pooled and not self._is_fenced and not keep_evaluator:
            name = secret_name(self._run.store.url)
            _quietly(f"could not delete the Secret block {name}", lambda: Secret.delete(name))
            self._is_pooled = False  # a second stop finds nothing to do

    def _await(self, members: list[Role], deadline: float) -> None:
        while time.monotonic() < deadline and not all(member.has_ended() for member in members):
            self.wait(min(_POLL_SECONDS, max(0.0, deadline - time.monotonic())))


def job_variables(config: RunConfig, role: str) -> dict[str, Any]:
    """Job variables of an `actor` or of the `trainer`: its GPUs, and memory for the size of the model."""
    sizes = container_bytes(config, role)
    if sizes is None:
        return {"gpu_count": gpus_of(config, role)}
    own_bytes, shared_bytes = sizes
    return {
        "gpu_count": gpus_of(config, role),
        "memory_request": _gibibytes(own_bytes + shared_bytes),  # Kubernetes counts /dev/shm as memory of the pod
        "shm_size": _gibibytes(shared_bytes),
    }


def _gibibytes(num_bytes: float) -> str:
    return f"{math.ceil(num_bytes / 2**30)}Gi"


def request_stop(members: Sequence[Role]) -> None:
    """Call `stop` of each member, also if an exception such as Ctrl-C interrupts one call."""
    with ExitStack() as stack:
        for member in reversed(members):
            stack.callback(member.stop)


def _quietly(failure: str, action: Callable[[], Any]) -> None:
    """Call the Prefect API; an error is logged: an outage of the server must not end a run or prevent its stop."""
    try:
        action()
    except Exception as error:  # noqa: BLE001 (the run does not depend on the Prefect server, whatever the client raises)
        logger.warning("%s: %s", failure, error)


def run_tag(run_id: str) -> str:
    """Tag of all flow runs of a run: train, trainer and actors."""
    return f"pipelinerl.run:{run_id}"


def started_run(resume: str = "") -> str:
    """Id of the run that an earlier start of this flow run has created, or resumed; empty without an earlier start.

    resume: the parameter of the flow run. A copy of a flow run may have the tags of its original.
    """
    wanted = resume.rpartition("/")[2] or new_run_id("", str(flow_run.id)).removeprefix("run")
    ids = (tag.removeprefix(run_tag("")) for tag in flow_run.tags or () if tag.startswith(run_tag("")))
    return next((run_id for run_id in ids if run_id.endswith(wanted)), "")


def is_deployed() -> bool:
    """Whether a worker has started the current flow run. Asks no server, unlike `prefect.runtime.deployment`."""
    context = FlowRunContext.get()
    return bool(context and context.flow_run and context.flow_run.deployment_id)


def name_flow_run(run_id: str, parameters: Mapping[str, str], tags: Sequence[str] = (), *, is_new: bool) -> None:
    """Give the current flow run the name and the tags of its run, and the parameters by which a retry finds the run.

    is_new: no step of the run is trained yet. If a worker has started the flow run, raises PipelineRLError if the
    server does not store the parameters: a retry on a worker with another root would start the run again at step 0.
    """
    try:
        all_tags = dict.fromkeys([*flow_run.tags, *tags, run_tag(run_id)])
        own = UUID(str(flow_run.id))
        with get_client(sync_client=True) as client:
            stored = client.read_flow_run(own).parameters
            client.update_flow_run(own, name=run_id, tags=list(all_tags), parameters={**stored, **parameters})
    except Exception as error:  # noqa: BLE001 (whatever the client raises)
        if is_new and parameters and is_deployed():
            raise PipelineRLError(
                f"{run_id}: the Prefect server did not store the location of the run ({error}). Retry the flow run"
            ) from None
        logger.warning("the flow run could not be named: %s", error)


def secret_name(url: str) -> str:
    """Name of the Prefect Secret block with the hub token of the run at a URL, on work pools."""
    run_id = re.sub(r"[^a-z0-9-]", "-", url.rpartition("/")[2].lower())  # no other characters are allowed
    return f"pipelinerl-{run_id}-{hashlib.sha256(url.encode()).hexdigest()[:8]}"


def hub_token(run: RunContext) -> str:
    """The hub token for a start of a run: PIPELINERL_TOKEN, else the token in the run's Secret block, else a new one.

    Roles on work pools outlive a killed train flow and connect to the hub of the next start with the token they have.
    """
    token = given_token()
    if not token and run.config.placement.kind == "work_pools":
        with suppress(ConfigError):
            token = load_token(run.store.url)
    return token or secrets.token_urlsafe(32)


def load_token(url: str) -> str:
    """The hub token in the Secret block of the run at a URL. Raises ConfigError if there is no such block."""
    try:
        block = Secret.load(secret_name(url))
    except ValueError as error:
        raise ConfigError(
            f"no Prefect Secret block {secret_name(url)}: the train flow of the run must be running ({error})"
        ) from None
    if not isinstance(block, Secret):
        raise PipelineRLError(f"the Prefect block {secret_name(url)} is not a Secret block")
    return str(block.get())
