"""Agent programs: real processes that speak HTTP with the endpoint of their episode; the model is scripted."""

import asyncio
import json
import sys
from pathlib import Path

import psutil
import pytest

from pipelinerl_core.environments.agents.program import Verifiers
from pipelinerl_core.environments.pool import build_environments
from pipelinerl_core.errors import ConfigError, EnvironmentFailed
from pipelinerl_core.models.resolve import load_config
from pipelinerl_core.rewards.pool import build_scorer
from pipelinerl_core.rollouts.episode import task_of
from pipelinerl_core.types import Prompt, Reply, ToolCall
from tests.unit.environments.episode_case import LIMIT_SECONDS, ScriptedHost
from tests.waiting import wait_for

HELPERS = """
import http.client, json, os, subprocess, sys, time, urllib.parse

task = json.load(sys.stdin)
url = urllib.parse.urlsplit(os.environ["OPENAI_BASE_URL"])

def call(method, path, body=None, key=os.environ["OPENAI_API_KEY"], **headers):
    connection = http.client.HTTPConnection(url.hostname, url.port)
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    connection.request(method, url.path + path, json.dumps(body), {"Authorization": "Bearer " + key, **named})
    answer = connection.getresponse()
    text = answer.read().decode()
    return answer.status, json.loads(text) if answer.headers["Content-Type"] == "application/json" else text

def chat(messages, **further):
    return call("POST", "/chat/completions", {"model": "any", "messages": messages}, **further)

def user(text):
    return {"role": "user", "content": text}

def message(answer):
    return answer[1]["choices"][0]["message"]

def reward(number, **components):
    return call("POST", "/reward", {"reward": number, "components": components})

def show(value):
    open(task["file"], "a").write(json.dumps(value) + "\\n")
"""
SETTINGS = ("environment.kind=command", "prompts.kind=file", "prompts.path=tasks.jsonl", "model.chat_template=true")


VERIFIERS = ("environment.kind=verifiers", "environment.id=a", "prompts.kind=environment")


class Played:
    """The result of `played`: the scored episode or the text of its error, and what the program has shown."""

    def __init__(self, result, host, file):
        self.result = str(result) if isinstance(result, EnvironmentFailed) else result
        self.host = host
        self.shown = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []

    @property
    def components(self):
        return {component.name: component.value for component in self.result.score.components}


def played(directory, code, *turns, overrides=("environment.reward=posted",), task=(), restart=False, host=None):
    """Play one episode with a program of this code; no process is left afterwards. turns: of the model."""
    script, file = directory / "agent.py", directory / "shown.jsonl"
    script.write_text(HELPERS + code)
    command = f"environment.command={json.dumps([sys.executable, '-I', '-S', str(script), '{word}'])}"
    config = load_config("quickstart", [*SETTINGS, command, *overrides])
    host = host or ScriptedHost(*turns)

    async def main():
        scorer = build_scorer(config) if config.environment.is_judged else None
        pool = build_environments(config, None, scorer)
        try:
            async with asyncio.timeout(LIMIT_SECONDS):
                return await pool.play({"file": str(file), "word": "hello", **dict(task)}, 11, host)
        except EnvironmentFailed as error:
            return error
        finally:
            await pool.close()

    result = asyncio.run(main())
    wait_for(lambda: not _runs(str(script)), "the end of the program", seconds=20)
    return Played(result, host, file)


def _runs(script):
    return any(script in (process.info["cmdline"] or []) for process in psutil.process_iter(["cmdline"]))


