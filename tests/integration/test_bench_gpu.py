"""`make bench-gpu` on a CPU: what it measures, and that a machine with torch and transformers alone can run it."""

import json
import os
import subprocess
import sys

import pytest

from tests.integration.pipeline import ROOT

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

WITHOUT = """
import runpy, sys
from importlib.machinery import PathFinder

ABSENT = {"pydantic", "pydantic_core", "tomli_w", "pyarrow", "prefect", "mlflow", "typer", "s3fs", "fsspec", "vllm",
          "peft", "deepspeed"}

class Finder(PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        return None if name.partition(".")[0] in ABSENT else super().find_spec(name, path, target)

sys.meta_path = [Finder if finder is PathFinder else finder for finder in sys.meta_path]
sys.argv = ["bench_gpu", *sys.argv[1:]]
runpy.run_module("benchmarks.gpu", run_name="__main__")
"""
"""Runs the benchmark where the packages of ABSENT are not installed."""


def run(command, *arguments):
    return subprocess.run(
        [sys.executable, *command, "--device", "cpu", "--json", *arguments],
        cwd=ROOT, env=dict(os.environ), capture_output=True, text=True, timeout=560,
    )  # fmt: skip


def check(row):
    assert row["parity_ok"] is True
    assert 0 < row["parity_mean"] < row["parity_max"]
    assert row["tokens_per_second"] > 0
    assert row["pause_ms"] > 0
    assert row["copy_ms"] == pytest.approx(2 * row["weights_read_ms"])


def test_torch_and_transformers_are_enough_for_the_embedded_engine(tmp_path):
    done = run(["-c", WITHOUT], "--out", str(tmp_path / "table.md"))
    assert done.returncode == 0, done.stderr[-3000:]
    result = json.loads(done.stdout)
    (row,) = result["rows"]
    assert row["engine"] == "embedded"
    check(row)
    page = (tmp_path / "table.md").read_text()
    assert result["date"] in page
    assert "| embedded | 4 |" in page
    assert result["learner"] == result["attention"] == []
    needs_pydantic = "not measured", "the package pydantic is not installed. pip install pydantic"
    assert [(part["part"], part["status"], part["result"]) for part in result["parts"][1:]] == [
        (
            "engine vllm, 4 slots",
            "not measured",
            "the package vllm is not installed. make install ENGINE=vllm",
        ),
        ("learner tiny", *needs_pydantic),
        ("attention padded, learner tiny", *needs_pydantic),
        ("attention varlen, learner tiny", *needs_pydantic),
        ("attention flex, learner tiny", *needs_pydantic),
    ]
    for part in result["parts"]:
        assert f"| {part['part']} | {part['status']} | {part['result']} |" in page
        assert f"{part['part']}\n    {part['status']}: {part['result']}\n" in done.stderr


@pytest.mark.campaign
def test_vllm_is_measured_beside_the_embedded_engine_where_vllm_is_installed():
    done = run(["-m", "benchmarks.gpu"])
    assert done.returncode == 0, done.stderr[-3000:]
    result = json.loads(done.stdout)
    rows = result["rows"]
    (learner,) = result["learner"]
    assert learner["size"] == "tiny"
    assert learner["tokens_per_second"] > 0
    assert [row["attention"] for row in result["attention"]] == ["padded"]
    assert [part["status"] for part in result["parts"]] == [*["measured"] * 4, "not measured", "not measured"]
    for part in result["parts"][4:]:
        assert "needs a GPU" in part["result"]
    assert [row["engine"] for row in rows] == ["embedded", "vllm"]
    for row in rows:
        check(row)


def test_without_a_gpu_the_benchmark_is_refused_with_a_message():
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.gpu"],
        cwd=ROOT, env={**os.environ, "CUDA_VISIBLE_DEVICES": ""}, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 2
    assert done.stderr.startswith("bench gpu: torch ")
    assert "set --device cpu, which tries the benchmark with tiny models" in done.stderr
