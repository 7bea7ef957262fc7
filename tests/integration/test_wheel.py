"""The wheel outside of the checkout: its files; in an empty environment `train`, `deploy`, a deployed run."""

import json
import os
import shutil
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from urllib.error import URLError
from urllib.request import urlopen
from zipfile import ZipFile

import pytest

from tests.integration.pipeline import ROOT, assert_closes
from tests.integration.prefect_server import await_, kill_tree
from tests.ports import free_port

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]

SOURCES = (
    "pyproject.toml",
    "README.md",
    "LICENSE",
    "prefect.yaml",
    "flows",
    "tasks",
    "pipelinerl",
    "pipelinerl_core",
)
SHORT = ("trainer.steps=2", "eval.num_prompts=16", "trainer.groups_per_step=8", "engine.concurrency=32")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from a copy of the sources: setuptools leaves a build directory beside them."""
    place = tmp_path_factory.mktemp("wheel")
    copy = place / "sources"
    copy.mkdir()
    for name in SOURCES:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, copy / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(ROOT / name, copy)
    command = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "-q",
        "--no-deps",
        "--no-build-isolation",
        "-w",
        str(place),
        str(copy),
    ]
    subprocess.run(command, check=True, timeout=120)
    (wheel_path,) = place.glob("pipelinerl-*.whl")
    return wheel_path


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """bin/ of an environment that pip filled with the wheel and what its metadata names, in the locked versions."""
    venv = tmp_path_factory.mktemp("empty") / "venv"
    subprocess.run([sys.executable, "-m", "venv", str(venv)], check=True, timeout=120)
    constraints = [f"--constraint={ROOT / f'requirements{name}.lock'}" for name in ("", "-cuda")]
    pip = [str(venv / "bin" / "python"), "-m", "pip", "install", "-q", "--no-compile", *constraints, str(wheel)]
    subprocess.run(pip, check=True, timeout=600)
    yield venv / "bin"
    shutil.rmtree(venv)


@pytest.fixture
def environment(tmp_path: Path, prepared_model: Path) -> dict[str, str]:
    """An empty home; the model that other tests built; nothing that points at the checkout."""
    kept = {name: os.environ[name] for name in os.environ if name.startswith(("OMP_", "GOMP_")) or name == "PATH"}
    cache = prepared_model.parents[1]
    return {**kept, "HOME": str(tmp_path), "PIPELINERL_CACHE": str(cache)}


def is_healthy(port: int) -> bool:
    with suppress(URLError, OSError), urlopen(f"http://127.0.0.1:{port}/api/health", timeout=2) as reply:
        return reply.status == 200
    return False


def test_the_wheel_has_every_file_of_its_packages_and_runs_outside_of_the_checkout(wheel, tmp_path):
    packages = ("pipelinerl", "pipelinerl_core")
    paths = [
        os.path.relpath(os.path.join(directory, name), ROOT)
        for package in packages
        for directory, _, names in os.walk(ROOT / package, followlinks=True)
        for name in names
    ]
    with ZipFile(wheel) as archive:
        contents = {name for name in archive.namelist() if name.startswith(tuple(f"{name}/" for name in packages))}
        archive.extractall(tmp_path)
    assert contents == {path for path in paths if "__pycache__" not in path}
    program = "import pipelinerl.flows.cli as cli, pipelinerl.tasks; print(cli.__file__); cli.main()"
    run = subprocess.run(
        [sys.executable, "-c", program, "config", "quickstart", "--json"],
        env={**os.environ, "PYTHONPATH": str(tmp_path)}, cwd=tmp_path, check=True, timeout=120,
        stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    where, _, settings = run.stdout.partition("\n")
    assert where.startswith(str(tmp_path))
    assert json.loads(settings)["trainer"]["steps"] > 0
    for role in ("hub", "trainer", "actor", "evaluator"):
        program = f"import pipelinerl_core.roles.{role}.main as role; print(role.__file__)"
        run = subprocess.run(
            [sys.executable, "-c", program],
            env={**os.environ, "PYTHONPATH": str(tmp_path)}, cwd=tmp_path, check=True, timeout=120,
            stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        assert run.stdout.startswith(str(tmp_path))


@pytest.mark.campaign
def test_the_wheel_trains_and_deploys_without_the_checkout(installed, environment, tmp_path):
    port = free_port()
    environment |= {
        "PREFECT_API_URL": f"http://127.0.0.1:{port}/api",
        "PREFECT_SERVER_EPHEMERAL_ENABLED": "false",
        "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
        "PREFECT_WORKER_QUERY_SECONDS": "2",
    }
    log = (tmp_path / "log").open("wb")

    def spawn(*command: str) -> subprocess.Popen[bytes]:
        program, *arguments = command
        return subprocess.Popen(
            [str(installed / program), *arguments], env=environment, cwd=tmp_path, stdout=log, stderr=log
        )

    def answer(program: str, *arguments: str) -> str:
        return subprocess.run(
            [str(installed / program), *arguments],
            env=environment, cwd=tmp_path, check=True, timeout=400, stdout=subprocess.PIPE, stderr=log, text=True,
        ).stdout  # fmt: skip

    where = answer("python", "-c", "import pipelinerl.flows as f, pipelinerl.tasks; print(f.__path__)")
    assert str(ROOT) not in where
    processes = [spawn("prefect", "server", "start", "--host", "127.0.0.1", "--port", str(port))]
    try:
        await_(lambda: is_healthy(port), "the Prefect server", 120)
        trained = json.loads(answer("pipelinerl", "train", "quickstart", *SHORT, "--root", "runs", "--json"))
        assert trained["steps"] == 2
        deployed = json.loads(answer("pipelinerl", "deploy", "--json"))
        assert deployed["pools"] == dict.fromkeys(("control", "actors", "trainers"), "created")
        assert deployed["deployments"]["train/quickstart"] == "deployed"
        processes.append(spawn("prefect", "worker", "start", "--pool", "control"))
        overrides = json.dumps({"preset": "quickstart", "overrides": SHORT, "root": str(tmp_path / "deployed")})
        answer("prefect", "deployment", "run", "train/quickstart", "--params", overrides, "--watch")
        (run,) = (path.parent for path in (tmp_path / "deployed").glob("*/run.json"))
        await_((run / "report.html").exists, "the report of the deployed run", 10)
        assert_closes(f"file://{run}")
    finally:
        for process in processes:
            kill_tree(process.pid)
            process.wait(timeout=60)
        log.close()
