"""`pipelinerl bench sandbox` runs programs with each isolation of this host, and leaves no process."""

import json
import sys

import psutil
import pytest

from benchmarks import sandbox
from pipelinerl_core.sandbox import isolation


@pytest.mark.skipif(bool(isolation.missing()), reason="this host has no Landlock or no seccomp")
def test_each_isolation_is_measured_beside_a_new_interpreter(monkeypatch, capsys):
    before = set(psutil.Process().children(recursive=True))
    arguments = ["--programs", "2", "--sandboxes", "1", "--rounds", "1"]
    monkeypatch.setattr(sys, "argv", ["bench", *arguments, "--json"])
    assert sandbox.main() == 0
    result = json.loads(capsys.readouterr().out)
    rows = {row["isolation"]: row for row in result["rows"]}
    assert sandbox.INTERPRETER in rows
    assert any(name.startswith("Landlock") for name in rows)
    assert all(row.get("missing") or row["per_second"] > 0 for row in rows.values())
    assert "| Landlock" in sandbox.table(result)
    assert set(psutil.Process().children(recursive=True)) == before
