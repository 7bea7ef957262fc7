"""docs/tutorials/environment.md and the example of docs/environments.md: their files and commands, with few steps."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.integration.pipeline import ROOT

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

FEWER = "trainer.steps=3 eval.num_prompts=20"


def page(name):
    """(file name -> text, commands) of a page."""
    text = (ROOT / "docs" / name).read_text()
    files = {found: code for code, found in re.findall(r"```python\n(# (\S+)\n.*?)```", text, re.DOTALL)}
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
    (found,) = (tmp_path / "runs").glob("quickstart-*")
    report = json.loads((found / "report.json").read_text())
    assert report["steps"] == 3
    assert set(report["eval_components"]) == {"solved", "guesses"}
    assert report["ledger"]["tokens"]["trained"] > 0
    evaluated = run(evaluate, tmp_path)
    assert evaluated.returncode == 0, evaluated.stderr[-3000:]
    assert re.search(r"version 3: .* on 20 prompts, .*guesses \d\.\d{3}", evaluated.stdout), evaluated.stdout
    assert run("pipelinerl audit latest", tmp_path).returncode == 0


@pytest.mark.parametrize(
    ("mistake", "says"),
    [
        (("weights = {", "weight = {"), r"environment\.path=guess\.py:Guess: Guess\.weights is None"),
        (("import random", "import randon"), r"guess\.py imports randon, which is not installed"),
        (("def score", "def scores"), r"Guess has no method score"),
        (
            ("for index in range(count)", "for index in range(5)"),
            r"held_out\(20\) returned 5 tasks\. Set eval\.num_prompts",
        ),
        (("highest=9", "highest"), r"environment\.options\.highest is not set"),
    ],
)
def test_a_class_that_cannot_be_used_is_one_line_and_exit_code_2(tmp_path, prepared_model, mistake, says):
    files, (train, _) = page("tutorials/environment.md")
    (tmp_path / "guess.py").write_text(files["guess.py"].replace(*mistake))
    done = run(f"{train} {FEWER}", tmp_path)
    assert done.returncode == 2, done.stderr[-2000:]
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("pipelinerl: ")]
    assert re.search(says, line), line


def test_a_mistake_in_play_is_an_error_of_its_episodes_with_file_and_line(tmp_path, prepared_model):
    files, (train, _) = page("tutorials/environment.md")
    broken = files["guess.py"].replace(
        '        return {"guess"',
        '        if seed % 11 == 0:\n            raise ValueError("eleven")\n        return {"guess"',
    )
    (tmp_path / "guess.py").write_text(broken)
    done = run(f"{train} {FEWER} trainer.steps=6", tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    (found,) = (tmp_path / "runs").glob("quickstart-*")
    line = broken.splitlines().index('            raise ValueError("eleven")') + 1
    assert (
        f"environment guess.py:Guess: ValueError: eleven (guess.py:{line})"
        in (found / "logs" / "actor-0.log").read_text()
    )


def test_rows_of_a_table_are_the_tasks_of_a_class_without_tasks(tmp_path, prepared_model):
    files, _ = page("environments.md")
    (tmp_path / "my_env.py").write_text(files["my_env.py"].replace("Are you sure? Answer again.", "="))
    done = run(
        f"pipelinerl train quickstart environment.path=my_env.py:Twice environment.turn_tokens=6 {FEWER}", tmp_path
    )
    assert done.returncode == 0, done.stderr[-3000:]
    (found,) = (tmp_path / "runs").glob("quickstart-*")
    assert set(json.loads((found / "report.json").read_text())["eval_components"]) == {"right"}
