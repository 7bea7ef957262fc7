"""What people see: the pages of Prefect, of MLflow and of a run, in a real browser, of one short run.

PIPELINERL_UPDATE_SCREENSHOTS=1 makes the run longer and writes the pictures of docs/images.
"""

import json
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from urllib.error import URLError
from urllib.request import urlopen

import pytest

from pipelinerl_core.report import live_page, root_pages
from pipelinerl_core.report.root_pages import RootPages
from pipelinerl_core.report.web import build_server
from pipelinerl_core.run.commits import read_commits
from pipelinerl_core.run.records import RUN_KEY, commit_key
from pipelinerl_core.storage.object_store import open_store
from pipelinerl_core.types import FinishReason
from tests.integration.browser import Page, browser
from tests.integration.cli_case import committed
from tests.integration.pipeline import ROOT
from tests.integration.prefect_server import Prefect
from tests.ports import free_port
from tests.synthetic_run import Shape, make_rollout, put_batch, put_record, training_row, write_run
from tests.waiting import wait_for

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]

UPDATES = bool(os.environ.get("PIPELINERL_UPDATE_SCREENSHOTS"))
IMAGES = ROOT / "docs" / "images"
STEPS = 60 if UPDATES else 5
SMALL = ("trainer.groups_per_step=8", "engine.concurrency=32", "eval.num_prompts=0", "schedule.max_lag=1")
SETTINGS = (
    f"trainer.steps={STEPS}",
    "store.trainer_logprobs=true",
    *(("eval.num_prompts=200",) if UPDATES else SMALL),
)
SWEEP = (
    *("learner.lr=1e-3,3e-4,1e-4,3e-5,1e-5,1e-6", "trainer.steps=16", "trainer.groups_per_step=16"),
    *("engine.concurrency=64", "eval.num_prompts=200", "--limit", "2"),
)
START_SECONDS = 300.0
RUN_SECONDS = 400.0


@dataclass(frozen=True)
class World:
    """Servers that answer, and a run that has finished."""

    prefect: Prefect
    mlflow: str
    live: str
    report: dict


def answers(url: str) -> bool:
    try:
        with urlopen(url, timeout=2) as answer:
            return bool(answer.status == 200)
    except (URLError, OSError):
        return False


