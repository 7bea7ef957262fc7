"""Automations of a Prefect server that keep runs going and call people: made once, changed when they differ.

| name | when | then |
|------|------|------|
| pipelinerl-unresponsive | a flow run of ours has sent no heartbeat for 90 s | it is Crashed |
| pipelinerl-resume | a train run has Crashed once it ran | it is scheduled again |
| pipelinerl-give-up | it was scheduled again so often without ever running | it is Failed, and says why |
| pipelinerl-alarm | a run says that its reward has collapsed, or that it stands still | a notification |

A resumed run is the same run: a second copy is refused while the first one lives, and fenced if both start at once.
A flow run that runs counts its starts without a new commit itself (tasks/restart_limit.py). If it dies before that,
for example because an image is missing, it cannot count, and its run count does not change: then the server counts.
"""

from collections.abc import Iterable
from datetime import timedelta
from typing import Any, Literal, cast
from uuid import UUID

from prefect import get_client
from prefect.automations import Automation
from prefect.client.schemas.objects import StateType
from prefect.events.actions import ChangeFlowRunState, DoNothing, SendNotification
from prefect.events.schemas.automations import EventTrigger, Posture
from prefect.events.schemas.events import ResourceSpecification

from pipelinerl.tasks.alarms import REWARD_COLLAPSED, RUN_STALLED
from pipelinerl_core.config.sections import PlacementConfig
from pipelinerl_core.restart_budget import spent_text

HEARTBEAT_SECONDS = 30
"""Set as PREFECT_FLOWS_HEARTBEAT_FREQUENCY in prefect.yaml; Prefect's own default is 180."""
DEFAULT_MAX_RESUMES = PlacementConfig().max_resumes
LEAST_RESUMES = 2
"""One crash may be reported twice, by runner and worker, and is resumed twice then."""
RESUME_MESSAGE = "resumed after a crash"
"""Of the state in which pipelinerl-resume puts a flow run, by which pipelinerl-give-up knows it."""
COUNTING_TIME = timedelta(days=7)
"""Resumes that lie further apart are not counted together."""
TAG = "pipelinerl"
"""On every deployment of ours, and so on its flow runs."""

_RESUMED_STATE = "AwaitingRetry"
_WAITING_STATE = "AwaitingConcurrencySlot"
"""Scheduled too, on the way from one that somebody has set."""

_FLOW_RUNS = ResourceSpecification({"prefect.resource.id": ["prefect.flow-run.*"]})
# One that was never Running may never be able to: whoever started it sees that at once.
_HAVE_RUN = ResourceSpecification(
    {"prefect.resource.id": ["prefect.flow-run.*"], "prefect.run-count": [str(count) for count in range(1, 1000)]}
)
_RESUMED = ResourceSpecification(
    {"prefect.resource.id": ["prefect.flow-run.*"], "prefect.state-message": [RESUME_MESSAGE]}
)
_OURS = ResourceSpecification({"prefect.resource.id": [f"prefect.tag.{TAG}"], "prefect.resource.role": ["tag"]})
_TRAIN = ResourceSpecification({"prefect.resource.name": ["train"], "prefect.resource.role": ["flow"]})

Change = Literal["created", "updated", "unchanged"]


def wanted_automations(notify_block: UUID | None, max_resumes: int = DEFAULT_MAX_RESUMES) -> list[Automation]:
    """All of them.

    notify_block: document id of a notification block such as a SlackWebhook. max_resumes: how often a flow run is
    scheduled again without coming to run, at least LEAST_RESUMES.
    """
    return [_unresponsive(), _resume(), _give_up(max_resumes), _alarm(notify_block)]


def _unresponsive() -> Automation:
    return Automation(
        name="pipelinerl-unresponsive",
        description="A flow run whose heartbeats have stopped is Crashed: its host or its process is gone.",
        trigger=EventTrigger(
            after={"prefect.flow-run.heartbeat"},
            expect={"prefect.flow-run.*"},
            match=_FLOW_RUNS,
            match_related=[_OURS],
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
        description="A crashed train run goes on where its last commit is. pipelinerl-give-up ends one that never "
        "comes to run; placement.max_resumes bounds the starts without a new commit of one that does.",
        trigger=EventTrigger(
            expect={"prefect.flow-run.Crashed"},
            # Runner and worker both report a crash, one perhaps after it was scheduled again: each report counts.
            match=_HAVE_RUN,
            match_related=[_OURS, _TRAIN],
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
        description=f"A train run that was resumed {max_resumes} times and died each time before it ran is Failed.",
        trigger=EventTrigger(
            # It follows the resume, so that the two never race; a Failed flow run that crashes is not Crashed again.
            # The first of these events opens the count, and one that comes too late to stop the flow run opens the
            # next.
            after=scheduled_again,
            expect=scheduled_again,
            match=_RESUMED,
            match_related=[_OURS, _TRAIN],
            # The run count grows when the flow run is Running: each life has a count of its own.
            for_each={"prefect.resource.id", "prefect.run-count"},
            posture=Posture.Reactive,
            threshold=max_resumes,
            within=COUNTING_TIME,
        ),
        actions=[
            ChangeFlowRunState(
                state=StateType.FAILED,
                name="GivenUp",
                message=f"given up: this flow run never came to run, "
                f"{spent_text(max_resumes, f'deploy --max-resumes={max_resumes}')}. The log of its worker says why "
                "its process ends; Retry goes on with the run once that is mended",
                force=True,
            )
        ],
    )


def _alarm(notify_block: UUID | None) -> Automation:
    body = "{{ event.payload.message }}\nRun: {{ event.resource.id }}"
    return Automation(
        name="pipelinerl-alarm",
        description="A run whose reward has collapsed, or that stands still.",
        trigger=EventTrigger(
            expect={REWARD_COLLAPSED, RUN_STALLED},
            match=ResourceSpecification({"prefect.resource.id": ["pipelinerl.run.*"]}),
            for_each={"prefect.resource.id"},
            posture=Posture.Reactive,
            threshold=1,
            within=timedelta(0),
        ),
        actions=[
            SendNotification(block_document_id=notify_block, subject="PipelineRL: {{ event.event }}", body=body)
            if notify_block is not None
            else DoNothing()
        ],
    )


def was_resumed(flow_run_id: UUID) -> bool:
    """Whether pipelinerl-resume has scheduled this start of a flow run; a person did otherwise."""
    with get_client(sync_client=True) as client:
        states = client.read_flow_run_states(flow_run_id)
    scheduled = [state for state in states if state.is_scheduled() and state.name != _WAITING_STATE]
    newest = max(scheduled, key=lambda state: state.timestamp, default=None)
    return newest is not None and newest.message == RESUME_MESSAGE


def apply_automations(wanted: Iterable[Automation]) -> dict[str, Change]:
    """Make the server's automations of these names what they should be; name -> what was done."""
    return {automation.name: _apply(automation) for automation in wanted}


def _apply(wanted: Automation) -> Change:
    try:
        found = cast(Automation, Automation.read(name=wanted.name))
    except ValueError:
        wanted.create()
        return "created"
    if _content(found) == _content(wanted):
        return "unchanged"
    changed = found.model_copy(update={name: getattr(wanted, name) for name in ("description", "trigger", "actions")})
    changed.update()
    return "updated"


def _content(automation: Automation) -> dict[str, Any]:
    """What a user could see change; not whether somebody has switched it off."""
    content = automation.model_dump(mode="json", include={"description", "trigger", "actions"})
    trigger = content["trigger"]
    trigger.pop("id", None)
    for name in ("after", "expect", "for_each"):  # sets
        trigger[name] = sorted(trigger[name])
    return content
