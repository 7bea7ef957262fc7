"""placement.kind=work_pools: actor and trainer are flow runs on their own pools, Running for the whole job.

A real Prefect server, `pipelinerl deploy`, one process worker per pool. The flow processes import neither torch nor
an engine: their memory maps say so. In the middle the train flow is killed, and an automation starts it again.
"""

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from urllib.error import URLError
from urllib.request import Request, urlopen

import psutil
import pytest

from tests.integration.pipeline import ROOT, assert_closes, committed_steps

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

STEPS = 40
POOLS = ("control", "actors", "trainers")
PREFECT = str(Path(sys.executable).parent / "prefect")


class Prefect:
    """A server and a worker per pool, in a home of their own."""

    def __init__(self, home: Path) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        self.url = f"http://127.0.0.1:{port}/api"
        self.home = home
        self.environment = {
            **os.environ,
            "PREFECT_HOME": str(home),
            "PREFECT_API_URL": self.url,
            "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
            "PREFECT_SERVER_EPHEMERAL_ENABLED": "false",
            "PREFECT_WORKER_QUERY_SECONDS": "2",
        }
        self.processes = [self.spawn("server", "start", "--host", "127.0.0.1", "--port", str(port))]

    def spawn(self, *arguments: str) -> subprocess.Popen[bytes]:
        with (self.home / "log").open("ab") as log:
            return subprocess.Popen(
                [PREFECT, *arguments], env=self.environment, cwd=ROOT, stdout=log, stderr=log, start_new_session=True
            )

    def command(self, *arguments: str) -> None:
        subprocess.run([PREFECT, *arguments], env=self.environment, cwd=ROOT, check=True, timeout=120)

    def post(self, path: str, body: dict) -> list[dict]:
        request = Request(f"{self.url}{path}", json.dumps(body).encode(), {"Content-Type": "application/json"})
        with urlopen(request, timeout=10) as answer:
            return json.load(answer)

    def start(self) -> None:
        deadline = time.monotonic() + 120
        while not self.is_healthy():
            assert time.monotonic() < deadline, (self.home / "log").read_text()[-2000:]
            time.sleep(0.5)
        first, again = self.deploy(), self.deploy()
        assert set(first["pools"].values()) == set(first["automations"].values()) == {"created"}
        assert set(again["pools"].values()) == set(again["automations"].values()) == {"unchanged"}
        assert set(again["pools"]) == set(POOLS)
        self.processes += [self.spawn("worker", "start", "--pool", pool) for pool in POOLS]

    def deploy(self) -> dict:
        command = [sys.executable, "-m", "flows.cli", "deploy", "--json"]
        done = subprocess.run(
            command, env=self.environment, cwd=ROOT, check=True, timeout=120, stdout=subprocess.PIPE, text=True
        )
        return json.loads(done.stdout)

    def kill_flow(self, pool: str) -> None:
        """kill -9 of the process that executes the flow run of a pool."""
        worker = self.processes[1 + POOLS.index(pool)]
        for process in psutil.Process(worker.pid).children(recursive=True):
            with suppress(psutil.Error):  # one that has just ended
                if "prefect.engine" in " ".join(process.cmdline()):
                    process.kill()

    def is_healthy(self) -> bool:
        try:
            with urlopen(f"{self.url}/health", timeout=2) as answer:
                return answer.status == 200
        except (URLError, OSError):
            return False

    def runs(self) -> dict[str, dict]:
        """Newest flow run of each work pool."""
        found: dict[str, dict] = {}
        for run in self.post("/flow_runs/filter", {"sort": "START_TIME_ASC"}):
            found[run["work_pool_name"]] = run
        return found

    def flow_processes(self) -> list[psutil.Process]:
        """Processes that execute a flow run."""
        found = []
        for worker in self.processes[1:]:
            for process in psutil.Process(worker.pid).children(recursive=True):
                try:
                    if "prefect.engine" in " ".join(process.cmdline()):
                        found.append(process)
                except psutil.Error:
                    continue
        return found

    def stop(self) -> None:
        doomed = [child for process in self.processes for child in tree(process.pid)]
        for process in doomed:
            try:
                process.kill()
            except psutil.NoSuchProcess:
                continue
        for process in self.processes:
            process.wait(timeout=10)


def tree(pid: int) -> list[psutil.Process]:
    try:
        process = psutil.Process(pid)
        return [*process.children(recursive=True), process]
    except psutil.NoSuchProcess:
        return []


@pytest.fixture
def prefect(tmp_path: Path) -> Iterator[Prefect]:
    home = tmp_path / "prefect"
    home.mkdir()
    server = Prefect(home)
    try:
        server.start()
        yield server
    finally:
        server.stop()


def test_actor_and_trainer_are_runs_of_their_own_pools_for_the_whole_job(prefect, tmp_path, prepared_model):
    root = tmp_path / "runs"
    settings = {"steps": STEPS, "placement": "work_pools", "groups_per_step": 16, "concurrency": 64}
    start = ["deployment", "run", "train/quickstart", "-p", f"root={root}", "-p", 'overrides=["eval.num_prompts=50"]']
    with pytest.raises(subprocess.CalledProcessError):
        prefect.command(*start, "-p", 'settings={"steps": 0}')
    assert prefect.runs() == {}, "the server has refused it"
    prefect.command(*start, "-p", f"settings={json.dumps(settings)}")
    deadline = time.monotonic() + 600
    states: dict[str, list[str]] = {pool: [] for pool in POOLS}
    maps_checked, is_killed = 0, False
    while True:
        assert time.monotonic() < deadline, states
        runs = prefect.runs()
        for pool, run in runs.items():
            states[pool].append(run["state_type"])
        ends = ("COMPLETED", "FAILED", "CANCELLED", *(() if is_killed else ("CRASHED",)))
        if "control" in runs and runs["control"]["state_type"] in ends:
            break
        urls = list(root.glob("quickstart-*"))
        if urls and not is_killed and committed_steps(str(urls[0])) >= 5:
            assert runs["actors"]["state_type"] == runs["trainers"]["state_type"] == "RUNNING"
            maps_checked += check_no_torch(prefect)
        if urls and not is_killed and committed_steps(str(urls[0])) >= STEPS // 2:
            prefect.kill_flow("control")
            is_killed = True
        time.sleep(1)
    assert runs["control"]["state_type"] == "COMPLETED", (prefect.home / "log").read_text()[-4000:]
    assert maps_checked >= 3, "train, actor and trainer flow processes were seen in the middle of the job"
    settled = time.monotonic() + 60
    while {run["state_type"] for run in prefect.runs().values()} != {"COMPLETED"}:
        assert time.monotonic() < settled, prefect.runs()
        time.sleep(1)
    (run,) = root.glob("quickstart-*")
    assert json.loads((run / "report.json").read_text())["steps"] == STEPS
    assert (is_killed, prefect.runs()["control"]["run_count"]) == (True, 2), "the same flow run went on by itself"
    assert_closes(str(run))


def check_no_torch(prefect: Prefect) -> int:
    """Number of flow processes; none of them has torch or an engine in memory."""
    processes = prefect.flow_processes()
    for process in processes:
        mapped = Path(f"/proc/{process.pid}/maps").read_text()
        assert "libtorch" not in mapped
        assert "vllm" not in mapped
    return len(processes)
