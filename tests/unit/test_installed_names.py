"""A Prefect repository with `flows/` and `tasks/` of its own imports ours beside them."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

FLOW = """
from prefect import flow
from tasks.nightly import settings
from pipelinerl.flows.train_flow import train
from pipelinerl.tasks.role_tasks import run_role

@flow
def nightly():
    return train(**settings())
"""


@pytest.fixture
def repository(tmp_path):
    for name, module, text in (("flows", "nightly", FLOW), ("tasks", "nightly", "def settings(): return {}\n")):
        package = tmp_path / name
        package.mkdir()
        (package / "__init__.py").touch()
        (package / f"{module}.py").write_text(text)
    return tmp_path


def test_a_repository_with_flows_and_tasks_of_its_own_imports_ours_beside_them(repository):
    code = (
        "import flows.nightly, tasks.nightly, pipelinerl.flows.train_flow as ours, pipelinerl.tasks\n"
        "print(flows.__file__, tasks.__file__, ours.__file__, flows.nightly.nightly.name, sep='\\n')"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=repository,  # the first entry of sys.path, as for `prefect deploy` and `python flows/nightly.py`
        env={**os.environ, "PYTHONPATH": str(ROOT), "PREFECT_HOME": str(repository / "home")},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    own_flows, own_tasks, ours, name = done.stdout.split()
    assert Path(own_flows).parent.parent == Path(own_tasks).parent.parent == repository
    assert Path(ours).resolve() == ROOT / "flows" / "train_flow.py"
    assert name == "nightly"


def test_the_package_installs_no_top_level_name_that_a_repository_may_have():
    code = "import setuptools, sys; print(*setuptools.find_packages('.', include=['pipelinerl*']))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert {name.partition(".")[0] for name in done.stdout.split()} == {"pipelinerl", "pipelinerl_core"}
    assert {"pipelinerl.flows", "pipelinerl.tasks"} <= set(done.stdout.split())


@pytest.mark.parametrize("name", ["flows", "tasks", "pipelinerl", "pipelinerl_core"])
def test_the_image_holds_every_folder_that_is_installed(name):
    assert f"COPY {name} /{name}\n" in (ROOT / "infra" / "docker" / "Dockerfile").read_text()
    assert f"!{name}\n" in (ROOT / ".dockerignore").read_text()
