"""infra/install.py: what this machine lacks is one line, and the build of torch decides what follows."""

import importlib.util
import platform
import re
import shutil
import subprocess
import sys
from collections import namedtuple
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
PROGRAM = ROOT / "infra" / "install.py"

specification = importlib.util.spec_from_file_location("install", PROGRAM)
install = importlib.util.module_from_spec(specification)
sys.modules["install"] = install  # dataclasses look the module up
specification.loader.exec_module(install)

DiskUsage = namedtuple("DiskUsage", "total used free")


class Index(install.Environment):
    """An environment whose pip installs what a package index of our making offers."""

    def __init__(self, directory, offers, installed=("none", "none")):
        super().__init__(directory)
        object.__setattr__(self, "offers", offers)
        object.__setattr__(self, "installed", installed)
        object.__setattr__(self, "calls", [])

    def pip(self, *arguments):
        self.calls.append(arguments)
        if arguments[0] == "install" and arguments[-1].startswith("torch==="):
            wanted = arguments[-1].removeprefix("torch===")
            matching = [offer for offer in self.offers if offer[1] == wanted]
            if not matching:
                return 1
            object.__setattr__(self, "installed", matching[0])
        elif arguments[0] == "install" and arguments[-1].startswith("torch=="):
            object.__setattr__(self, "installed", self.offers[0])
        return 0

    def torch_build(self):
        return self.installed


CUDA, CPU = ("cuda", "2.13.0"), ("cpu", "2.13.0+cpu")


@pytest.fixture
def enough_disk(monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda _: DiskUsage(0, 0, 1e12))


@pytest.mark.parametrize(
    ("wanted", "offers", "installed", "libraries"),
    [
        ("", [CUDA], CUDA, True),
        ("", [CPU, CUDA], CPU, False),  # pip prefers the local version
        ("cuda", [CPU, CUDA], CUDA, True),
        ("cpu", [CPU], CPU, False),
    ],
)
def test_the_cuda_libraries_follow_the_cuda_build_alone(tmp_path, enough_disk, wanted, offers, installed, libraries):
    index = Index(tmp_path, offers)
    install.install_torch(index, wanted, "2.13.0")
    assert index.installed == installed
    assert any(str(install.CUDA_LOCK) in call for call in index.calls) is libraries


def test_an_index_without_the_wanted_build_is_one_line(tmp_path, enough_disk):
    with pytest.raises(install.CannotInstall, match=r"TORCH=cpu: https://download.* has no torch 2\.13\.0\+cpu"):
        install.install_torch(Index(tmp_path, [CUDA]), "cpu", "2.13.0")
    with pytest.raises(install.CannotInstall, match="could not install torch"):
        install.install_torch(Index(tmp_path, [CPU]), "cuda", "2.13.0")
    without_libraries = Index(
        tmp_path, [("cpu", "2.13.0")]
    )  # an index that serves a CPU build under the plain version
    with pytest.raises(install.CannotInstall, match=r"TORCH=cuda: the package index offers torch 2\.13\.0 "):
        install.install_torch(without_libraries, "cuda", "2.13.0")


def test_another_build_of_torch_removes_cuda_libraries_and_the_stamp_of_vllm(tmp_path, enough_disk):
    for name in (".installed-vllm", ".installed-torch-cuda"):
        (tmp_path / name).touch()
    index = Index(tmp_path, [CPU], installed=CUDA)
    install.install_torch(index, "cpu", "2.13.0")
    assert ("uninstall", "-y", "-r", str(install.CUDA_LOCK)) in index.calls
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("build", "lock"), [(CUDA, "requirements-gpu.lock"), (CPU, "requirements-vllm.lock")])
def test_vllm_is_installed_from_the_lock_for_the_build_of_torch(tmp_path, build, lock):
    index = Index(tmp_path, [], installed=build)
    install.add_vllm(index)
    assert index.calls == [("install", "--no-deps", "-r", str(ROOT / lock))]


def test_a_missing_requirement_of_the_machine_is_one_line(tmp_path, monkeypatch):
    def refusal(need_bytes=2e9):
        with pytest.raises(install.CannotInstall) as caught:
            install.check_machine(tmp_path / "new" / ".venv", need_bytes)
        return str(caught.value)

    with monkeypatch.context() as here:
        here.setattr(platform, "system", lambda: "Darwin")
        assert refusal() == "PipelineRL runs on Linux only, and this is Darwin"
    with monkeypatch.context() as here:
        here.setattr(sys, "version_info", (3, 13, 0))
        assert re.search("is not supported: install Python 3.11 or 3.12, or set PYTHON=", refusal())
    with monkeypatch.context() as here:
        here.setattr(importlib.util, "find_spec", lambda name: None)
        assert re.search(r"lacks the venv module: .*`apt-get install python3\.\d+-venv`", refusal())
    with monkeypatch.context() as here:
        here.setattr(shutil, "which", lambda name: None)
        assert re.search(r"a C compiler .* `apt-get install gcc libc6-dev python3\.\d+-dev`", refusal())
    monkeypatch.setattr(shutil, "disk_usage", lambda _: DiskUsage(0, 0, 1e9))
    assert refusal() == f"the packages need 2 GB, and {tmp_path} has 1.0 GB free"
    assert refusal(install.CUDA_BYTES).endswith("set TORCH=cpu for the build that needs 2 GB")


def test_a_wrong_value_of_torch_ends_with_2_and_creates_nothing(tmp_path):
    command = [sys.executable, str(PROGRAM), str(tmp_path / ".venv"), "--torch", "rocm"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode == 2
    assert ended.stderr == "make install: TORCH=rocm: there are TORCH=cpu, TORCH=cuda, or nothing\n"
    assert list(tmp_path.iterdir()) == []


def test_torch_is_imported_at_the_end_and_a_failure_names_the_variable_to_set(tmp_path):
    here = install.Environment(Path(sys.prefix))
    assert re.fullmatch(r"torch \S+: (CPU build|CUDA \S+, \S+ GPU visible)", install.import_torch(here))
    (tmp_path / "bin").mkdir()
    python = tmp_path / "bin" / "python"
    python.write_text("#!/bin/sh\necho 'ImportError: libcudnn.so.9: cannot open shared object file' >&2\nexit 1\n")
    python.chmod(0o755)
    with pytest.raises(install.CannotInstall) as caught:
        install.import_torch(install.Environment(tmp_path))
    assert "libcudnn.so.9" in str(caught.value)
    assert "`make install TORCH=cpu`" in str(caught.value)
    assert caught.value.code == 1


def test_the_lock_pins_the_torch_that_pyproject_asks_for():
    assert f'"torch=={install.locked_torch()}"' in (ROOT / "pyproject.toml").read_text()
