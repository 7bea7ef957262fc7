"""`make bench-gpu` on a CPU: what it measures, and that a machine with torch and transformers alone can run it."""

import json
import os
import subprocess
import sys

import pytest

from tests.integration.pipeline import ROOT

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

LEARNER = ["--learner-sizes", "tiny", "--learner-tokens", "128"]
ARGUMENTS = ["--device", "cpu", "--size", "tiny", "--slots", "4", "--max-tokens", "32", *LEARNER, "--json"]
WITHOUT = """
import runpy, sys
for name in ("pydantic", "pyarrow", "prefect", "mlflow", "typer", "s3fs", "fsspec", "vllm"):
    sys.modules[name] = None
sys.argv = ["bench_gpu", *sys.argv[1:]]
runpy.run_module("pipelinerl_core.bench.gpu", run_name="__main__")
"""


def run(command, *arguments):
    return subprocess.run(
        [sys.executable, *command, *ARGUMENTS, *arguments],
        cwd=ROOT, env=dict(os.environ), capture_output=True, text=True, timeout=560,
    )  # fmt: skip


def check(row):
    assert row["parity_ok"] is True
    assert 0 < row["parity_mean"] < row["parity_max"]
    assert row["tokens_per_second"] > 0
    assert row["pause_ms"] > 0
    assert row["copy_ms"] == pytest.approx(2 * row["weights_read_ms"])


def test_torch_and_transformers_are_enough_for_the_embedded_engine(tmp_path):
    done = run(["-c", WITHOUT], "--engines", "embedded", "--out", str(tmp_path / "table.md"))
    assert done.returncode == 0, done.stderr[-3000:]
    result = json.loads(done.stdout)
    (row,) = result["rows"]
    assert row["engine"] == "embedded"
    check(row)
    page = (tmp_path / "table.md").read_text()
    assert result["date"] in page
    assert "| embedded | 4 |" in page
    assert result["learner"] == []  # its configuration needs pydantic


def test_vllm_is_measured_beside_it_where_it_is_installed():
    done = run(["-m", "pipelinerl_core.bench.gpu"])
    assert done.returncode == 0, done.stderr[-3000:]
    result = json.loads(done.stdout)
    rows = result["rows"]
    (learner,) = result["learner"]
    assert learner["size"] == "tiny"
    assert learner["tokens_per_second"] > 0
    assert [row["attention"] for row in result["attention"]] == ["padded", "varlen", "flex"]
    assert [row["engine"] for row in rows] == ["embedded", "vllm"]
    for row in rows:
        check(row)


def test_without_a_gpu_it_says_so():
    done = subprocess.run(
        [sys.executable, "-m", "pipelinerl_core.bench.gpu"],
        cwd=ROOT, env={**os.environ, "CUDA_VISIBLE_DEVICES": ""}, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 1
    assert done.stderr.strip() == "bench gpu: torch finds no GPU; set --device cpu to try the benchmark without one"
