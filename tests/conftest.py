"""Fixtures that several tiers share."""

import asyncio
import inspect
import os
import subprocess
import sys
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.fakes import MemoryStore
from tests.s3_server import BUCKET, S3Server, aws_variables, start_rclone, stop_rclone

# Before anything imports torch: on two cores OpenMP's default spin-wait slows busy neighbours down 10 to 30 times.
for name, value in (("OMP_WAIT_POLICY", "PASSIVE"), ("GOMP_SPINCOUNT", "0"), ("OMP_NUM_THREADS", "1")):
    os.environ.setdefault(name, value)

# Files whose tests share what they start, or must not run twice at once, run in one worker of pytest-xdist; every
# other file is a group of its own. The groups named here take longest and start first.
GROUPS = {
    "vllm": (  # share engine cores
        "test_engine_contract", "test_vllm_engine", "test_parity_gate", "test_vllm_run", "test_tiny_presets",
    ),
    "packages": (  # call apt-get, pip or make
        "test_wheel", "test_browser", "test_compose_commands", "test_infra_schemas", "test_infra_tools",
        "test_local_server",
    ),
    "pools": ("test_work_pools",),
    "command": ("test_cli_processes",),
    "faults": ("test_store_faults",),
    "chaos": ("test_chaos",),
    "ranks": ("test_trainer_ranks",),
    "demo": ("test_demo", "test_tutorial"),  # share the converted model
}  # fmt: skip
_GROUP_OF = {name: group for group, names in GROUPS.items() for name in names}
_ORDER = list(GROUPS)


def _group(file: str) -> str:
    return _GROUP_OF.get(Path(file).stem, file)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """A scheduler that gives each group to one worker.

    `--dist loadgroup` cannot do this: pytest-xdist 3.8 appends the group to a field of test items that pytest 9.2 no
    longer has.
    """
    from xdist.scheduler import LoadScopeScheduling

    class GroupScheduling(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return _group(nodeid.partition("::")[0])

    return GroupScheduling(config, log)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put the longest groups first, the tests of a group side by side."""
    items.sort(key=lambda item: _ORDER.index(group) if (group := _group(item.path.name)) in _ORDER else len(_ORDER))


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run a test that is a coroutine on an event loop: of its engine builder (`build`, `seeded`), else a new one."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    arguments = {name: pyfuncitem.funcargs[name] for name in inspect.signature(pyfuncitem.obj).parameters}
    builder = arguments.get("build") or arguments.get("seeded") or asyncio
    builder.run(pyfuncitem.obj(**arguments))
    return True


@pytest.fixture(scope="session")
def rclone_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    """One S3 server for the session."""
    server = start_rclone(tmp_path_factory.mktemp("s3"))
    yield server
    stop_rclone(server.process)


def use_endpoint(monkeypatch: pytest.MonkeyPatch, endpoint: str) -> None:
    """Point the standard AWS variables at an endpoint."""
    for name, value in aws_variables(endpoint).items():
        monkeypatch.setenv(name, value)


@pytest.fixture
def s3_url(rclone_server: S3Server, monkeypatch: pytest.MonkeyPatch) -> str:
    """URL of an empty store on S3, with the AWS_* variables set."""
    use_endpoint(monkeypatch, rclone_server.endpoint)
    return f"s3://{BUCKET}/{uuid.uuid4().hex[:12]}/runs"


@pytest.fixture
def s3_environment(monkeypatch: pytest.MonkeyPatch):
    """A function that points the standard AWS variables at an endpoint for this test."""
    return lambda endpoint: use_endpoint(monkeypatch, endpoint)


@pytest.fixture
def store() -> MemoryStore:
    """An empty store in memory."""
    return MemoryStore()


@pytest.fixture
def refusal(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Callable[..., list[str]]:
    """A function: arguments of a command that must end with exit code 2 and no result -> its lines on stderr.

    The command runs in this process, because a process takes up to four seconds to start.
    """

    def lines(*arguments: str) -> list[str]:
        from pipelinerl.flows.cli import main

        monkeypatch.setattr(sys, "argv", ["pipelinerl", *arguments])
        with pytest.raises(SystemExit) as ended:
            main()
        stdout, stderr = capfd.readouterr()
        assert (ended.value.code, stdout) == (2, ""), stderr
        assert "Traceback" not in stderr
        assert stderr.splitlines()[-1].startswith("pipelinerl: ")
        return stderr.splitlines()

    return lines


@pytest.fixture
def shm(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """An empty directory in place of shared memory, for the weights of this process."""
    (tmp_path / "shm").mkdir()
    for module in ("publish", "memory", "staging"):
        monkeypatch.setattr(f"pipelinerl_core.weights.{module}.SHM_ROOT", tmp_path / "shm")
    return tmp_path / "shm"


@pytest.fixture(scope="session")
def prepared_model() -> Path:
    """The quickstart's starting model, built once per machine (about a minute) and cached by digest."""
    from pipelinerl_core.models.paths import resolve_model_path

    if resolve_model_path("builtin:sums") is None:
        subprocess.run([sys.executable, "-m", "pipelinerl_core.tools.prepare"], check=True, timeout=400)
    path = resolve_model_path("builtin:sums")
    assert path is not None
    return path


def install_beside(lock: str, target: Path) -> Path:
    """Install a lock file of this repository into the directory `target`, not into .venv; returns `target`."""
    command = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", str(target), "-r", lock]
    subprocess.run(command, check=True, timeout=300, cwd=Path(__file__).parents[1])
    return target


@pytest.fixture(scope="session")
def server_packages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Directory with requirements-server.lock, which the images have and the environment has not."""
    return install_beside("requirements-server.lock", tmp_path_factory.mktemp("server-packages"))


@pytest.fixture(scope="session")
def demo_environment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Variables of a process that finds the packages of requirements-demo.lock and the command pipelinerl, with one
    cache of models for the session, empty at first."""
    packages = install_beside("requirements-demo.lock", tmp_path_factory.mktemp("demo-packages"))
    inherited = {name: value for name, value in os.environ.items() if name != "PREFECT_API_URL"}
    return {
        **inherited,
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "PYTHONPATH": f"{Path(__file__).parents[1]}:{packages}",
        "PIPELINERL_CACHE": str(tmp_path_factory.mktemp("cache")),
    }


@pytest.fixture(scope="session")
def vllm_cores(tmp_path_factory: pytest.TempPathFactory):
    """Engine cores of vLLM that tests share, ended with the session."""
    from tests.vllm_cores import VLLMCores

    cores = VLLMCores(tmp_path_factory.mktemp("vllm"))
    yield cores
    cores.close()