def test_a_program_plays_turns_and_sends_its_reward(tmp_path):
    code = """
messages = [user(sys.argv[1])]
first = chat(messages)
messages += [{**message(first), "refusal": None, "content": " one\\n"}, user([{"type": "text", "text": "more"}])]
second = chat(messages)
show([first, second, call("GET", "/models"), os.environ["PIPELINERL_SEED"], reward(0.5, turns=2)])
"""
    episode = played(tmp_path, code, "one", Reply(text="two", content="two", num_tokens=3, num_tokens_before=9))
    assert [messages for messages, _ in episode.host.asked] == [[user("hello")], [user("more")]]
    assert episode.components == {"reward": 0.5, "turns": 2.0}
    first, second, models, seed, rewarded = episode.shown[0]
    assert first[1]["choices"][0] == {
        "index": 0,
        "message": {"role": "assistant", "content": "one"},
        "finish_reason": "stop",
        "logprobs": None,
    }
    assert second[1]["usage"] == {"prompt_tokens": 9, "completion_tokens": 3, "total_tokens": 12}
    assert models[1]["data"][0]["id"] == "policy"
    assert (seed, rewarded[0]) == ("11", 200)


def user(text):
    return {"role": "user", "content": text}


def test_tool_calls_go_out_with_ids_and_come_back_as_the_stored_turn(tmp_path):
    code = """
messages, tools = [user("add")], [{"type": "function", "function": {"name": "add", "parameters": {}}}]
body = {"model": "any", "messages": messages, "tools": tools}
answer = call("POST", "/chat/completions", body)
show(answer)
(call_,) = message(answer)["tool_calls"]
messages += [message(answer), {"role": "tool", "tool_call_id": call_["id"], "content": "3"}]
show(call("POST", "/chat/completions", body)[0])
reward(1)
"""
    calls = Reply(text="<call>", content="", tool_calls=(ToolCall("add", {"a": 1}),), num_tokens=2)
    episode = played(tmp_path, code, calls, "done")
    answer, status = episode.shown
    choice = answer[1]["choices"][0]
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"]["content"] is None
    assert choice["message"]["tool_calls"] == [
        {"id": "call00000", "type": "function", "function": {"name": "add", "arguments": '{"a":1}'}}
    ]
    assert status == 200
    assert episode.host.asked[1][0] == [{"role": "tool", "tool_call_id": "call00000", "content": "3"}]
    assert episode.host.asked[0][1] == [{"type": "function", "function": {"name": "add", "parameters": {}}}]
    assert episode.result.score == 1


def test_a_repeated_request_is_one_turn_and_an_equal_body_alone_is_no_repetition(tmp_path):
    code = """
first = chat([user("a")], Idempotency_Key="k1")
again = chat([user("a")], Idempotency_Key="k1")
messages = [user("a"), message(first), user("b")]
second = chat(messages, X_Stainless_Retry_Count="0")
third = chat(messages, X_Stainless_Retry_Count="2")
show([first == again, second == third])
chat(messages)
"""
    episode = played(tmp_path, code + "reward(1)", "one", "two", "three")
    assert episode.shown == [[True, True]]
    assert len(episode.host.asked) == 3
    assert episode.host.followed == [-1, 0, 0]  # the third turn begins a branch at the first one


def test_compacted_edited_and_sub_agents_histories_begin_branches(tmp_path):
    code = """
start = [user("a")]
first = message(chat(start))
second = message(chat([*start, first, user("b")]))
agent = message(chat([user("find c")]))
agents = message(chat([user("find c"), agent, user("more")]))
third = message(chat([*start, first, user("b"), second, user(agents["content"])]))
chat([user("in short: a, b"), third, user("go on")])
chat([*start, first, user("b2")])
reward(1)
"""
    turns = ["one", "two", "sub", "sub2", "three", "four", "five"]
    episode = played(tmp_path, code, *turns)
    assert episode.host.followed == [-1, 0, -1, 2, 1, -1, 0]
    new = [[message["content"] for message in messages] for messages, _ in episode.host.asked]
    assert new == [["a"], ["b"], ["find c"], ["more"], ["sub2"], ["in short: a, b", "three", "go on"], ["b2"]]
    assert episode.result.score == 1


