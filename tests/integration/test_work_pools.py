"""placement.kind=work_pools, as an operations team uses it: a Prefect server on PostgreSQL, `pipelinerl deploy`, one
process worker per pool, one run on which everything happens: actors come, are cancelled and killed, the train flow is
killed, the whole is cancelled and tried again, and drained at last. The audit closes.
"""

import json
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path
from uuid import UUID

import psutil
import pytest
from prefect.automations import Automation
from prefect.client.orchestration import get_client
from prefect.client.schemas.actions import DeploymentUpdate
from prefect.events.actions import CallWebhook
from prefect.settings import PREFECT_API_URL, temporary_settings

from pipelinerl.flows.cli import notification
from pipelinerl.tasks.notifications import TEST_EVENT
from pipelinerl.tasks.suspension import HELD_EVENT
from pipelinerl_core.errors import PipelineRLError
from pipelinerl_core.ledger import ActorKey
from pipelinerl_core.run.history import counted_commit_keys, read_commit
from pipelinerl_core.storage.object_store import open_store
from tests.integration.pipeline import ROOT, assert_closes, committed_steps
from tests.integration.prefect_server import MAX_RESUMES, Prefect, await_, postgres
from tests.integration.webhook import SECRET, Webhook, webhook

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

CANCEL_SECONDS = 120.0
"""Within which a cancelled run leaves nothing behind."""
SUSPEND_SECONDS = 120.0
"""Within which a suspended run has drained."""
STABLE_SECONDS = 5.0
"""A worker asks for work every two seconds."""


@pytest.fixture(scope="module")
def hook() -> Iterator[Webhook]:
    with webhook() as receiver:
        yield receiver


@pytest.fixture(scope="module")
def prefect(tmp_path_factory: pytest.TempPathFactory, hook: Webhook) -> Iterator[Prefect]:
    home = tmp_path_factory.mktemp("prefect")
    with postgres() as database:
        server = Prefect(home, database)
        try:
            server.start("--notify", hook.url)
            yield server
        finally:
            server.stop()


MEMBERS = ("actor-0", "actor-1", "trainer", "trainer-node-1")


def name_of(parameters: dict) -> str:
    """Of the role that a flow run with these parameters supervises."""
    return parameters.get("name") or (f"trainer-node-{parameters['node']}" if parameters.get("node") else "trainer")


class Job:
    """The train flow run of a test, and its run in the store."""

    def __init__(self, prefect: Prefect, root: Path) -> None:
        self.prefect = prefect
        self.id = await_(prefect.runs, "the flow run", 60)[0]["id"]
        url = await_(lambda: list(root.glob("quickstart-*")), "the run", 120)[0]
        self.url = str(url)

    @property
    def state(self) -> str:
        return self.prefect.run(self.id)["state_type"]

    def take_steps(self, num: int, event: str) -> None:
        """Wait until so many more steps are committed."""
        target = committed_steps(self.url) + num
        await_(lambda: committed_steps(self.url) >= target, f"{num} steps after {event}", 300)

    def newest(self, name: str) -> dict:
        """Newest flow run of an actor, or of a host of the trainer."""
        others = [run for run in self.prefect.runs() if run["id"] != self.id]
        return [run for run in others if name_of(run["parameters"]) == name][-1]

    def state_of(self, name: str) -> str:
        """Of the newest; empty while there is none."""
        with suppress(IndexError):
            return str(self.newest(name)["state_type"])
        return ""

    def await_state(self, run_id: str, *states: str) -> None:
        await_(lambda: self.prefect.run(run_id)["state_type"] in states, f"{run_id} in {states}", 240)

    def actors_heard(self) -> set[str]:
        """Names of the actors that the newest commit knows."""
        store = open_store(self.url)
        keys = counted_commit_keys(store)
        return {ActorKey.parse(key).name for key in read_commit(store, keys[max(keys)]).actors}

    def role_processes(self) -> list[psutil.Process]:
        """Hub, trainer and actors of the run."""
        processes = []
        for process in psutil.process_iter():
            with suppress(psutil.Error):
                line = process.cmdline()
                if self.url in " ".join(line) and "pipelinerl_core.roles" in " ".join(line):
                    processes.append(process)
        return processes