def start_mlflow(home: Path, port: int) -> "subprocess.Popen[bytes]":
    command = [str(Path(sys.executable).parent / "mlflow"), "server", "--host", "127.0.0.1", "--port", str(port)]
    command += ["--backend-store-uri", f"sqlite:///{home}/mlflow.db", "--artifacts-destination", str(home / "files")]
    environment = {**os.environ, "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false", "MLFLOW_DISABLE_TELEMETRY": "true"}
    with (home / "mlflow.log").open("wb") as log:
        return subprocess.Popen(
            [*command, "--workers", "1"], env=environment, cwd=home, stdout=log, stderr=log, start_new_session=True
        )


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory, prepared_model: Path, page: Page) -> Iterator[World]:
    home = tmp_path_factory.mktemp("browser")
    prefect = Prefect(home)
    mlflow = f"http://127.0.0.1:{free_port()}"
    try:
        prefect.processes.append(start_mlflow(home, int(mlflow.rpartition(":")[2])))
        wait_for(
            lambda: prefect.is_healthy() and answers(f"{mlflow}/health"), f"both servers, {home}/*log", START_SECONDS
        )
        live = f"http://127.0.0.1:{free_port()}"
        prefect.environment["PIPELINERL_SERVE_URL"] = live
        train = start(prefect, "train", "quickstart", "--json", *SETTINGS, f"tracking.mlflow_uri={mlflow}")
        prefect.deploy()
        wait_for(lambda: committed(home / "runs") >= STEPS // 2, "half of the steps", RUN_SECONDS, process=train)
        start(prefect, "serve", "--port", live.rpartition(":")[2])
        wait_for(lambda: answers(f"{live}/"), f"the live view, {home / 'log'}", START_SECONDS)
        if UPDATES:
            page.go(f"{live}/runs/latest/")
            page.sees(f"/{STEPS}", "Reward against rollouts trained", "Roles over time")
            assert train.poll() is None, "the run ended before the picture was taken"
            page.value("document.querySelector('#live').style.position = 'static'")
            page.picture(IMAGES / "live.png", height=1900)
        assert train.wait(RUN_SECONDS) == 0, (home / "log").read_text()[-3000:]
        report = json.loads((home / "train.out").read_text())
        yield World(prefect, mlflow, live, report)
    finally:
        prefect.stop()


def start(prefect: Prefect, *arguments: str) -> "subprocess.Popen[bytes]":
    """A pipelinerl command with the server, its root and its output beside it."""
    command = [sys.executable, "-m", "pipelinerl.flows.cli", *arguments, "--root", str(prefect.home / "runs")]
    with (prefect.home / "log").open("ab") as log, (prefect.home / f"{arguments[0]}.out").open("wb") as output:
        prefect.processes.append(
            subprocess.Popen(command, env=prefect.environment, cwd=ROOT, stdout=output, stderr=log)
        )
    return prefect.processes[-1]


@pytest.fixture(scope="module")
def page() -> Iterator[Page]:
    with browser() as page:
        yield page


@pytest.fixture
def picture(page: Page, tmp_path: Path):
    """A function that makes a picture, for docs/images when these are to be written."""

    def take(name: str, **how) -> None:
        page.picture(tmp_path / name, **how)
        assert (tmp_path / name).stat().st_size > 10_000, "an empty page"
        if UPDATES:
            shutil.copy(tmp_path / name, IMAGES / name)

    return take


def field_of(label: str) -> str:
    """JavaScript that finds the input of a form's field."""
    return f"""(() => {{
        let one = [...document.querySelectorAll("label")].find(one => one.innerText.startsWith({json.dumps(label)}));
        while (one && !one.querySelector("input, textarea")) one = one.parentElement;
        return one?.querySelector("input, textarea");
    }})()"""


def test_the_form_of_a_deployment_describes_each_field_and_refuses_values_out_of_bounds(world, page, picture):
    deployments = world.prefect.ask("/deployments/filter", {})
    deployment = next(candidate["id"] for candidate in deployments if candidate["name"] == "quickstart")
    url = f"{world.prefect.url.removesuffix('/api')}/deployments/deployment/{deployment}/run"
    page.go(url, height=1300)
    page.until("its defaults", f"{field_of('preset')}?.value === 'quickstart'")
    page.sees("Steps (Optional)", "Optimizer steps of the run.", "Max Lag (Optional)", "Learning Rate (Optional)")
    page.sees("Settings that differ from the preset", "conventional", "april", "pipelinerl config --keys")
    page.sees("Model (Optional)", "Data (Optional)", "Reward (Optional)", "Environment (Optional)")
    assert "Property is type" not in page.text, "every field can be typed into"
    for label, value in (
        ("Data", "rows.jsonl"),
        ("Reward", "my_rewards.py:score"),
        ("Steps", "300"),
        ("Max Lag", "8"),
    ):
        page.fill(field_of(label), value)
    page.value(f"{field_of('preset')}.scrollIntoView({{block: 'center'}})")
    picture("form.png")
    for label in ("Data", "Reward", "Max Lag"):
        page.fill(field_of(label), "")
    page.fill(field_of("Steps"), "0")
    page.click("Submit")
    page.sees("settings.steps", "0 is less than the minimum of 1")
    page.go(url)
    page.until("its defaults", f"{field_of('preset')}?.value === 'quickstart'")
    page.fill(field_of("Steps"), "3")
    page.click("Submit")
    page.sees("train")
    page.until("its state", r"/\bScheduled\b|\bLate\b/.test(document.body.innerText)")  # nobody works here
    runs = world.prefect.ask("/flow_runs/filter", {"deployments": {"id": {"any_": [deployment]}}})
    (settings,) = (run["parameters"]["settings"] for run in runs)
    assert settings["steps"] == 3
    assert settings["schedule"] is None


def test_the_page_of_a_flow_run_shows_its_roles_logs_and_artifacts(world, page, picture):
    flow_run = next(run for run in world.prefect.ask("/flow_runs/filter", {}) if run["state_name"] == "Completed")
    page.go(f"{world.prefect.url.removesuffix('/api')}/runs/flow-run/{flow_run['id']}")
    run_id = world.report["run_id"]
    page.sees("Completed", "train", f"{run_id}", "actor-0: started, pid", "trainer: started, pid")
    picture("prefect.png", height=660)  # above what names directories of this machine
    page.click("Task Runs")
    page.sees("hub", "trainer", "actor-0", "report")
    page.click("Artifacts")
    page.sees(
        "quickstart-progress", "quickstart-versions", "quickstart-report", "quickstart-mlflow", "quickstart-page"
    )
    links = {artifact["key"]: artifact["data"] for artifact in world.prefect.ask("/artifacts/filter", {})}
    assert f"({world.live}/runs/{run_id}/)" in links["quickstart-page"]


def mlflow_page(world: World) -> str:
    artifacts = world.prefect.ask("/artifacts/filter", {})
    link = next(artifact["data"] for artifact in artifacts if artifact["key"] == "quickstart-mlflow")
    return str(link.partition("(")[2].rstrip(")"))


def test_mlflow_shows_metrics_parameters_tags_datasets_and_a_table_of_rollouts(world, page, picture):
    url = mlflow_page(world)
    assert url.startswith(world.mlflow)
    page.go(url)
    page.sees(world.report["run_id"], "Finished", "Model training", "sums (", "Train")
    page.sees("schedule", "pipeline", "engine", "embedded", "preset", "quickstart")
    page.sees("reward/mean", "progress/samples", "schedule.max_lag", "learner.lr")
    close_assistant(page)
    place, _, query = url.partition("?")
    page.go(f"{place}/model-metrics?{query}", width=1600, height=1000)
    page.until("a chart", "!!document.querySelector('.js-plotly-plot')")
    close_assistant(page)
    page.sees("actor", "lag", "progress", "reward", "tokens", "weights")
    page.fill("document.querySelector('input[placeholder*=metric]')", "^lag/|^reward/")
    page.until("the charts of this search", "document.querySelectorAll('.js-plotly-plot').length === 5")
    hide = "{innerText: '.modebar { display: none }'}"  # it lies over the curves where there is no mouse
    page.value(f"document.head.append(Object.assign(document.createElement('style'), {hide}))")
    picture("mlflow.png")
    page.go(f"{place}/artifacts/rollouts.json?{query}", width=1600, height=800)
    page.sees("rollouts.json", "View as table", "completion", "versions", "outcome", "scored", "actor-0", "<eos>")
    close_assistant(page)
    picture("mlflow-rollouts.png")


def test_mlflow_shows_the_last_version_as_a_model_and_sampled_rollouts_as_traces(world, page, picture):
    place, _, query = mlflow_page(world).partition("?")
    page.go(f"{place}/traces?{query}", width=1600, height=800)
    page.sees(world.report["run_id"], "Trace ID", "Request", "Response", "<eos>")
    page.go(f"{place.partition('/runs/')[0]}/models?{query}", width=1600, height=800)
    model = f"{world.report['run_id']}-v{STEPS}"
    page.sees(model, "Ready")
    page.click(model)
    page.sees("About this logged model", "Source run", "weights_digest", "config_digest")
    close_assistant(page)
    picture("mlflow-model.png", height=780)


def close_assistant(page: Page) -> None:
    """MLflow's assistant takes a quarter of the window the first time."""
    page.value("[...document.querySelectorAll('button[aria-label=Close]')].forEach(one => one.click())")


HERO = """
    const hide = one => { one.style.display = 'none'; };
    document.querySelectorAll('.tiles, header .meta, header .advice, #diagnosis').forEach(hide);
    const named = name => [...document.querySelectorAll('section')].find(
        one => one.querySelector('h2')?.innerText === name);
    named('Evaluations').querySelectorAll(':scope > p:first-of-type, .pair:first-of-type').forEach(hide);
    named('Evaluations').querySelector('h2').innerText = 'Before and after';
    named('Learning').querySelectorAll('.pair > figure:nth-of-type(n+3)').forEach(hide);
    named('Freshness').getBoundingClientRect().top + scrollY - 30
"""
"""JavaScript that leaves roles, reward and completions of a report; its value is their height in pixels."""


def test_the_report_begins_with_roles_reward_and_completions(world, page, picture):
    page.go(f"{world.live}/runs/latest/", width=1200)
    page.sees("Roles over time", "Reward against wall clock", *(("Version 0",) if UPDATES else ()))
    height = int(page.value(HERO))
    assert 400 < height < 2000
    picture("report.png", height=height)


def test_the_live_page_shows_reward_lag_ledger_lanes_and_tokens_by_version(world, page):
    page.go(f"{world.live}/")
    page.sees("Runs", world.report["run_id"], "finished", f"{STEPS} of {STEPS}")
    page.click(world.report["run_id"])
    page.sees(f"{world.report['run_id']}: finished, step {STEPS}/{STEPS}")
    page.sees("Reward against rollouts trained", "Lag of trained tokens", "Token ledger", "masked_stale")
    page.sees(
        "Roles over time",
        "actor-0",
        "trainer",
        "Share of the tokens generated so far",
        "The classes account for every generated token.",
    )
    drawn = page.value(
        "[...document.querySelectorAll('svg')].filter(one => one.getBoundingClientRect().width > 100).length"
    )
    assert drawn >= 7, "figures of reward, lanes, lag, ess, pauses, lengths, ledger"
    colours = page.value(
        "[...document.querySelectorAll('.rollout pre span[title^=version]')]"
        ".map(one => [one.title, getComputedStyle(one).backgroundColor])"
    )
    by_version = dict(colours)
    assert len(by_version) >= 2, f"tokens of several versions: {by_version}"
    assert len(set(by_version.values())) >= 2, f"each with its own tint: {by_version}"
    assert page.value("document.documentElement.scrollWidth <= innerWidth"), "nothing is cut off at 1280 pixels"
    assert page.errors == []


def test_rollouts_of_all_steps_lead_to_the_ratios_of_their_tokens(world, page, picture):
    page.go(f"{world.live}/runs/latest/rollouts?step=all&sort=-step&where=advantage<>0", width=1200)
    page.sees("Rollouts of all steps", "advantage")
    picture("rollouts.png", height=760)
    page.value("document.querySelector('section a').click()")
    page.sees("Rollout ", "this prompt in all steps", "swapped")
    page.click("ratio")
    page.until("the ratios", "[...document.querySelectorAll('.rollout span[title]')].every(one => "
               "one.title.includes('ratio') || one.title.includes('given'))")  # fmt: skip
    picture("rollout.png", height=640)
    assert page.errors == []


@pytest.mark.skipif(not UPDATES, reason="six runs, for a picture")
def test_the_page_of_a_sweep_has_its_table_and_figure(page, picture, tmp_path, prepared_model):
    command = [sys.executable, "-m", "pipelinerl.flows.cli", "sweep", "quickstart", *SWEEP]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PREFECT_")}
    subprocess.run([*command, "--root", str(tmp_path)], cwd=ROOT, env=environment, check=True, timeout=1000)
    (html,) = tmp_path.glob("comparisons/*/comparison.html")
    page.go(html.as_uri(), width=1200)
    page.sees("Highest last accuracy", "Table", "Figure", "Runs")
    runs = "[...document.querySelectorAll('section')].at(-1).getBoundingClientRect().top + scrollY"
    picture("sweep.png", height=int(page.value(runs)))
    assert page.errors == []


def test_the_diagnosis_is_a_picture_with_rollouts(page, picture, served, tmp_path):
    write_run(open_store(str(tmp_path / "quickstart-1")), Shape(steps=10, finish_reason=FinishReason.LENGTH))
    page.go(f"{served}/runs/quickstart-1/", width=1200, height=1600)
    page.sees("Diagnosis", "of the newest rollouts were cut off")
    page.value("document.querySelector('#diagnosis details').open = true")
    picture("diagnosis.png", selector="#diagnosis")


@pytest.fixture
def served(tmp_path, monkeypatch):
    """Address of a server of a root without runs."""
    monkeypatch.setattr(live_page, "STATUS_SECONDS", 0.0)
    monkeypatch.setattr(root_pages, "LIST_SECONDS", 0.0)
    server = build_server(RootPages(open_store(str(tmp_path))), "127.0.0.1", 0)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield f"http://localhost:{server.server_address[1]}"
    server.shutdown()
    thread.join()
    server.server_close()


def test_the_list_of_runs_renews_itself_and_leads_to_two_runs_side_by_side(page, picture, served, tmp_path):
    page.go(f"{served}/", width=1500)
    page.sees("No runs yet.")
    for name, owner, tags, steps in (
        ("lr-sweep-1a2b3c4d", "alice@gpu1", ("exp:42", "team:math"), 40),
        ("lr-sweep-5e6f7a8b", "alice@gpu1", ("exp:42", "team:math"), 60),
        ("quickstart-9c0d1e2f", "bob@laptop", (), 12),
    ):
        store = open_store(str(tmp_path / name))
        write_run(store, Shape(steps=steps))
        record = json.loads(store.get(RUN_KEY))
        tracking = {**record["config"]["tracking"], "tags": tags, "notes": "half the rate" if steps == 60 else ""}
        config = {
            **record["config"],
            "tracking": tracking,
            "model": {**record["config"]["model"], "path": "my/model"},
        }
        store.put(RUN_KEY, json.dumps({**record, "run_id": name, "owner": owner, "config": config}).encode())
    page.sees("lr-sweep-1a2b3c4d", "quickstart-9c0d1e2f", "half the rate", "60 of 60")
    assert page.value("document.documentElement.scrollWidth <= innerWidth"), "nothing is cut off"
    page.fill("document.querySelector('input[name=owner]')", "alice")
    page.click("Filter")
    page.until("two runs", "document.querySelectorAll('#runs tr').length === 3")
    page.value("document.activeElement.blur()")
    picture("serve.png", height=360)
    page.value("document.querySelectorAll('#runs input').forEach(box => box.click())")
    page.click("Compare two selected runs")
    page.sees("Two runs", "Settings that differ", "tracking.notes", "held-out, last version")
    picture("two-runs.png", height=1250)
    assert page.errors == []


def test_the_live_page_renews_itself_and_runs_no_script_but_its_own(page, served, tmp_path):
    store = open_store(str(tmp_path / "quickstart-1"))
    write_run(store, Shape(steps=10))
    hidden = {key: store.get(key) for key in store.list("commits") if int(key.split("/")[1].split(".")[0]) > 4}
    store.delete(hidden)
    page.go(f"{served}/runs/quickstart-1/")
    page.sees("stopped, step 4/10", "Roles over time")
    assert page.value("getComputedStyle(document.getElementById('live')).position") == "sticky"
    assert page.value("getComputedStyle(document.querySelector('.kicker')).fontSize") == "13px"
    page.value("document.querySelector('main').dataset.old = 'yes'")
    for key, data in hidden.items():
        store.put(key, data)
    page.sees("step 10/10")
    page.until("the new report", "!document.querySelector('main').dataset.old")
    page.value("addEventListener('securitypolicyviolation', event => { window.blocked = event.effectiveDirective })")
    page.value("document.body.insertAdjacentHTML('beforeend', '<img src=x onerror=\"window.ran = 1\">')")
    page.until("the block of a foreign script", "window.blocked")
    assert page.value("window.ran") is None
    assert page.errors == []


def test_the_rollouts_of_a_step_are_filtered_opened_and_coloured_and_run_no_script(page, served, tmp_path):
    store = open_store(str(tmp_path / "quickstart-1"))
    write_run(store, Shape(steps=10))
    commit = read_commits(store)[10]
    hostile = "<img src=x onerror='window.ran = 1'><script>window.ran = 1</script>"
    rollout = replace(make_rollout(group_id=36, spans=[(8, 0, 2), (9, 2, 4)]), task=json.dumps({hostile: hostile}))
    rows = [
        training_row(replace(rollout, rollout_index=index, reward=float(index)), advantage=index - 1.0)
        for index in range(3)
    ]
    entries = put_batch(store, 10, commit.epoch, rows)
    put_record(store, commit_key(10, commit.epoch), commit.model_copy(update={"batches": entries}))
    page.go(f"{served}/runs/quickstart-1/")
    page.click("rollouts")
    page.sees("Rollouts of step 10", "3 of 3 rollouts", "36.0", "onerror")
    page.fill("document.querySelector('input[name=reward]')", "1..")
    page.click("Show")
    page.sees("2 of 3 rollouts")
    page.click("36.2")
    page.sees("Rollout 36.2", "group 36: trained in step 10", "36.1")
    tints = "new Set([...document.querySelectorAll('.rollout span[title]')].map(token => token.className)).size"
    assert page.value(tints) == 2, "two versions"
    page.click("advantage")
    page.until("one advantage", f"{tints} === 1")
    assert page.value("document.documentElement.scrollWidth <= innerWidth"), "nothing is cut off"
    page.click("this prompt in all steps")
    page.sees("Rollouts of all steps", "rollouts", "step 10, advantage")
    page.fill("document.querySelector('input[name=where]')", "step in (9, 10) and reward > 1")
    page.click("Show")
    page.sees("1 rollouts", "36.2", "onerror")
    page.go(f"{served}/runs/quickstart-1/rollouts?step=10&beside=9")
    page.sees("Rollouts of step 10 and step 9", "3 of 3 rollouts")
    assert page.value("document.documentElement.scrollWidth <= innerWidth"), "nothing is cut off"
    assert page.value("window.ran") is None
    assert page.errors == []