def test_a_turn_with_the_text_of_another_turn_stays_what_it_is(tmp_path):
    code = """
shown = [user("is 2 even?"), {"role": "assistant", "content": "yes"}, user("is 4 even?")]
first = message(chat(shown))
second = message(chat([*shown, first, user("sure?")]))
agent = message(chat([user("an agent's question")]))
chat([*shown, first, user("sure?"), second, user("really?")])
chat([user("in short"), agent, user("go on")])
reward(1)
"""
    replies = [Reply(text=f"<think>r{number}</think>yes", content="yes", num_tokens=1) for number in range(5)]
    episode = played(tmp_path, code, *replies)
    assert episode.host.followed == [-1, 0, -1, 1, -1]
    assert [message["content"] for message in episode.host.asked[0][0]] == ["is 2 even?", "yes", "is 4 even?"]
    assert [message["content"] for message in episode.host.asked[4][0]] == ["in short", "yes", "go on"]


def test_calls_in_a_compacted_history_are_objects(tmp_path):
    code = """
tool = {"id": "call00000", "type": "function", "function": {"name": "add", "arguments": '{"a":1}'}}
odd = {**tool, "function": {"name": "add", "arguments": '{"a":NaN}'}}
start = [user("a"), {"role": "assistant", "content": None, "tool_calls": [tool, odd]}]
chat([*start, {"role": "tool", "tool_call_id": "call00000", "content": "3"}])
reward(1)
"""
    episode = played(tmp_path, code, "one")
    turn = episode.host.asked[0][0][1]
    assert turn["tool_calls"][0]["function"] == {"name": "add", "arguments": {"a": 1}}
    assert turn["tool_calls"][1]["function"]["arguments"] == '{"a":NaN}'
    assert turn["content"] == ""


def test_a_stream_has_the_turn_and_its_usage(tmp_path):
    code = """
body = {"messages": [user("a")], "stream": True, "stream_options": {"include_usage": True}}
show(call("POST", "/chat/completions", body)[1])
reward(1)
"""
    events = played(tmp_path, code, "one").shown[0].removesuffix("\n\n").split("\n\n")
    assert events[-1] == "data: [DONE]"
    chunks = [json.loads(event.removeprefix("data: ")) for event in events[:-1]]
    assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": "one"}
    assert chunks[1]["choices"][0]["finish_reason"] == "stop"
    assert chunks[2]["usage"]["completion_tokens"] == 3


@pytest.mark.parametrize(
    ("code", "says"),
    [
        ("chat([user('a')])\nsys.stderr.write('no luck')\nsys.exit(3)", "ended with exit code 3: no luck"),
        ("chat([user('a')])\nos.kill(os.getpid(), 15)", "was killed by signal 15: no message on stderr"),
        ("chat([user('a')])", "the program ended without a POST to /reward"),
        ("reward(1)", "the program ended without a request to the model"),
        ("chat([user('a')])\ntime.sleep(60)", "took more than environment.call_seconds=3"),
        (
            "chat([user('a')])\nsys.exit(reward(1e400)[1]['error']['message'])",
            "exit code 1: the request has inf for reward; rewards are finite",
        ),
    ],
)
def test_a_program_without_a_result_is_an_error_that_says_why(tmp_path, code, says):
    overrides = ("environment.reward=posted", "environment.call_seconds=3")
    episode = played(tmp_path, code, "one", "two", overrides=overrides)
    assert says in episode.result, episode.result
    assert episode.result.startswith("environment command python")


def test_a_wrong_request_is_refused_and_the_program_may_go_on(tmp_path):
    code = """
show([
    call("POST", "/chat/completions", {"messages": [user("a")]}, key="sk-other")[0],
    call("POST", "/chat/completions", {"messages": "a"})[0],
    call("POST", "/chat/completions", {"messages": [user("a")], "n": 2})[1]["error"]["message"],
    call("POST", "/chat/completions", {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]})[0],
    call("GET", "/embeddings")[0],
    call("POST", "/reward", {"reward": "high"})[1]["error"]["message"],
    chat([user("a")])[0],
])
reward(0)
"""
    episode = played(tmp_path, code, "one")
    assert episode.shown[0] == [401, 400, "n must be 1: the run samples the episodes of a group", 400, 404,
                            "reward is no number", 200]  # fmt: skip
    assert episode.result.score == 0


