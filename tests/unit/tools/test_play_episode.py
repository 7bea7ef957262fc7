"""An episode without a model: the turns come from a script."""

import asyncio
import json
import sys

import pytest

from pipelinerl_core.errors import ConfigError, EnvironmentFailed
from pipelinerl_core.models.resolve import load_config
from pipelinerl_core.tools.play_episode import play, read_turns
from tests.unit.environments.test_agents import HELPERS

CLASS = """
class Sorting:
    weights = {"sorted": 1.0}

    async def play(self, task, ask, seed):
        messages = [{"role": "user", "content": task["prompt"]}]
        reply = await ask(messages, tools=[{"name": "look", "parameters": {}}])
        if reply.tool_calls:
            again = await ask([*messages, reply.message, {"role": "tool", "content": "b a"}])
            return again.content
        return (await ask([{"role": "user", "content": "in short"}])).content

    def score(self, task, transcript):
        return {"sorted": float(transcript == task["answer"])}
"""


def played(config, *turns):
    """(result or error, shown lines)"""
    shown, script = [], iter(turns)
    try:
        return asyncio.run(play(config, 0, lambda: next(script, None), shown.append)), shown
    except EnvironmentFailed as error:
        return error, shown


@pytest.fixture
def sorting(tmp_path):
    (tmp_path / "sorting.py").write_text(CLASS)
    (tmp_path / "rows.jsonl").write_text('{"prompt": "b a", "answer": "a b"}\n{"prompt": "d c", "answer": "c d"}\n')
    rows = [f"prompts.path={tmp_path}/rows.jsonl", "prompts.kind=file", "model.chat_template=true"]
    return load_config("quickstart", [f"environment.path={tmp_path}/sorting.py:Sorting", *rows])


def test_a_script_calls_a_tool_and_the_reward_is_the_environments(sorting, tmp_path):
    (tmp_path / "turns.jsonl").write_text(
        '{"content": "", "tool_calls": [{"name": "look", "arguments": {"at": "row"}}]}\n\n"a b"\n'
    )
    result, shown = played(sorting, *read_turns(str(tmp_path / "turns.jsonl")))
    task = json.loads(shown[0].removeprefix("task: "))
    assert task["answer"] in ("a b", "c d")
    assert shown[1:] == [
        "tools: look", f"user: {task['prompt']}", "turn 0: ", '  calls look({"at": "row"})', "tool: b a",
        "turn 1: a b",
    ]  # fmt: skip
    assert result["reward"] == result["components"]["sorted"] == float(task["answer"] == "a b")
    assert [turn["after"] for turn in result["turns"]] == [-1, 0]


def test_a_branch_is_shown_and_a_script_that_ends_is_a_budget_that_is_used_up(sorting):
    result, shown = played(sorting, "no call")
    assert shown[-3:] == ["-- a branch: a history of its own", "user: in short", "-- no turn or branch is left"]
    assert (result["cut"], result["reward"]) == (True, 0.0)


def test_a_process_that_dies_hears_the_same_turns_again_and_its_exit_code_is_the_error(sorting, tmp_path):
    dying = CLASS.replace("if reply.tool_calls:", "__import__('os')._exit(3)\n        if reply.tool_calls:")
    (tmp_path / "sorting.py").write_text(dying)
    error, shown = played(sorting, "a b")
    assert "3 times during this episode, the process ended (exit code 3)" in str(error)
    assert [line for line in shown if line.startswith("turn")] == ["turn 0: a b"]


def test_an_agent_program_is_played_and_its_error_is_one_line(tmp_path):
    script = tmp_path / "agent.py"
    script.write_text(HELPERS + 'show([message(chat([user("a")]))["content"]])\nreward(0.5)')
    (tmp_path / "rows.jsonl").write_text(
        "".join(json.dumps({"prompt": f"p{at}", "file": str(tmp_path / "shown")}) + "\n" for at in range(2))
    )
    settings = [
        "environment.kind=command", "environment.reward=posted", "prompts.kind=file", "model.chat_template=true",
        f"prompts.path={tmp_path}/rows.jsonl",
    ]  # fmt: skip
    command = f"environment.command={json.dumps([sys.executable, '-I', '-S', str(script)])}"
    result, shown = played(load_config("quickstart", [*settings, command]), "hello")
    assert result["reward"] == 0.5
    assert (tmp_path / "shown").read_text() == '["hello"]\n'
    assert shown[1:] == ["user: a", "turn 0: hello"]
    script.write_text(HELPERS + 'chat([user("a")])\nsys.exit("no luck")')
    error, _ = played(load_config("quickstart", [*settings, command]), "hello")
    assert "no luck" in str(error)


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("a b", "is not JSON"),
        ("[1]", "write a JSON string"),
        ('{"text": "a"}', "write a JSON string"),
        ('{"tool_calls": [{"arguments": {}}]}', "a tool call cannot be read"),
    ],
)
def test_a_wrong_script_is_one_line(tmp_path, line, says):
    (tmp_path / "turns.jsonl").write_text(f'"a"\n{line}\n')
    with pytest.raises(ConfigError, match=f"turns.jsonl, line 2: {says}"):
        read_turns(str(tmp_path / "turns.jsonl"))
    with pytest.raises(ConfigError, match="cannot be read"):
        read_turns(str(tmp_path / "missing.jsonl"))


def test_prompts_without_an_environment_are_refused():
    with pytest.raises(ConfigError, match="play is for environments"):
        played(load_config("quickstart", []))
