"""The frameworks of docs/agents.md, installed in a virtual environment of their own, call a tool without a model."""

import json
import subprocess
import sys

import pytest

from tests.integration.test_tutorial_environment import page, run

pytestmark = [pytest.mark.slow, pytest.mark.campaign, pytest.mark.timeout(600)]

PACKAGES = ("openai-agents", "pydantic-ai-slim[openai]")


@pytest.fixture(scope="module")
def python(tmp_path_factory):
    """The interpreter of a virtual environment with the frameworks."""
    place = tmp_path_factory.mktemp("frameworks")
    subprocess.run([sys.executable, "-m", "venv", place], check=True)
    subprocess.run([place / "bin" / "pip", "install", "-q", "--disable-pip-version-check", *PACKAGES], check=True)
    return place / "bin" / "python"


@pytest.mark.parametrize("script", ["openai_agent.py", "pydantic_agent.py"])
def test_a_script_of_turns_calls_the_tool_of_a_framework(script, python, tmp_path):
    files, commands = page("agents.md")
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    *rows, play, train = [line for line in commands if "shop.jsonl" in line or "turns.jsonl" in line]
    assert train.endswith("--tiny")
    for row in rows:
        assert run(row, tmp_path).returncode == 0
    play = play.replace('"python"', f'"{python}"').replace("openai_agent.py", script)
    done = run(f"{play} environment.call_seconds=100 --json", tmp_path)
    assert done.returncode == 0, done.stderr
    assert "tools: price\n" in done.stderr
    assert '  calls price({"item": "pear"})\n' in done.stderr
    played = json.loads(done.stdout)
    assert [turn["after"] for turn in played["turns"]] == [-1, 0]
    asked, answered = (turn["messages"] for turn in played["turns"])
    assert asked[-1]["role"] == "user"
    assert [message["role"] for message in answered] == ["tool"]
    assert played["reward"] == 1
    assert answered[0]["content"] == "5"