def test_a_budget_that_is_used_up_is_a_refusal_and_a_program_that_fails_then_has_reward_0(tmp_path):
    code = """
messages = [user("a")]
first = chat(messages)
messages += [message(first), user("b")]
status, body = chat(messages)
show([status, body["error"]["code"]])
sys.exit(task["exit"])
"""
    cut = played(tmp_path, code, "one", task={"exit": 1}.items())
    assert cut.shown == [[400, "context_length_exceeded"]]
    assert (cut.result.is_cut, cut.result.score) == (True, 0)
    handled = played(tmp_path, "reward(0.25)\n" + code, "one", task={"exit": 0}.items())
    assert (handled.result.is_cut, handled.result.score) == (False, 0.25)


@pytest.mark.parametrize(("source", "reward"), [("answer", 1), ("stdout", 0)])
def test_the_verifier_of_the_run_scores_the_answer_or_the_output(tmp_path, source, reward):
    code = "message(chat([user('7+8?')]))\nprint('x' * 200000)\nprint(14)"
    overrides = (f"environment.reward={source}", "reward.kind=last_number")
    episode = played(tmp_path, code, "it is 15", overrides=overrides, task={"answer": "15"}.items())
    assert episode.result.score == reward


def test_a_function_of_trl_gets_the_messages_of_the_prompt(tmp_path, monkeypatch):
    code = """
def echo(prompts, completions, **columns):
    return [float(completions[0][0]["content"] == prompts[0][-1]["content"])]
"""
    (tmp_path / "trl_rewards.py").write_text(code)
    monkeypatch.syspath_prepend(str(tmp_path))
    overrides = ("environment.reward=answer", "reward.function=trl_rewards:echo")
    asked = [user("7+8?")]
    row = {"prompt": asked, "messages": [user("another column")]}
    prompt = Prompt(prompt_id="p", source="file", env="", text="7+8?", messages=tuple(asked), task=row)
    config = load_config("quickstart", [*SETTINGS, 'environment.command=["a"]', *overrides])
    episode = played(
        tmp_path, "chat([user(task['prompt'])])", "7+8?", overrides=overrides, task=task_of(config, prompt)
    )
    assert episode.result.score == 1


def test_nothing_that_a_program_has_started_outlives_its_episode(tmp_path):
    code = """
inner = "import os, time; os.setsid(); open(%r, 'a').write(str(os.getpid()) + chr(10)); time.sleep(300)"
child = "import subprocess, sys; subprocess.Popen([sys.executable, '-I', '-S', '-c', %r])" % (inner % task["file"])
subprocess.run([sys.executable, "-I", "-S", "-c", child])
while not os.path.exists(task["file"]):
    time.sleep(0.01)
chat([user("a")])
reward(1)
time.sleep(task["wait"])
"""
    for wait, overrides in ((0, ()), (60, ("environment.call_seconds=2",))):
        Path(tmp_path / "shown.jsonl").unlink(missing_ok=True)
        episode = played(tmp_path, code, "one", task={"wait": wait}.items(),
                     overrides=("environment.reward=posted", *overrides))  # fmt: skip
        (pid,) = episode.shown
        wait_for(lambda pid=pid: not psutil.pid_exists(pid), "the end of the orphan", seconds=20)
        assert isinstance(episode.result, str) == bool(wait)


def test_a_key_is_dead_after_its_episode(tmp_path):
    code = """
show([url.port, os.environ["OPENAI_API_KEY"]])
chat([user("a")])
reward(1)
"""
    ports = [played(tmp_path, code, "one").shown[-1] for _ in range(2)]
    assert ports[0][1] != ports[1][1]

    async def refused():
        with pytest.raises(ConnectionRefusedError):
            await asyncio.open_connection("127.0.0.1", ports[1][0])

    asyncio.run(refused())


