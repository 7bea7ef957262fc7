"""`make gpu-day` on a CPU: from packed wheels where only torch and transformers are installed, and with vLLM."""

import json
import os
import re
import subprocess
import sys
import venv
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

import pytest

from tests.integration.pipeline import ROOT

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

PROGRAM = str(ROOT / "infra" / "gpu_day.py")
DTYPES = ("float32", "bfloat16")
PACKED = ("accelerate", "blake3", "peft", "prometheus_client", "psutil", "pyarrow", "pydantic", "pydantic_core")


def needed_by(*names):
    """Names of the installed distributions that these need, themselves included, optional ones excluded."""
    closure, waiting = set(), list(names)
    while waiting:
        name = waiting.pop()
        try:
            requirements = distribution(name).requires or ()
        except PackageNotFoundError:  # for another platform or Python
            continue
        if name not in closure:
            closure.add(name)
            waiting += [re.match(r"[\w.-]+", line)[0].lower() for line in requirements if "extra ==" not in line]
    return closure


@pytest.fixture(scope="module")
def bare_python(tmp_path_factory):
    """An interpreter whose environment has torch, transformers and what these need, without pydantic."""
    place = tmp_path_factory.mktemp("bare")
    venv.create(place / "venv", with_pip=False, symlinks=True)
    (site,) = (place / "venv" / "lib").glob("python*/site-packages")
    for name in needed_by("torch", "transformers"):
        for file in distribution(name).files:
            top = file.parts[0]
            if top not in ("..", "__pycache__", *PACKED) and not (site / top).exists():
                (site / top).symlink_to(distribution(name).locate_file(top))
    return str(place / "venv" / "bin" / "python")


def test_stage_1_passes_where_only_torch_and_transformers_are_installed(bare_python, tmp_path):
    version = ".".join(map(str, sys.version_info[:2]))
    pack = [sys.executable, PROGRAM, "pack", "--packed", str(tmp_path / "packed"), "--python", version]
    subprocess.run(pack, check=True, timeout=300)
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    environment |= {"CUDA_VISIBLE_DEVICES": "", "HOME": str(tmp_path)}
    absent = "import importlib.util, sys; sys.exit(any(map(importlib.util.find_spec, sys.argv[1:])))"
    subprocess.run([bare_python, "-c", absent, *PACKED, "prefect", "mlflow", "s3fs"], env=environment, check=True)
    out = tmp_path / "out"
    command = [bare_python, PROGRAM, "1", "--packed", str(tmp_path / "packed"), "--out", str(out)]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=560, cwd=tmp_path)
    document = json.loads((out / "stage-1.json").read_text())
    assert ended.returncode == 0, [part["status"] for part in document["parts"]]
    names = ("imports", "kernels", *(f"{part} {dtype}" for part in ("engine", "attention") for dtype in DTYPES))
    assert {part["part"]: part["status"] for part in document["parts"]} == dict.fromkeys(names, "measured")
    tables = {part["part"]: part["document"]["tables"] for part in document["parts"]}
    assert tables["engine float32"][0][0]["parity holds"] is True
    assert [row["result"][:8] for row in tables["attention float32"][0]] == ["measured", "not run:", "not run:"]
    assert {row["result"] for row in tables["kernels"][0]} == {"equal", "not run: no card"}
    assert Path(out, "stage-1.md").read_text().startswith("## Stage 1: imports, kernels, engine and attention\n")


@pytest.mark.campaign
def test_vllm_is_measured_where_it_is_installed(tmp_path):
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, PROGRAM, "7", "--packed", str(tmp_path), "--out", str(tmp_path)]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=560)
    document = json.loads((tmp_path / "stage-7.json").read_text())
    assert ended.returncode == 0, [part["status"] for part in document["parts"]]
    (embedded,), (vllm,) = (part["document"]["tables"][0] for part in document["parts"])
    assert (embedded["engine"], vllm["engine"]) == ("embedded", "vllm")
    for row in (embedded, vllm):
        assert row["parity holds"] is True
        assert 0 < row["parity mean"] < row["parity max"]
        assert min(row["tokens/s"], row["pause, ms"]) > 0
