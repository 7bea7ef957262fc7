"""The automations on a Prefect server that restart runs (docs/operations.md); `pipelinerl deploy` applies them.

A resumed flow run continues the same training run: a second copy is refused while the first copy is live, and fenced
if both start at the same time. A flow run that becomes Running counts its starts without a new commit
(pipelinerl_core/run/start_count.py). A flow run that dies before it becomes Running, for example because an image is
missing, cannot count, and its run count does not change; pipelinerl-give-up counts such starts on the server.
"""

import logging
from datetime import timedelta
from typing import Any, Literal, cast
from uuid import UUID

from prefect import get_client
from prefect.automations import Automation
from prefect.client.schemas.objects import State, StateType
from prefect.events.actions import ChangeFlowRunState, DoNothing
from prefect.events.schemas.automations import EventTrigger, Posture
from prefect.events.schemas.events import ResourceSpecification

from pipelinerl_core.config.sections import PlacementConfig
from pipelinerl_core.restart_budget import spent_text

HEARTBEAT_SECONDS = 30
"""prefect.yaml sets PREFECT_FLOWS_HEARTBEAT_FREQUENCY to this value; Prefect's default is 180."""
DEFAULT_MAX_RESUMES = PlacementConfig().max_resumes
LEAST_RESUMES = 2
"""Runner and worker may both report one crash; the crash is then resumed twice."""
RESUME_MESSAGE = "resumed after a crash"
"""Message of the state that pipelinerl-resume sets; pipelinerl-give-up counts states with this message."""
OUTAGE_MESSAGE = "the store does not answer"
"""Beginning of the message of the state that a flow run sets after an outage of the store (outage.py)."""
COUNTING_TIME = timedelta(days=7)
"""pipelinerl-give-up counts the resumes within this time."""
logger = logging.getLogger(__name__)

TAG = "pipelinerl"
"""Tag of every deployment in prefect.yaml; Prefect copies the tag to their flow runs."""

_RESUMED_STATE = "AwaitingRetry"
_WAITING_STATE = "AwaitingConcurrencySlot"
"""Also of type Scheduled; Prefect sets this state after a Scheduled state that a user or an automation has set."""

_FLOW_RUNS = ResourceSpecification({"prefect.resource.id": ["prefect.flow-run.*"]})
# A flow run that was never Running may never be able to run, and its user sees the failure at once: no resume.
_HAVE_RUN = ResourceSpecification(
    {"prefect.resource.id": ["prefect.flow-run.*"], "prefect.run-count": [str(count) for count in range(1, 1000)]}
)
_RESUMED = ResourceSpecification(
    {"prefect.resource.id": ["prefect.flow-run.*"], "prefect.state-message": [RESUME_MESSAGE]}
)
OURS = ResourceSpecification({"prefect.resource.id": [f"prefect.tag.{TAG}"], "prefect.resource.role": ["tag"]})
_TRAIN = ResourceSpecification({"prefect.resource.name": ["train"], "prefect.resource.role": ["flow"]})

Change = Literal["created", "updated", "unchanged"]


def restart_automations(max_resumes: int = DEFAULT_MAX_RESUMES) -> list[Automation]:
    """The three automations that restart runs.

    max_resumes: how often a flow run is scheduled again without becoming Running, at least LEAST_RESUMES.
    """
    return [_unresponsive(), _resume(), _give_up(max_resumes)]


def _unresponsive() -> Automation:
    return Automation(
        name="pipelinerl-unresponsive",
        description="Marks a flow run as Crashed if its heartbeats have stopped: its host or its process is gone.",
        trigger=EventTrigger(
            after={"prefect.flow-run.heartbeat"},
            expect={"prefect.flow-run.*"},
            match=_FLOW_RUNS,
            match_related=[OURS],
            for_each={"prefect.resource.id"},
            posture=Posture.Proactive,
            threshold=1,
            within=timedelta(seconds=3 * HEARTBEAT_SECONDS),
        ),
        actions=[ChangeFlowRunState(state=StateType.CRASHED, message="no heartbeat")],
    )


def _resume() -> Automation:
    return Automation(
        name="pipelinerl-resume",
        description="Schedules a crashed train run again; the run continues from its last commit. pipelinerl-give-up "
        "ends a flow run that never becomes Running; placement.max_resumes limits the starts without a new commit.",
        trigger=EventTrigger(
            expect={"prefect.flow-run.Crashed"},
            # Runner and worker both report a crash, the second perhaps after the resume: each report triggers.
            match=_HAVE_RUN,
            match_related=[OURS, _TRAIN],
            for_each={"prefect.resource.id"},
            posture=Posture.Reactive,
            threshold=1,
            within=timedelta(0),
        ),
        actions=[
            ChangeFlowRunState(state=StateType.SCHEDULED, name=_RESUMED_STATE, message=RESUME_MESSAGE, force=True)
        ],
    )