def test_modules_are_imported_once_and_each_episode_runs_in_a_fork(tmp_path):
    script = tmp_path / "agent.py"
    script.write_text(
        HELPERS + "show(['wave' in sys.modules, __name__, sys.argv[1]])\nchat([user('a')])\n"
        "import atexit, threading, time\natexit.register(print, 'exit', file=sys.stderr)\n"
        "threading.Thread(target=lambda: (time.sleep(0.1), print('thread', file=sys.stderr))).start()\n"
        "sys.exit('bad luck')\n"
    )
    command = json.dumps([sys.executable, str(script), "{word}"])

    def play(preload):
        overrides = ["environment.reward=posted", f"environment.command={command}", f"environment.preload={preload}"]
        pool = build_environments(load_config("quickstart", [*SETTINGS, *overrides]), None)

        async def main():
            try:
                host = ScriptedHost("one")
                with pytest.raises(EnvironmentFailed) as raised:
                    await pool.play({"file": str(tmp_path / "shown"), "word": "hello"}, 1, host)
                return str(raised.value)
            finally:
                await pool.close()

        return asyncio.run(main())

    assert "ended with exit code 1: bad luck thread exit" in play('["wave"]')
    assert json.loads((tmp_path / "shown").read_text()) == [True, "__main__", "hello"]
    assert "environment.preload=no_such: ModuleNotFoundError: No module named 'no_such'" in play('["no_such"]')


def test_an_exit_code_above_255_is_an_error_of_a_fork_too(tmp_path):
    """The kernel keeps the low byte, and a program that is no fork ends with 0 then."""
    command = f"environment.command={json.dumps([sys.executable, str(tmp_path / 'agent.py')])}"
    overrides = ("environment.reward=posted", command, 'environment.preload=["wave"]')
    episode = played(tmp_path, "chat([user('a')])\nreward(1)\nsys.exit(256)", "one", overrides=overrides)
    assert "ended with exit code 1" in episode.result


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        (["environment.kind=command"], "environment.command: not set. Set environment.command"),
        (['environment.command=["a"]'], "Set environment.kind=command, or remove"),
        (["environment.kind=command", 'environment.command=["a"]', "prompts.kind=environment"], "no tasks"),
        ([*SETTINGS, 'environment.command=["a"]', "environment.path=x.py:Y"], "must be builtin:command"),
        ([*SETTINGS, 'environment.command=["a"]', 'environment.preload=["b"]'],
         "^environment.preload is for a command that runs a Python file"),
        ([*SETTINGS, 'environment.command=["a"]', "environment.programs=0"], "^environment.programs=0: input should"),
        ([*SETTINGS, 'environment.command=["a"]', "environment.comand=1"], "^environment.comand: no such key"),
        (['mixture.a.environment.kind=command', 'mixture.a.environment.command=["a"]',
          'mixture.a.environment.preload=["b"]'], "^mixture.a: environment.preload is for .* a Python file"),
        ([*SETTINGS, 'environment.command=["a"]', "environment.reward=posted", "reward.kind=sums"], "Remove one"),
        (["environment.id=a"], "Set environment.kind=verifiers, or remove"),
        (["environment.kind=verifiers", "prompts.kind=environment"], "environment.id: not set"),
        ([*VERIFIERS, "environment.path=x.py:Y"], "must be builtin:verifiers"),
        ([*VERIFIERS, "environment.reward=posted"], "environment.reward needs environment.kind=command"),
        (["environment.kind=verifiers", "environment.id=a"], "but prompts.kind=\\w+. Set prompts.kind=environment"),
    ],
)  # fmt: skip
def test_a_configuration_that_contradicts_itself_is_refused_in_one_line(overrides, says):
    with pytest.raises(ConfigError, match=says) as raised:
        load_config("quickstart", overrides)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(("total", "num_held_out"), [(2, 1), (7, 2), (79, 16), (80, 8), (1000, 100)])
def test_tasks_of_a_taskset_are_either_trained_or_held_out(total, num_held_out):
    environment = Verifiers.__new__(Verifiers)
    environment.split(total)
    held_out = [task["index"] for task in environment.held_out(total)]
    trained = [environment.task(index)["index"] for index in range(total - num_held_out)]
    assert len(held_out) == num_held_out
    assert sorted(held_out + trained) == list(range(total))
    assert environment.task(total - num_held_out) == environment.task(0)
    assert environment.held_out(1) == [{"index": 0}]
