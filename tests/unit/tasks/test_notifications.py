"""Which events of the Prefect server send a message, and what it says; with Prefect's matching and templates."""

from datetime import UTC, datetime
from uuid import uuid4

import pytest
from prefect.server.events.jinja_filters import all_filters
from prefect.server.events.schemas.automations import EventTrigger
from prefect.server.events.schemas.events import ReceivedEvent
from prefect.server.schemas.responses import FlowRunResponse
from prefect.server.utilities.user_templates import register_user_template_filters, render_user_template_sync
from prefect.settings import PREFECT_API_URL, PREFECT_UI_URL, temporary_settings

from pipelinerl.tasks.alarms import RUN_STALLED
from pipelinerl.tasks.notifications import MLFLOW_LABEL, REPORT_LABEL, URL_LABEL, notifying_automations

RUN = "quickstart-12345678"
MLFLOW = "http://mlflow:5000/#/experiments/1/runs/2?workflowType=machine_learning"
ALARM, ENDED, NOT_RESUMED = range(3)


def state_event(name, state_type, message=None, *, flow="train", tag="pipelinerl"):
    flow_run = f"prefect.flow-run.{uuid4()}"
    resource = {
        "prefect.resource.id": flow_run,
        "prefect.resource.name": RUN,
        "prefect.state-name": name,
        "prefect.state-type": state_type,
        "prefect.state-message": message or "",
    }
    related = [
        {"prefect.resource.id": f"prefect.flow.{uuid4()}", "prefect.resource.role": "flow"}
        | {"prefect.resource.name": flow},
        {"prefect.resource.id": f"prefect.tag.{tag}", "prefect.resource.role": "tag"},
    ]
    return event(f"prefect.flow-run.{name}", resource, related)


def event(name, resource, related=(), payload=None):
    return ReceivedEvent(
        id=uuid4(),
        event=name,
        occurred=datetime.now(UTC),
        resource=resource,
        related=list(related),
        payload=payload or {},
    )


def trigger_of(index):
    return EventTrigger.model_validate(notifying_automations(())[index].trigger.model_dump())


@pytest.mark.parametrize(
    ("told", "options"),
    [
        (True, {"name": "Completed", "state_type": "COMPLETED"}),
        (True, {"name": "Drained", "state_type": "COMPLETED"}),
        (True, {"name": "Failed", "state_type": "FAILED"}),
        (True, {"name": "GivenUp", "state_type": "FAILED"}),
        (True, {"name": "Cancelled", "state_type": "CANCELLED", "flow": "compare"}),
        (False, {"name": "Crashed", "state_type": "CRASHED"}),
        (False, {"name": "Suspended", "state_type": "PAUSED"}),
        (False, {"name": "AwaitingRetry", "state_type": "SCHEDULED"}),
        (False, {"name": "Cancelling", "state_type": "CANCELLING"}),
        (False, {"name": "Failed", "state_type": "FAILED", "flow": "actor"}),
        (False, {"name": "Completed", "state_type": "COMPLETED", "tag": "of-somebody-else"}),
    ],
)
def test_ends_of_train_and_compare_are_told_and_nothing_that_goes_on(told, options):
    assert trigger_of(ENDED).covers(state_event(**options)) is told


def test_a_heartbeat_is_neither_an_end_nor_a_restart():
    beat = event("prefect.flow-run.heartbeat", {"prefect.resource.id": f"prefect.flow-run.{uuid4()}"})
    assert not any(trigger_of(index).covers(beat) for index in (ENDED, NOT_RESUMED))


@pytest.mark.parametrize(
    ("name", "state_type", "counts"),
    [
        ("Running", "RUNNING", True),
        ("GivenUp", "FAILED", True),  # told as an end
        ("Cancelled", "CANCELLED", True),
        ("AwaitingRetry", "SCHEDULED", False),  # perhaps no worker takes it
        ("Pending", "PENDING", False),
    ],
)
def test_a_crash_is_told_unless_the_flow_run_runs_again_or_ends(name, state_type, counts):
    trigger = trigger_of(NOT_RESUMED)
    crash = state_event("Crashed", "CRASHED")
    assert trigger.covers(crash)
    assert trigger.starts_after(crash.event)
    assert trigger.expects(crash.event), "Prefect starts the time again at a further crash"
    assert trigger.covers(state_event(name, state_type)) is counts
    assert not trigger.starts_after(f"prefect.flow-run.{name}")


