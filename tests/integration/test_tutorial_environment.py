"""docs/tutorials/environment.md and the example of docs/environments.md: their files and commands, with few steps."""

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests.integration.pipeline import ROOT

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

FEWER = "trainer.steps=3 trainer.groups_per_step=4 eval.num_prompts=20"


def page(name):
    """(file name -> text, commands) of a page."""
    text = (ROOT / "docs" / name).read_text()
    files = {file_name: code for code, file_name in re.findall(r"```python\n(# (\S+)\n.*?)```", text, re.DOTALL)}
    return files, "".join(re.findall(r"```sh\n(.*?)```", text, re.DOTALL)).splitlines()


def run(command, directory):
    """The completed process of a command line in a directory."""
    environment = {
        **os.environ,
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
    }
    return subprocess.run(
        ["bash", "-c", command], cwd=directory, env=environment, capture_output=True, text=True, timeout=400,
        check=False,
    )  # fmt: skip


def test_the_tutorial_trains_evaluates_and_closes(tmp_path, prepared_model):
    files, commands = page("tutorials/environment.md")
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    train, evaluate = commands
    done = run(f"{train} {FEWER}", tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    (run_path,) = (tmp_path / "runs").glob("quickstart-*")
    report = json.loads((run_path / "report.json").read_text())
    assert report["steps"] == 3
    assert set(report["eval_components"]) == {"solved", "guesses"}
    assert report["tokens_trained"] > 0
    evaluated = run(evaluate, tmp_path)
    assert evaluated.returncode == 0, evaluated.stderr[-3000:]
    assert re.search(r"version 3: .* on 20 prompts, .*guesses \d\.\d{3}", evaluated.stdout), evaluated.stdout
    assert run("pipelinerl audit latest", tmp_path).returncode == 0


@pytest.mark.parametrize(
    ("mistake", "says"),
    [
        (("weights = {", "weight = {"), r"environment\.path=guess\.py:Guess: Guess\.weights is None"),
        (("for index in range(count)", "for index in range(5)"), r"held_out\(20\) returned 5 tasks\. Set eval"),
        (
            ("0, self.highest, None", "0, self.high, None"),
            r"first message: AttributeError: .*guess\.py:19",
        ),
    ],
)
@pytest.mark.filterwarnings("default")
def test_a_class_that_cannot_be_used_is_one_line_and_exit_code_2(
    tmp_path, prepared_model, mistake, says, refusal, monkeypatch
):
    files, (train, _) = page("tutorials/environment.md")
    (tmp_path / "guess.py").write_text(files["guess.py"].replace(*mistake))
    monkeypatch.chdir(tmp_path)
    line = refusal(*shlex.split(f"{train} {FEWER}")[1:])[-1]
    assert re.search(says, line), line


@pytest.mark.campaign
def test_rows_of_a_table_are_tasks_and_a_mistake_is_an_error_of_its_episodes(tmp_path, prepared_model):
    files, _ = page("environments.md")
    mistake = ["        if seed % 11 == 0:", '            raise ValueError("eleven")']
    lines = files["my_env.py"].replace("Are you sure? Answer again.", "=").splitlines()
    place = lines.index("        reply = await ask(messages)") + 1
    broken = [*lines[:place], *mistake, *lines[place:]]
    (tmp_path / "my_env.py").write_text("\n".join(broken))
    keys = "environment.path=my_env.py:Twice environment.turn_tokens=6"
    done = run(f"pipelinerl train quickstart {keys} {FEWER}", tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    (run_path,) = (tmp_path / "runs").glob("quickstart-*")
    assert set(json.loads((run_path / "report.json").read_text())["eval_components"]) == {"right"}
    log = (run_path / "logs" / "actor-0.log").read_text()
    assert f"environment my_env.py:Twice: ValueError: eleven (my_env.py:{place + 2})" in log