@pytest.mark.campaign
def test_everything_that_happens_to_a_run_on_work_pools(prefect, hook, tmp_path, prepared_model):
    root = tmp_path / "runs"
    settings = {"steps": 100_000, "actors": 2, "placement": "work_pools", "groups_per_step": 8, "concurrency": 32}
    overrides = ["eval.num_prompts=50", "trainer.ranks=2", "placement.trainer_nodes=2"]
    overrides += ["placement.trainer_host=127.0.0.1"]  # both of its hosts are this one
    start = [
        "deployment",
        "run",
        "train/quickstart",
        "-p",
        f"root={root}",
        "-p",
        f"overrides={json.dumps(overrides)}",
    ]
    with pytest.raises(subprocess.CalledProcessError):
        prefect.command(*start, "-p", 'settings={"steps": 0}')
    assert prefect.runs() == [], "the server has refused it"
    prefect.command(*start, "-p", f"settings={json.dumps(settings)}")
    job = Job(prefect, root)
    await_(lambda: committed_steps(job.url) >= 3, "three steps", 400)
    await_(lambda: {job.state_of(name) for name in MEMBERS} == {"RUNNING"}, "all members", 120)
    run_id = Path(job.url).name
    assert prefect.run(job.id)["name"] == run_id
    for name in MEMBERS:
        member = job.newest(name)
        assert member["name"] == f"{run_id}-{name}"
        assert prefect.ask(f"/task_runs/{member['parent_task_run_id']}")["flow_run_id"] == job.id
    assert all(f"pipelinerl.run:{run_id}" in run["tags"] for run in prefect.runs())
    assert check_no_torch(prefect) >= 5, "train, actors and both hosts of the trainer"
    assert "preflight" in {task["name"] for task in prefect.ask("/task_runs/filter", {})}, "nobody else has checked"

    actors_come_and_go(job)
    the_train_flow_is_killed(job)
    mlflow = Path(job.url, "run.json").read_text()
    the_whole_is_cancelled(job)
    prefect.set_state(job.id, type="SCHEDULED", name="AwaitingRetry")  # the button Retry
    job.take_steps(3, "the retry")
    assert Path(job.url, "run.json").read_text() == mlflow, "the same run, under the same MLflow run"

    drain = [sys.executable, "-m", "pipelinerl.flows.cli", "drain", job.url]
    subprocess.run(drain, env=prefect.environment, cwd=ROOT, check=True, timeout=180)
    await_(lambda: job.state in ("COMPLETED", "FAILED"), "the end", 300)
    run = prefect.run(job.id)
    assert (run["state_name"], run["run_count"]) == ("Drained", 3), prefect.log_tail()
    for name in (*MEMBERS, "third"):
        job.await_state(job.newest(name)["id"], "COMPLETED", "CANCELLED")
    assert job.role_processes() == []
    assert_closes(job.url)
    await_(lambda: hook.about(run_id)[-1:] == [" is Drained"], "the message of the end", 60)
    assert hook.about(run_id) == [" is Cancelled", " is Drained"], "none of the crash that was resumed"


def actors_come_and_go(job: Job) -> None:
    """A third joins, one is cancelled in the UI, one is killed with its flow."""
    prefect = job.prefect
    first, second = job.newest("actor-0"), job.newest("actor-1")
    prefect.command("deployment", "run", "actor/actor", "-p", f"run_url={job.url}", "-p", "name=third")
    await_(lambda: "third" in job.actors_heard(), "a commit that knows the third actor", 240)
    prefect.set_state(first["id"], type="CANCELLING")
    job.await_state(first["id"], "CANCELLED")
    job.take_steps(2, "an actor was cancelled")
    for process in prefect.flow_processes(second["id"]):
        with suppress(psutil.NoSuchProcess):
            process.kill()
    job.await_state(second["id"], "CRASHED")
    await_(lambda: job.newest("actor-1")["id"] != second["id"], "a flow run in the place of the killed one", 240)
    job.await_state(job.newest("actor-1")["id"], "RUNNING")
    job.take_steps(2, "an actor was killed")
    assert job.newest("actor-0")["id"] == first["id"], "who was cancelled is not replaced"
    assert job.state == "RUNNING"


def the_train_flow_is_killed(job: Job) -> None:
    """The automation schedules the same flow run again."""
    for process in job.prefect.flow_processes(job.id):
        with suppress(psutil.NoSuchProcess):
            process.kill()
    await_(lambda: job.prefect.run(job.id)["run_count"] == 2, "the second start of the flow run", 120)
    job.take_steps(3, "the train flow was killed")
    assert (job.state, job.newest("third")["state_type"]) == ("RUNNING", "RUNNING"), "who had joined is still there"


def the_whole_is_cancelled(job: Job) -> None:
    """Neither a flow process nor a role is left."""
    job.prefect.set_state(job.id, type="CANCELLING")
    begun = time.monotonic()
    while left := [*job.role_processes(), *job.prefect.flow_processes(job.id)]:
        assert time.monotonic() - begun < CANCEL_SECONDS, left
        time.sleep(0.2)
    job.await_state(job.id, "CANCELLED")


def check_no_torch(prefect: Prefect) -> int:
    """Number of flow processes; none of them has torch or an engine in memory."""
    processes = prefect.flow_processes()
    for process in processes:
        mapped = Path(f"/proc/{process.pid}/maps").read_text()
        assert "libtorch" not in mapped
        assert "vllm" not in mapped
    return len(processes)


