"""Every preset runs with --tiny: three steps with its engine, learner, transport and adapters, on a CPU."""

import json
import os
import subprocess
import sys

import pytest

from pipelinerl_core.config import preset_names
from pipelinerl_core.models.resolve import load_config
from tests.integration.pipeline import ROOT, assert_closes

pytestmark = [pytest.mark.slow, pytest.mark.campaign, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def environment(tmp_path_factory):
    """No cached model, no data set, no Prefect server, and no network for the hub's libraries."""
    caches = {name: str(tmp_path_factory.mktemp(name.lower())) for name in ("PIPELINERL_CACHE", "HF_HOME")}
    inherited = {name: value for name, value in os.environ.items() if name != "PREFECT_API_URL"}
    return {**inherited, **caches, "HF_HUB_OFFLINE": "1"}


@pytest.mark.parametrize("preset", preset_names())
def test_a_preset_runs_to_its_end_with_tiny(tmp_path, environment, preset):
    command = [
        sys.executable,
        "-m",
        "pipelinerl.flows.cli",
        "train",
        preset,
        "--tiny",
        "--root",
        str(tmp_path),
        "--json",
    ]
    ended = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=800, check=False
    )
    assert ended.returncode == 0, ended.stderr[-3000:]
    assert ended.stderr.startswith("--tiny replaces model.path=builtin:tiny?of=")
    assert json.loads(ended.stdout)["steps"] == 3
    (record,) = tmp_path.glob("*/run.json")
    stored, config = json.loads(record.read_text())["config"], load_config(preset)
    assert stored["weights"]["transport"] == config.weights.transport
    assert (stored["engine"]["kind"], stored["learner"]["kind"]) == (config.engine.kind, config.learner.kind)
    assert_closes(str(record.parent))
