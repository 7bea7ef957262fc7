"""Messages to operators: the automations that send them (docs/operations.md), and their text and links.

pipelinerl-resume schedules most crashed flow runs again, and the runner and the worker may both report one crash.
Therefore a crash itself sends no message.

All links are labels of the flow run, which the flows set when they start, so that every message has them, also after
a kill -9 of the flow.
"""

import logging
from collections.abc import Mapping, Sequence
from datetime import timedelta
from uuid import UUID

from prefect import get_client
from prefect.automations import Automation
from prefect.client.schemas.objects import StateType
from prefect.events.actions import DoNothing, SendNotification
from prefect.events.schemas.automations import EventTrigger, Posture
from prefect.events.schemas.events import ResourceSpecification
from prefect.runtime import flow_run
from prefect.settings import PREFECT_CLIENT_MAX_RETRIES, get_current_settings, temporary_settings
from prefect.types import KeyValueLabels

from pipelinerl.tasks.alarms import ACTOR_MISMATCH, PART_FAILED, QUERY_ANSWERED, REWARD_COLLAPSED, RUN_STALLED
from pipelinerl.tasks.automations import OURS

logger = logging.getLogger(__name__)

TEST_EVENT = "pipelinerl.notification.test"
ALARM = "pipelinerl-alarm"
RESTART_TIME = timedelta(minutes=10)
"""Within which a crashed flow run is Running again: the automation, a free worker, and the start of a container."""
URL_LABEL, PAGE_LABEL = "pipelinerl.url", "pipelinerl.page"
MLFLOW_LABEL, REPORT_LABEL = "pipelinerl.mlflow", "pipelinerl.report"
_LINKS = {"Run": URL_LABEL, "Page": PAGE_LABEL, "MLflow": MLFLOW_LABEL, "Report": REPORT_LABEL}

_TOLD_FLOWS = ResourceSpecification(
    {"prefect.resource.name": ["train", "compare", "sweep"], "prefect.resource.role": ["flow"]}
)
_ENDS = [StateType.COMPLETED, StateType.FAILED, StateType.CANCELLED]
_LATER_STATES = [*_ENDS, StateType.RUNNING, StateType.CANCELLING, StateType.PAUSED]
_CRASHED = "prefect.flow-run.Crashed"
_PLAIN = "|replace('<', '\u2039')|replace('@everyone', '@ everyone')|replace('@here', '@ here')"
"""Text of a user in a message calls nobody and is no link, neither in Slack nor in Discord."""
_NAME = "PipelineRL: {{ event.resource.name" + _PLAIN + " }}"
_REASON = (
    "{% set is_done = event.resource['prefect.state-type'] == 'COMPLETED' %}"
    "{{ ((event.resource['prefect.state-message'] or ('finished without an error' if is_done else 'no message'))"
    "|trim).splitlines()|first|truncate(500)" + _PLAIN + " }}"
)
"""The first line of the message of the state; Prefect gives Completed none."""


def label_flow_run(labels: Mapping[str, str | None]) -> None:
    """Label the current flow run with links for messages. None: unknown, an earlier label stays."""
    known: KeyValueLabels = {name: link for name, link in labels.items() if link}
    try:
        own = UUID(str(flow_run.id))
        with temporary_settings({PREFECT_CLIENT_MAX_RETRIES: 1}), get_client(sync_client=True) as client:
            client.update_flow_run_labels(own, known)
    except Exception as error:  # noqa: BLE001 (the run does not depend on the Prefect server, whatever the client raises)
        logger.warning("messages about this flow run will have no links: %s", error)


def notifying_automations(blocks: Sequence[UUID]) -> list[Automation]:
    """The three automations that send messages.

    blocks: document ids of notification blocks; each gets all messages. Without blocks nothing is sent.
    """
    return [_alarm(blocks), _run_ended(blocks), _not_resumed(blocks)]


def _alarm(blocks: Sequence[UUID]) -> Automation:
    return Automation(
        name=ALARM,
        description="Sends a notification if the reward of a run has collapsed, a run makes no progress, no group of "
        "a part of a mixture is trained, or the tokens of an actor are not of the versions that they name.",
        trigger=EventTrigger(
            expect={ACTOR_MISMATCH, PART_FAILED, QUERY_ANSWERED, REWARD_COLLAPSED, RUN_STALLED, TEST_EVENT},
            match=ResourceSpecification({"prefect.resource.id": ["pipelinerl.run.*"]}),
            for_each={"prefect.resource.id"},
            posture=Posture.Reactive,
            threshold=1,
            within=timedelta(0),
        ),
        actions=_messages(blocks, f"{_NAME}: {{{{ event.event }}}}", "{{ event.payload.message" + _PLAIN + " }}"),
    )


def _run_ended(blocks: Sequence[UUID]) -> Automation:
    return Automation(
        name="pipelinerl-run-ended",
        description="Sends a notification if a flow run of train, compare or sweep is completed, drained, failed, "
        "given up or cancelled.",
        trigger=EventTrigger(
            expect={"prefect.flow-run.*"},
            match=_in_state(_ENDS),
            match_related=[OURS, _TOLD_FLOWS],
            for_each={"prefect.resource.id"},
            posture=Posture.Reactive,
            threshold=1,
            within=timedelta(0),
        ),
        actions=_messages(blocks, f"{_NAME} is {{{{ event.resource['prefect.state-name'] }}}}", _REASON),
    )


def _not_resumed(blocks: Sequence[UUID]) -> Automation:
    minutes = f"{RESTART_TIME.total_seconds() / 60:.0f} minutes"
    return Automation(
        name="pipelinerl-not-resumed",
        description=f"Sends a notification if a flow run of train, compare or sweep has crashed and is not started "
        f"again within {minutes}.",
        trigger=EventTrigger(
            after={_CRASHED},
            # With Crashed among the expected events, a further crash starts the time again.
            expect={"prefect.flow-run.*"},
            match=_in_state([*_LATER_STATES, StateType.CRASHED]),
            match_related=[OURS, _TOLD_FLOWS],
            for_each={"prefect.resource.id"},
            posture=Posture.Proactive,
            threshold=1,
            within=RESTART_TIME,
        ),
        actions=_messages(
            blocks,
            f"{_NAME} has crashed and is not started again",
            f"Not Running for {minutes} after the crash; Retry continues a train run. {_REASON}",
        ),
    )


def _in_state(types: Sequence[StateType]) -> ResourceSpecification:
    """Changes of the state of a flow run to one of these types; other events, such as heartbeats, have no type."""
    return ResourceSpecification(
        {"prefect.resource.id": ["prefect.flow-run.*"], "prefect.state-type": [each.value for each in types]}
    )


def _messages(blocks: Sequence[UUID], subject: str, text: str) -> list[SendNotification | DoNothing]:
    """The actions that send a message with all links; without a block, DoNothing."""
    body = text + _link_lines()
    return [SendNotification(block_document_id=block, subject=subject, body=body) for block in blocks] or [
        DoNothing()
    ]


def _link_lines() -> str:
    """Template of the links of a message. A server without PREFECT_UI_URL is named as `deploy` reaches it."""
    pages = f"{get_current_settings().ui_url or ''}/runs/flow-run/"
    lines = ["\nFlow run: {{ flow_run|ui_url or '" + pages + "' ~ flow_run.id }}"]
    for name, label in _LINKS.items():
        value = f"flow_run.labels['{label}']"
        lines.append("{% if " + value + " %}\n" + name + ": {{ " + value + " }}{% endif %}")
    return "{% if flow_run %}" + "".join(lines) + "{% endif %}"