def test_the_commands_of_the_tutorial_start_a_run_and_a_schedule(prefect, hook, tmp_path, prepared_model):
    page = (ROOT / "docs" / "tutorials" / "prefect.md").read_text()
    run, schedule = (shlex.split(line)[1:] for line in page.splitlines() if line.startswith("prefect deployment"))
    prefect.command(*schedule)
    (deployment,) = prefect.ask("/deployments/filter", {"deployments": {"name": {"any_": ["quickstart"]}}})
    (deployment_schedule,) = deployment["schedules"]
    assert (deployment_schedule["schedule"]["cron"], deployment_schedule["schedule"]["timezone"]) == (
        "0 2 * * *",
        "Europe/Berlin",
    )
    prefect.command("deployment", "schedule", "clear", "train/quickstart", "--accept-yes")
    known = {candidate["id"] for candidate in prefect.runs()}
    for wrong in ('overrides=["eval.every=0"]', "preset=quickstrat"):
        with pytest.raises(subprocess.CalledProcessError):
            prefect.command(*run, "-p", wrong)
    fewer = [word.replace('{"steps": 40}', '{"steps": 3}') for word in run]
    assert fewer != run
    prefect.command(
        *fewer, "-p", f"root={tmp_path}", "-p", 'overrides=["eval.num_prompts=8", "trainer.groups_per_step=4"]'
    )
    (started,) = [candidate["id"] for candidate in prefect.runs() if candidate["id"] not in known]
    await_(
        lambda: prefect.run(started)["state_type"] in ("COMPLETED", "FAILED", "CRASHED"), "the end of the run", 300
    )
    assert prefect.run(started)["state_type"] == "COMPLETED", prefect.log_tail()
    (url,) = tmp_path.glob("quickstart-*")
    assert prefect.run(started)["name"] == url.name
    assert committed_steps(str(url)) == 3
    await_(lambda: hook.about(url.name), "the message of the end", 60)
    assert hook.about(url.name) == [" is Completed"]
    assert hook.body_about(url.name).split("\n")[1:] == [
        f"Flow run: {prefect.url.removesuffix('/api')}/runs/flow-run/{started}",
        f"Run: {url.as_uri()}",
        f"Report: {url.as_uri()}/report.html",
    ]


def test_a_test_message_is_sent_by_the_server_and_a_webhook_that_fails_is_told(prefect, hook, monkeypatch):
    with temporary_settings({PREFECT_API_URL: prefect.url}):
        notified = notification.read_deployed()
        assert {slug for each in notified for slug in each.blocks.values()} == {"custom-webhook/pipelinerl-notify"}
        assert notification.send_test(notified) == ["custom-webhook/pipelinerl-notify"]
        assert hook.about("PipelineRL: test") == [f": {TEST_EVENT}"]
        hook.status = 404
        monkeypatch.setattr(notification, "TEST_SECONDS", 3.0)
        with pytest.raises(PipelineRLError, match="the webhook answers HTTP 404 Not Found"):
            notification.send_test(notified)
        hook.status = 200
    documents = prefect.ask("/block_documents/filter", {"include_secrets": False})
    assert SECRET not in json.dumps(documents)


def test_a_suspended_run_drains_and_stays_so_until_it_is_resumed_and_a_deleted_flow_run_ends(
    prefect, hook, tmp_path, prepared_model
):
    settings = {"steps": 100_000, "groups_per_step": 8, "concurrency": 32}
    known = {run["id"] for run in prefect.runs()}
    prefect.command(
        *(
            "deployment",
            "run",
            "train/quickstart",
            "-p",
            f"root={tmp_path}",
            "-p",
            'overrides=["eval.num_prompts=0"]',
        ),
        *("-p", f"settings={json.dumps(settings)}"),
    )
    (run,) = [candidate["id"] for candidate in prefect.runs() if candidate["id"] not in known]
    url = str(await_(lambda: list(tmp_path.glob("quickstart-*")), "the run", 120)[0])
    await_(lambda: committed_steps(url) >= 2, "two steps", 300)
    details = {"pause_reschedule": True, "pause_timeout": (datetime.now(UTC) + timedelta(seconds=20)).isoformat()}
    prefect.set_state(run, type="PAUSED", name="Suspended", state_details=details)  # the button Suspend
    await_(lambda: not prefect.flow_processes(run), "the end of the process", SUSPEND_SECONDS)
    flow_run, steps = prefect.run(run), committed_steps(url)
    assert flow_run["state_name"] == "Suspended"
    assert flow_run["state"]["message"] == f"suspended after step {steps}; Resume continues the run"
    assert flow_run["state"]["state_details"]["pause_timeout"] is None
    assert_closes(url)
    occurred = {"event": {"name": [HELD_EVENT]}, "occurred": {"since": flow_run["start_time"]}}
    await_(lambda: prefect.ask("/events/filter", {"filter": occurred})["events"], "an event after the heartbeats", 60)
    assert (prefect.run(run)["state_name"], committed_steps(url)) == ("Suspended", steps)
    prefect.ask(f"/flow_runs/{run}/resume", {})  # the button Resume
    await_(lambda: committed_steps(url) >= steps + 2, "two further steps", 300)
    processes = prefect.flow_processes(run)
    prefect.delete(f"/flow_runs/{run}")
    await_(lambda: not any(process.is_running() for process in processes), "the end", SUSPEND_SECONDS)
    assert_closes(url)
    assert hook.about(Path(url).name) == [], "Suspend and Resume are no ends"


