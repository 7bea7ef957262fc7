"""docs/tutorials/crash.md: its commands in one shell, in their order, with fewer steps; the kill is a real one."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.integration.cli_case import committed, left_over
from tests.integration.pipeline import ROOT
from tests.waiting import wait_for

pytestmark = [pytest.mark.slow, pytest.mark.campaign, pytest.mark.timeout(900)]

PAGE = (ROOT / "docs" / "tutorials" / "crash.md").read_text()
COMMANDS = [line for block in re.findall(r"```(?:sh)?\n(.*?)```", PAGE, re.DOTALL) for line in block.splitlines()]
(SNIPPET,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
FEWER = {"trainer.steps=300": "trainer.steps=26", "eval.num_prompts=64": "eval.num_prompts=8"}
KILLED_AT = 4


@pytest.fixture
def shell(tmp_path, prepared_model):
    """A shell in an empty directory; its output goes to output.txt."""
    environment = {
        **os.environ,
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
    }
    with (tmp_path / "output.txt").open("w") as output:
        process = subprocess.Popen(
            ["bash"], stdin=subprocess.PIPE, stdout=output, stderr=output, cwd=tmp_path, env=environment, text=True
        )
        yield process
        process.stdin.close()
        process.kill()
        process.wait(10)


def test_a_killed_run_resumes_closes_replays_and_shows_its_rows(shell, tmp_path):
    def carry_out(command):
        shell.stdin.write(f"{command}\necho exit code $? >> codes.txt\n")
        shell.stdin.flush()

    def num_done():
        codes = tmp_path / "codes.txt"
        return len(codes.read_text().splitlines()) if codes.exists() else 0

    train, kill, runs, resume, audit, replay = COMMANDS
    assert train.endswith(" &")
    for before, after in FEWER.items():
        assert before in train
        train = train.replace(before, after)
    root = tmp_path / "runs"
    carry_out(train)
    wait_for(lambda: committed(root) >= KILLED_AT, f"step {KILLED_AT}", 300, process=shell)
    carry_out(kill)
    wait_for(lambda: not left_over(root, []), "the end of all processes of the run", 30)
    reached = committed(root)
    (tmp_path / "rows.py").write_text(SNIPPET)
    later = [runs, resume, audit, replay, "python rows.py"]
    later += re.findall(r"`(pipelinerl replay latest --from-step 12 [^`]*)`", PAGE)
    for number, command in enumerate(later):
        carry_out(command)
        wait_for(lambda most=number: num_done() >= most + 3, command, 300, process=shell)
    output = (tmp_path / "output.txt").read_text()
    assert set((tmp_path / "codes.txt").read_text().splitlines()) == {"exit code 0"}, output[-3000:]
    assert reached < committed(root) == 26
    assert re.search(r"^quickstart-\S+ +\S+ +stopped", output, re.MULTILINE), output
    assert "Traceback" not in output
