"""`pipelinerl prepare` as a process."""

import json
import os
import subprocess
import sys
import time

import pytest

from pipelinerl_core.models.recipes import BUILTIN_MODELS, SumsModel, model_directory

pytestmark = pytest.mark.slow

TINY = SumsModel(steps=3, rows=8, hidden_size=16, intermediate_size=16, num_layers=1, num_heads=2, num_kv_heads=1)

BUILD = """
import sys
from pipelinerl_core.models.recipes import SumsModel
from pipelinerl_core.tools.prepare import build
print(build(SumsModel.model_validate_json(sys.argv[1]), lambda line: print(line, file=sys.stderr)))
"""


def test_of_two_processes_one_builds_and_all_get_the_same(tmp_path):
    environment = {**os.environ, "PIPELINERL_CACHE": str(tmp_path), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", BUILD, TINY.model_dump_json()]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    processes = [subprocess.Popen(command, env=environment, **pipes) for _ in range(2)]
    outputs = [process.communicate(timeout=120) for process in processes]
    assert [process.returncode for process in processes] == [0, 0]
    assert len({out for out, _ in outputs}) == 1
    assert sum("building" in err for _, err in outputs) == 1
    assert not list(tmp_path.rglob("*.partial"))


def test_the_command_returns_at_once_when_the_model_is_there(tmp_path, monkeypatch):
    monkeypatch.setenv("PIPELINERL_CACHE", str(tmp_path))
    directory = model_directory(BUILTIN_MODELS["builtin:sums"])
    directory.mkdir(parents=True)
    command = [sys.executable, "-m", "pipelinerl_core.tools.prepare", "--model", "builtin:sums", "--json"]
    begun = time.monotonic()
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert time.monotonic() - begun < 50
    document = json.loads(done.stdout)
    assert document["path"] == str(directory)
    assert document["built"] is False