def test_a_flow_run_that_never_comes_to_run_again_is_given_up_by_name(prefect, hook):
    """It was Running, its host is gone, and where it is started now its process ends at once."""
    (deployment,) = prefect.ask("/deployments/filter", {"deployments": {"name": {"any_": ["quickstart"]}}})
    body = {"state": {"type": "PENDING"}, "job_variables": {"command": "false"}}
    run = prefect.ask(f"/deployments/{deployment['id']}/create_flow_run", body)["id"]
    for state in ("RUNNING", "CRASHED"):
        prefect.set_state(run, type=state)

    def stays_given_up() -> bool:
        """The word may come too late to stop a start; then the next count has begun."""
        before = state_names()
        time.sleep(STABLE_SECONDS)
        return state_names() == before and before[-1] == "GivenUp"

    def state_names() -> list[str]:
        states = prefect.ask(f"/flow_run_states/?flow_run_id={run}")
        return [state["name"] for state in sorted(states, key=lambda state: state["timestamp"])]

    await_(stays_given_up, "giving up for good", 300)
    flow_run = prefect.run(run)
    assert (flow_run["state_type"], flow_run["state_name"], flow_run["run_count"]) == ("FAILED", "GivenUp", 1)
    assert (
        f"never became Running, after {MAX_RESUMES} restarts (deploy --max-resumes=" in flow_run["state"]["message"]
    )
    num_resumed = state_names().count("AwaitingRetry")
    assert num_resumed % (MAX_RESUMES + 1) == 0, state_names()
    assert num_resumed > 0
    num_ends = state_names().count("GivenUp")
    await_(lambda: len(hook.about(flow_run["name"])) >= num_ends, "the message of the end", 60)
    assert hook.about(flow_run["name"]) == [" is GivenUp"] * num_ends
    assert "never became Running" in hook.messages[-1]["body"]


def test_deploy_keeps_what_operators_have_changed(prefect):
    prefect.command("deployment", "schedule", "create", "train/nightly", "--cron", "5 4 * * *")
    prefect.command("deployment", "schedule", "create", "evaluate/evaluate", "--interval", "3600")
    with temporary_settings({PREFECT_API_URL: prefect.url}), get_client(sync_client=True) as client:

        def schedules():
            named = [client.read_deployment_by_name(name) for name in ("train/nightly", "evaluate/evaluate")]
            return [len(deployment.schedules) for deployment in named]

        nightly = client.read_deployment_by_name("train/nightly").id
        update = DeploymentUpdate(paused=True, tags=["pipelinerl", "night"], concurrency_limit=3)
        client.update_deployment(nightly, update)
        resume = Automation.read(name="pipelinerl-resume")
        added = CallWebhook(block_document_id=UUID(int=1))
        resume.model_copy(update={"actions": [*resume.actions, added]}).update()
        kept = {
            "train/nightly": ["schedules", "paused", "tags", "concurrency_limit"],
            "evaluate/evaluate": ["schedules"],
        }
        for _ in range(2):
            again = prefect.deploy("--max-resumes", str(MAX_RESUMES))
            assert again["kept"] == kept
            assert again["notified"] == ["custom-webhook/pipelinerl-notify"]
            assert {*again["deployments"].values(), *again["automations"].values()} == {"unchanged"}
            after = client.read_deployment(nightly)
            assert (after.paused, sorted(after.tags)) == (True, ["night", "pipelinerl"])
            assert after.global_concurrency_limit.limit == 3
            assert schedules() == [2, 1]
            assert added in Automation.read(name="pipelinerl-resume").actions
        reset = prefect.deploy("--max-resumes", str(MAX_RESUMES), "--reset")
        assert {name for name, change in reset["deployments"].items() if change == "updated"} == set(kept)
        assert (reset["kept"], schedules()) == ({}, [1, 0])
        assert reset["notified"], "the receivers stay"
        after = client.read_deployment(nightly)
        assert (after.paused, sorted(after.tags)) == (False, ["nightly", "pipelinerl"])
        assert len(Automation.read(name="pipelinerl-resume").actions) == 1
