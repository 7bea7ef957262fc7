"""docs/tutorials/own-problem.md: its files and commands, in their order, with the real chat model and two steps."""

import json
import re
import subprocess
from pathlib import Path

import pytest

from tests.integration.pipeline import ROOT

pytestmark = [pytest.mark.slow, pytest.mark.campaign, pytest.mark.timeout(900)]

PAGE = (ROOT / "docs" / "tutorials" / "own-problem.md").read_text()
FILES = {name: text for text, name in re.findall(r"```(?:python|toml)\n(# (\S+)\n.*?)```", PAGE, re.DOTALL)}
COMMANDS = "".join(re.findall(r"```sh\n(.*?)```", PAGE, re.DOTALL)).splitlines()
FEWER = {
    "pipelinerl train my.toml": "trainer.steps=2 trainer.groups_per_step=2 engine.concurrency=16 eval.num_prompts=4"
}
"""Overrides that shorten a command of the page."""


@pytest.fixture(scope="module")
def outputs(demo_environment, tmp_path_factory):
    """(directory with the files of the page, command -> its CompletedProcess)."""
    directory = tmp_path_factory.mktemp("my-problem")
    for name, text in FILES.items():
        (directory / name).write_text(text)
    done = {}
    for command in COMMANDS:
        done[command] = subprocess.run(
            ["bash", "-c", f"{command} {FEWER.get(command, '')}"],
            cwd=directory, env=demo_environment, capture_output=True, text=True, timeout=600, check=False,
        )  # fmt: skip
        assert done[command].returncode == 0, f"{command}: {done[command].stderr[-3000:]}"
    return directory, done


def test_the_rows_are_those_of_the_page_and_a_fifth_is_held_out(outputs):
    directory, done = outputs
    rows = [json.loads(line) for line in (directory / "pumps.jsonl").read_text().splitlines()]
    assert len(rows) == 50
    assert json.dumps(rows[0]) in PAGE
    described = done["pipelinerl train my.toml"].stderr
    for line in re.findall(r"^39 different prompts .*|^tokens of the first .*", PAGE, re.MULTILINE):
        assert line in described


def test_the_run_has_a_report_with_the_components_of_the_reward(outputs):
    directory, done = outputs
    (run,) = (directory / "runs").glob("my-*")
    report = json.loads((run / "report.json").read_text())
    assert report["steps"] == 2
    for key in ("eval_components", "reward_components"):
        assert set(report[key]) == {"correct", "brief"}
        assert all(0 <= value <= 1 for mean in report[key].values() for value in mean.values())
    assert "Reward: correct" in (run / "report.html").read_text()
    names = [line.split()[0] for line in done["pipelinerl train my.toml"].stdout.splitlines()]
    assert names.count("correct") == names.count("brief") == 2  # held out and training


def test_each_stored_version_is_evaluated_with_components(outputs):
    _, done = outputs
    lines = done["pipelinerl evaluate latest --version all"].stdout.splitlines()
    versions = [line.split(":")[0] for line in lines]
    assert (versions[0], versions[-1]) == ("version 0", "version 2")  # version 1 if step 1 has a checkpoint
    for line in lines:
        assert re.fullmatch(r".* on 4 prompts, .* s; (correct|brief) \d\.\d{3}, (correct|brief) \d\.\d{3}", line)


def test_the_exported_model_replies(outputs):
    directory, done = outputs
    assert (Path(directory) / "my-model" / "chat_template.jinja").is_file()
    assert done["python ask.py"].stdout.strip()
