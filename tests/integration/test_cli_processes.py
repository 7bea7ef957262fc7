"""Whole runs from the command line: Ctrl-C, kill -9, a second start, resume; real roles, a real Prefect server."""

import json
import signal
import sqlite3
import subprocess
import time
from contextlib import closing, suppress
from pathlib import Path
from urllib.error import HTTPError
from urllib.request import urlopen

import psutil
import pytest

from pipelinerl_core.report.scrape_targets import live_roles
from pipelinerl_core.run.follow import RunFollower
from pipelinerl_core.run.locate import SHARED_MEMORY
from pipelinerl_core.run.records import HUB_KEY
from pipelinerl_core.storage.object_store import open_store
from tests.integration.cli_case import (
    START_SECONDS,
    STOP_SECONDS,
    children,
    committed,
    left_over,
    run_directories,
    start,
)
from tests.integration.cli_case import nothing_is_left as nothing_is_left  # a fixture for every test
from tests.integration.pipeline import assert_closes
from tests.waiting import wait_for

# The first test may have to build the model.
pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]

SMALL = ("trainer.groups_per_step=16", "engine.concurrency=64")
STEPS = 90


def health_of(run: Path) -> dict[str, int]:
    """Name of a role that lives -> status of its /readyz."""
    statuses = {}
    for role in live_roles(open_store(str(run))):
        try:
            with urlopen(f"{role.url}/readyz", timeout=10) as answer:
                statuses[role.name] = answer.status
        except HTTPError as error:  # not ready
            statuses[role.name] = error.code
        except OSError:  # it has gone, or is slow
            statuses[role.name] = 0
    return statuses


def test_a_run_survives_a_kill_of_everything_a_ctrl_c_and_a_drain_and_ends_as_one_run(tmp_path):
    started = start(tmp_path, "train", "quickstart", f"trainer.steps={STEPS}", "eval.num_prompts=0", *SMALL)
    wait_for(lambda: committed(tmp_path) >= 3, "step 3", START_SECONDS, process=started)
    (run,) = run_directories(tmp_path)
    refused = start(tmp_path, "resume", run.name)
    assert refused.wait(120) == 2
    assert "this run is live" in (tmp_path / "stderr.txt").read_text()

    pids = children(started)
    started.kill()
    started.wait(10)
    wait_for(lambda: not left_over(tmp_path, pids), "the end of every child", 30)
    assert json.loads((run / HUB_KEY).read_text())["live"]["state"] == "run", "the hub had no time to say goodbye"

    reached = committed(tmp_path)
    resumed = start(tmp_path, "resume", "latest")
    wait_for(lambda: committed(tmp_path) >= reached + 3, "progress after the kill", 180, process=resumed)
    pids = children(resumed)
    begun = time.monotonic()
    interrupt_twice(resumed, pids)
    assert resumed.wait(90) == 130
    assert left_over(tmp_path, pids) == []
    assert time.monotonic() - begun < STOP_SECONDS
    assert "interrupted; everything is stopped" in (tmp_path / "stderr.txt").read_text()
    assert not (SHARED_MEMORY / f"pipelinerl-{run.name}").exists()
    assert f"continue with: pipelinerl resume {run.name}" in (tmp_path / "stderr.txt").read_text()

    drained = start(tmp_path, "resume", "latest")
    reached = committed(tmp_path)
    wait_for(lambda: committed(tmp_path) >= reached + 2, "progress after the stop", 180, process=drained)
    ready = {"hub": 200, "trainer": 200, "actor-0": 200}
    wait_for(lambda: health_of(run) == ready, "all to be ready", 60, process=drained)
    assert start(tmp_path, "drain", "latest").wait(90) == 0
    assert drained.wait(180) == 0
    assert reached + 2 <= committed(tmp_path) < STEPS
    assert "drained after step" in (tmp_path / "stderr.txt").read_text()
    assert start(tmp_path, "drain", "latest").wait(90) == 2  # nobody runs it

    steps = committed(tmp_path) + 2
    last = start(tmp_path, "resume", "latest", f"trainer.steps={steps}")
    assert last.wait(300) == 0
    wait_for(lambda: health_of(run) == {}, "no role to be left", 150)  # a silent one is listed for two minutes
    check_ended(tmp_path, run, steps)
    check_flow_runs_of_prefect(tmp_path, run)


def interrupt_twice(process: "subprocess.Popen[str]", pids: list[int]) -> None:
    """Ctrl-C as it comes from somebody who is impatient, while the trainer does not end and holds up the others."""

    processes = {}
    for pid in pids:
        with suppress(psutil.NoSuchProcess):
            process_of = psutil.Process(pid)
            words = [word for word in process_of.cmdline() if word.startswith("pipelinerl_core.roles.")]
            processes |= {word.split(".")[2]: process_of for word in words}
    hub, trainer, actor = (processes[name] for name in ("hub", "trainer", "actor"))
    trainer.suspend()
    process.send_signal(signal.SIGINT)
    wait_for(lambda: not actor.is_running(), "the end of the actor", 60, process=process)
    process.send_signal(signal.SIGINT)
    wait_for(lambda: not hub.is_running(), "the end of the hub", 60, process=process)
    with suppress(psutil.NoSuchProcess):  # its supervisor has lost patience
        trainer.resume()


def check_ended(root: Path, run: Path, steps: int) -> None:
    """One report of one whole run, whose last two steps came after a drain."""
    report = json.loads((root / "stdout.txt").read_text())
    assert (report["run_id"], report["steps"]) == (run.name, steps)
    assert (run / "report.html").stat().st_size > 10_000
    follower = RunFollower(open_store(str(run)))
    follower.refresh()
    assert list(follower.commits) == list(range(steps + 1)), "every step is committed exactly once"
    assert_closes(str(run))
    no_repetition = f"resumed at step {steps - 2}: checkpoint {steps - 2}, 0 steps trained again"
    assert no_repetition in (run / "logs" / "trainer.log").read_text(), "the drain has written a checkpoint"


def check_flow_runs_of_prefect(root: Path, run: Path) -> None:
    """Parameters as they were typed, and no second check of what the command has checked."""
    with closing(sqlite3.connect(root / ".prefect" / "prefect.db")) as database:
        rows = database.execute("select parameters from flow_run order by created").fetchall()
        tasks = {name for (name,) in database.execute("select name from task_run")}
    train, *resumed = [json.loads(text) for (text,) in rows]
    settings = [f"trainer.steps={STEPS}", "eval.num_prompts=0", *SMALL]
    assert (train["preset"], train["overrides"], train["resume"]) == ("quickstart", settings, "")
    assert [parameters["resume"] for parameters in resumed] == [f"file://{run}"] * 3
    assert "trainer" in tasks
    assert "preflight" not in tasks


def test_sigterm_before_the_first_step_leaves_nothing_behind(tmp_path):
    started = start(tmp_path, "train", "quickstart", f"trainer.steps={STEPS}")
    wait_for(lambda: bool(list(tmp_path.glob("*/logs/trainer.log"))), "the trainer", START_SECONDS, process=started)
    pids = children(started)
    begun = time.monotonic()
    started.terminate()
    assert started.wait(90) == 143
    assert time.monotonic() - begun < STOP_SECONDS
    wait_for(lambda: not left_over(tmp_path, pids), "the end of every child", 60)