def render(index, triggering, flow_run, ui="http://prefect:4200"):
    register_user_template_filters(all_filters)
    with temporary_settings({PREFECT_API_URL: f"{ui}/api"}):
        (action,) = notifying_automations([uuid4()])[index].actions
    with temporary_settings({PREFECT_API_URL: None, PREFECT_UI_URL: None}):  # a server that does not know its address
        context = {"event": triggering, "flow_run": flow_run}
        return [render_user_template_sync(text, context) for text in (action.subject, action.body)]


def flow_run_with(labels):
    return FlowRunResponse.model_construct(id=uuid4(), labels=labels)


def test_a_failure_has_the_run_the_first_line_of_the_reason_and_all_links():
    message = "Flow run encountered an exception: RoleFailed: trainer: exit code 1\n\nand more lines"
    labels = {URL_LABEL: f"s3://b/{RUN}", MLFLOW_LABEL: MLFLOW, REPORT_LABEL: f"s3://b/{RUN}/report.html"}
    flow_run = flow_run_with(labels)
    subject, body = render(ENDED, state_event("Failed", "FAILED", message), flow_run)
    assert subject == f"PipelineRL: {RUN} is Failed"
    assert body.splitlines() == [
        "Flow run encountered an exception: RoleFailed: trainer: exit code 1",
        f"Flow run: http://prefect:4200/runs/flow-run/{flow_run.id}",
        f"Run: s3://b/{RUN}",
        f"MLflow: {MLFLOW}",
        f"Report: s3://b/{RUN}/report.html",
    ]


def test_text_of_a_user_calls_nobody_and_is_no_link():
    message = "\n  <!channel> @everyone see <https://evil.example|Flow run>"
    _, body = render(ENDED, state_event("Failed", "FAILED", message), flow_run_with({}))
    assert body.splitlines()[0] == "\u2039!channel> @ everyone see \u2039https://evil.example|Flow run>"


def test_a_message_has_no_line_for_what_is_unknown():
    flow_run = flow_run_with({})
    subject, body = render(ENDED, state_event("Completed", "COMPLETED"), flow_run)
    assert subject == f"PipelineRL: {RUN} is Completed"
    assert body.splitlines() == [
        "finished without an error",
        f"Flow run: http://prefect:4200/runs/flow-run/{flow_run.id}",
    ]
    subject, body = render(NOT_RESUMED, state_event("Crashed", "CRASHED", "no heartbeat"), flow_run)
    assert subject == f"PipelineRL: {RUN} has crashed and is not started again"
    assert body.startswith("Not Running for 10 minutes after the crash; Retry continues a train run. no heartbeat\n")


def test_an_alarm_names_the_run_and_has_links_if_a_flow_run_sent_it():
    resource = {"prefect.resource.id": f"pipelinerl.run.{RUN}", "prefect.resource.name": RUN}
    alarm = event(RUN_STALLED, resource, payload={"message": "no commit"})
    assert trigger_of(ALARM).covers(alarm)
    assert render(ALARM, alarm, None) == [f"PipelineRL: {RUN}: pipelinerl.run.stalled", "no commit"]
    assert f"\nMLflow: {MLFLOW}" in render(ALARM, alarm, flow_run_with({MLFLOW_LABEL: MLFLOW}))[1]


def test_without_a_block_nothing_is_sent_and_every_block_gets_every_message():
    assert {action.type for each in notifying_automations(()) for action in each.actions} == {"do-nothing"}
    blocks = [uuid4(), uuid4()]
    for automation in notifying_automations(blocks):
        assert [action.block_document_id for action in automation.actions] == blocks
