"""docs/verifiers.md with the real library in its own interpreter; the model is scripted, and in one run real."""

import asyncio
import sys

import pytest

from pipelinerl_core.errors import EnvironmentFailed
from pipelinerl_core.types import Reply, ToolCall
from tests.integration.pipeline import ROOT
from tests.integration.test_tutorial_environment import page
from tests.integration.test_tutorial_environment import run as run_command
from tests.unit.environments.episode_case import ScriptedHost, run

INTERPRETER = ROOT / ".venv-verifiers" / "bin" / "python"
pytestmark = [
    pytest.mark.slow,
    pytest.mark.campaign,
    pytest.mark.timeout(600),
    pytest.mark.skipif(not INTERPRETER.exists(), reason="make install ENVIRONMENTS=verifiers has not run"),
]

REWARDS = """
import asyncio
import time

import verifiers.v1 as vf


class Data(vf.TaskData):
    how: str


class T(vf.Task[Data, vf.State, vf.TaskConfig]):
    @vf.reward(weight=1.0)
    async def reward(self, trace: vf.Trace) -> float:
        if self.data.how == "raises":
            raise KeyError("x")
        if self.data.how == "blocks":
            time.sleep(3600)
        if self.data.how == "is late":
            await asyncio.sleep(3600)
        return 1.0


class Ts(vf.Taskset[T, vf.TasksetConfig]):
    def load(self):
        for how in ("held out", "raises", "blocks", "is late", "is fine"):
            yield T(Data(prompt="a", how=how), self.config.task)


__all__ = ["Ts"]
"""


@pytest.fixture(autouse=True)
def work(tmp_path, monkeypatch):
    """A working directory with the modules of the page."""
    for name, text in page("verifiers.md")[0].items():
        (tmp_path / name).write_text(text)
    (tmp_path / "rewards.py").write_text(REWARDS)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def played(ident, *episodes, overrides=()):
    """Scores, or the texts of errors, of episodes at the same time. episodes: (position among the tasks, host)."""
    settings = ("environment.kind=verifiers", f"environment.id={ident}", f"environment.python={INTERPRETER}")

    async def work(pool):
        await pool.check()
        calls = (pool.play({"index": index}, 1, host) for index, host in episodes)
        return await asyncio.gather(*calls, return_exceptions=True)

    results = run(None, work, *settings, "prompts.kind=environment", *overrides, path="")
    return [str(result) if isinstance(result, EnvironmentFailed) else result.score for result in results]


def user_texts(host):
    return [messages[-1]["content"] for messages, _ in host.asked]


def test_an_environment_that_plays_the_user():
    hosts = [ScriptedHost("5", "2", "0"), ScriptedHost("no", "5"), ScriptedHost("5", "7", "6")]
    scores = played("guess_number", *enumerate(hosts))
    assert all(score in (0.0, 1.0) for score in scores)
    for host, score in zip(hosts, scores, strict=True):
        assert user_texts(host)[0] == "0,9="
        assert score == 1.0 or len(host.asked) in (2, 3)
    assert user_texts(hosts[1])[1] == "0,9=", "a wrong reply moves no bound"


def test_a_harness_of_the_taskset_calls_its_tool():
    call = Reply(text="x", content="", num_tokens=3, tool_calls=(ToolCall("lookup", {"record": 1}),))
    right, wrong = ScriptedHost(call, "the sum is 2"), ScriptedHost("5")
    assert played("records", (0, right), (1, wrong)) == [1.0, 0.0]
    ((first, tools), (second, _)) = right.asked
    assert first == [{"role": "user", "content": "What is the sum of the numbers of record 1?"}]
    assert tools[0]["function"]["name"] == "lookup"
    assert [(message["role"], message["content"]) for message in second] == [("tool", "[1, 1]")]


def test_a_harness_of_the_library_calls_a_tool_server():
    call = Reply(text="x", content="", num_tokens=3, tool_calls=(ToolCall("records_lookup", {"record": 1}),))
    right, wrong = ScriptedHost(call, "the sum is 2"), ScriptedHost("5")
    limits = ("environment.call_seconds=120", "environment.episode_seconds=120")
    assert played("record_tools", (0, right), (1, wrong), overrides=("environment.harness=null", *limits)) == [1, 0]
    ((_, tools), (second, _)) = right.asked
    assert tools[0]["function"]["description"] == "The numbers of a record."
    assert [(message["role"], message["content"]) for message in second] == [("tool", "[1, 1]")]


def test_a_game_that_the_library_ships(work, monkeypatch):
    words = work / "data" / "corpora" / "words"
    words.mkdir(parents=True)
    for name in ("en", "en-basic"):
        (words / name).write_text("cat\ndog\nsun\n")
    (words / "README").write_text("three words")
    monkeypatch.setenv("NLTK_DATA", str(work / "data"))
    host = ScriptedHost("[cat]", "[dog]", "[sun]")
    overrides = ("environment.options.game=Hangman-v0", 'environment.variables=["NLTK_DATA"]')
    assert played("textarena", (0, host), overrides=overrides) == [1.0]
    assert "You are playing Hangman" in user_texts(host)[0]


def test_a_missing_reward_is_an_error_and_a_reward_that_blocks_concerns_its_episode_alone():
    hosts = [ScriptedHost("a") for _ in range(4)]
    limits = ("environment.call_seconds=5", "environment.episode_seconds=8", "environment.programs=4")
    raises, blocks, late, fine = played("rewards", *enumerate(hosts), overrides=limits)
    assert "ended with exit code 1: TaskError: task T scoring: KeyError: 'x'" in raises
    assert "environment.call_seconds=5" in blocks
    assert "environment.call_seconds=5" in late
    assert fine == 1.0


@pytest.mark.parametrize(
    ("ident", "further", "says"),
    [
        ("nothing_here", "", "taskset 'nothing_here' not found"),
        ("records", "environment.options.nokey=3", "taskset.nokey Extra inputs are not permitted"),
        (
            "records",
            f"environment.python={sys.executable}",
            "needs verifiers 0.4: make install ENVIRONMENTS=verifiers",
        ),
        ("records", "environment.python=none/python", "none/python: No such file or directory. The interpreter"),
    ],
)
def test_an_unusable_environment_is_one_line(ident, further, says):
    with pytest.raises(EnvironmentFailed) as failed:
        played(ident, overrides=(further,) if further else ())
    assert says in str(failed.value)
    assert "\n" not in str(failed.value)


def test_the_command_of_the_page_trains(work):
    (command,) = [line for line in page("verifiers.md")[1] if "train quickstart" in line]
    short = (
        "trainer.steps=2 eval.num_prompts=20 trainer.groups_per_step=4 engine.concurrency=32 tracking.mlflow_uri=none"
    )
    done = run_command(f"{command} {short} environment.python={INTERPRETER} --root runs", work)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "held-out " in done.stdout
