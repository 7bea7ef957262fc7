"""A run that logs to Weights & Biases too: the real package, offline, in a directory of its own."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from pipelinerl_core.errors import ConfigError
from pipelinerl_core.telemetry.wandb import check_wandb

pytestmark = [pytest.mark.slow, pytest.mark.campaign, pytest.mark.timeout(600)]

PIP = [sys.executable, "-m", "pip", "install", "-q", "--disable-pip-version-check", "--no-deps", "--target"]


@pytest.mark.parametrize("uri", ["", "none"])
def test_a_run_logs_every_metric_to_wandb_with_and_without_mlflow(tmp_path, uri):
    site = tmp_path / "site"
    subprocess.run([*PIP, site, "wandb", "cwevals", "distro", "platformdirs"], check=True, timeout=300)
    own = {"PYTHONPATH": f"{site}:{os.environ.get('PYTHONPATH', '')}", "WANDB_MODE": "offline"}
    settings = ["trainer.steps=3", "tracking.wandb=true", f"tracking.mlflow_uri={uri}", "eval.num_prompts=16"]
    command = [sys.executable, "-m", "pipelinerl.flows.cli", "train", "quickstart", *settings, "--root", tmp_path]
    ended = subprocess.run(command, env={**os.environ, **own}, capture_output=True, text=True, timeout=400)
    assert ended.returncode == 0, ended.stderr[-3000:]
    assert "wandb" not in ended.stderr
    (file,) = tmp_path.glob("quickstart-*/logs/wandb/offline-run-*/run-*.wandb")
    data = file.read_bytes()
    assert data.count(b"reward/mean") >= 3
    assert b"eval/accuracy" in data
    assert b"pipelinerl.logged" in data
    (table,) = Path(file.parent, "files", "media", "table").glob("rollouts*.json")
    assert "completion" in json.loads(table.read_text())["columns"]


def test_without_the_package_the_setting_is_refused():
    with pytest.raises(ConfigError, match="pip install wandb"):
        check_wandb()