def _give_up(max_resumes: int) -> Automation:
    scheduled_again = {f"prefect.flow-run.{_RESUMED_STATE}"}
    return Automation(
        name="pipelinerl-give-up",
        description=f"Marks a train run as Failed if the run was resumed {max_resumes} times and died before "
        "it was Running.",
        trigger=EventTrigger(
            # The trigger is an event of pipelinerl-resume, so that the two automations never race; a Failed flow run
            # does not become Crashed again. The first event opens a count; an event that arrives after the limit was
            # reached opens the next count.
            after=scheduled_again,
            expect=scheduled_again,
            match=_RESUMED,
            match_related=[OURS, _TRAIN],
            # The run count grows whenever the flow run becomes Running: the resumes are counted anew then.
            for_each={"prefect.resource.id", "prefect.run-count"},
            posture=Posture.Reactive,
            threshold=max_resumes,
            within=COUNTING_TIME,
        ),
        actions=[
            ChangeFlowRunState(
                state=StateType.FAILED,
                name="GivenUp",
                message=f"given up: this flow run never became Running, "
                f"{spent_text(max_resumes, f'deploy --max-resumes={max_resumes}')}. The log of its worker shows why "
                "its process ends; correct the cause, then continue the run with Retry",
                force=True,
            )
        ],
    )


def was_resumed(flow_run_id: UUID) -> bool:
    """Whether pipelinerl-resume, or the flow run itself after an outage, scheduled this start; if not, a user did."""
    states, place = _schedules(flow_run_id)
    return place is not None and (states[place].message or "").startswith((RESUME_MESSAGE, OUTAGE_MESSAGE))


def ended_before_resume(flow_run_id: UUID) -> State | None:
    """The state in which the flow run had ended when pipelinerl-resume scheduled this start; None for other starts.

    After a restart of the server, the event of a crash may be handled 15 minutes late. A flow run that was only
    thought to have crashed may have ended since, or a user may have cancelled it. If the server does not answer, the
    start goes on.
    """
    try:
        states, place = _schedules(flow_run_id)
    except Exception as error:  # noqa: BLE001 (whatever the client raises; an outage must not fail the run)
        logger.warning("the states of the flow run could not be read, the start goes on: %s", error)
        return None
    if place is None or not _is_resume(states[place]):
        return None
    while place and (states[place].is_pending() or _is_resume(states[place])):  # each report of the crash resumes
        place -= 1
    before = states[place]
    return before if before.is_final() and not before.is_crashed() else None


def _is_resume(state: State) -> bool:
    return state.is_scheduled() and (state.message or "").startswith(RESUME_MESSAGE)


def _schedules(flow_run_id: UUID) -> tuple[list[State], int | None]:
    """The states of a flow run by time, and the place of the newest state that schedules it."""
    with get_client(sync_client=True) as client:
        states = sorted(client.read_flow_run_states(flow_run_id), key=lambda state: state.timestamp)
    states = [state for state in states if state.name != _WAITING_STATE]
    return states, max((place for place, state in enumerate(states) if state.is_scheduled()), default=None)


def apply_automation(wanted: Automation, *, reset: bool = False, keeps_actions: bool = False) -> Change:
    """Create or update the server's automation of this name.

    Unless `reset`, actions of further types that an operator has added stay. keeps_actions: all actions stay.
    """
    try:
        existing = cast(Automation, Automation.read(name=wanted.name))
    except ValueError:
        wanted.create()
        return "created"
    if not reset:
        actions = existing.actions if keeps_actions else _merged(wanted.actions, existing.actions)
        wanted = wanted.model_copy(update={"actions": actions})
    if _content(existing) == _content(wanted):
        return "unchanged"
    fields = ("description", "trigger", "actions")
    existing.model_copy(update={name: getattr(wanted, name) for name in fields}).update()
    return "updated"


def _merged(wanted: list[Any], existing: list[Any]) -> list[Any]:
    kinds = {DoNothing, *map(type, wanted)}
    return [*wanted, *(action for action in existing if type(action) not in kinds)]


def _content(automation: Automation) -> dict[str, Any]:
    """The fields that `deploy` sets. `enabled` is left out: a user may switch an automation off."""
    content = automation.model_dump(mode="json", include={"description", "trigger", "actions"})
    trigger = content["trigger"]
    trigger.pop("id", None)
    for name in ("after", "expect", "for_each"):  # sets
        trigger[name] = sorted(trigger.get(name) or ())  # an operator may have set a trigger of another type
    return content
