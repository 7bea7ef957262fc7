"""Episodes of a user's class in a process: turns, history, recorded values, options, weights, tasks."""

import asyncio
import re

import pytest

from pipelinerl_core.environments.loading import UserEnvironment
from pipelinerl_core.environments.pool import build_environments
from pipelinerl_core.errors import ConfigError, EnvironmentFailed
from pipelinerl_core.sandbox.user_code import Invalid, failure_line
from pipelinerl_core.types import FinishReason, Played, Reply, ToolCall, Transcript
from tests.unit.environments.episode_case import ScriptedHost, configured, played, run

GUESS = """
class Env:
    weights = {"solved": 2.0, "short": -0.5}

    def __init__(self, greeting="Guess", *, limit: int = 2):
        self.greeting, self.limit = greeting, limit

    async def play(self, task, ask, seed):
        messages, replies = [{"role": "user", "content": f"{self.greeting} {seed}"}], []
        for _ in range(self.limit):
            reply = await ask(messages, tools=[{"type": "function", "function": {"name": "f"}}])
            replies.append([reply.text, reply.content, reply.reasoning, reply.tool_calls, reply.finish_reason,
                            reply.num_tokens, reply.tokens_left])
            messages += [reply.message, {"role": "tool", "content": "higher"}]
        return replies

    def score(self, task, transcript):
        return {"solved": transcript == task["replies"], "short": 1, "turns": len(transcript)}
"""


def test_an_episode_of_two_turns_is_scored_and_each_turn_asks_with_new_messages_only():
    full = Reply(
        text="Hm. <call>",
        content="Hm.",
        reasoning="think",
        tool_calls=(ToolCall("f", {"a": [1, None]}),),
        finish_reason=FinishReason.LENGTH,
        num_tokens=4,
        tokens_left=9,
    )
    replies = [
        ["Hm. <call>", "Hm.", "think", [{"name": "f", "arguments": {"a": [1, None]}}], "length", 4, 9],
        ["5\n\x1b\u2028", "5\n\x1b\u2028", "", [], "stop", 4, 0],
    ]
    host = ScriptedHost(full, "5\n\x1b\u2028")
    (result,) = played(GUESS, host, task={"replies": replies})
    assert result == Played(score=1.5)
    assert dict(result.score.components) == {"solved": 1.0, "short": 1.0, "turns": 2.0}
    tools = [{"type": "function", "function": {"name": "f"}}]
    assert host.asked == [
        ([{"role": "user", "content": "Guess 11"}], tools),
        ([{"role": "tool", "content": "higher"}], tools),
    ]


def test_other_tools_begin_a_branch_because_they_stand_before_the_first_turn():
    code = """
class Env:
    weights = {"done": 1.0}

    async def play(self, task, ask, seed):
        messages = [{"role": "user", "content": "plan"}]
        for tools in ([], [{"name": "look"}], [], [{"name": "look"}], [{"name": "other"}]):
            reply = await ask(messages, tools=tools)
            messages += [reply.message, {"role": "user", "content": "on"}]

    def score(self, task, transcript):
        return {"done": 1.0}
"""

    host = ScriptedHost(*"abcde")
    played(code, host)
    assert host.followed == [-1, -1, 1, 2, -1]
    assert [len(messages) for messages, _ in host.asked] == [1, 3, 1, 1, 9]

    twins = """
class Env:
    weights = {"done": 1.0}

    async def play(self, task, ask, seed):
        first = [{"role": "user", "content": "plan"}]
        for tools in ([{"name": "a"}], [{"name": "b"}]):
            reply = await ask(first, tools=tools)
        await ask([*first, reply.message, {"role": "user", "content": "on"}], tools=[{"name": "a"}])

    def score(self, task, transcript):
        return {"done": 1.0}
"""
    host = ScriptedHost(*"ssx")  # equal replies to equal messages under other tools
    played(twins, host)
    assert host.followed == [-1, -1, 0]


def test_messages_and_tools_keep_the_order_of_their_keys():
    code = """
class Env:
    weights = {"solved": 1.0}
    async def play(self, task, ask, seed):
        tool = {"type": "function", "function": {"name": "f", "a": 1}}
        await ask([{"role": "user", "content": "go"}], tools=[tool])
    def score(self, task, transcript):
        return {"solved": 1.0}
"""
    host = ScriptedHost("hm")
    played(code, host, task={})
    ((messages, tools),) = host.asked
    assert [list(messages[0]), list(tools[0]), list(tools[0]["function"])] == [
        ["role", "content"], ["type", "function"], ["name", "a"],
    ]  # fmt: skip


def test_rows_and_transcripts_keep_the_order_of_their_keys():
    code = """
class Env:
    weights = {"first": 1.0}
    async def play(self, task, ask, seed):
        await ask([{"role": "user", "content": "go"}])
        return {1: list(task), "b": 2, "a": 3}
    def score(self, task, transcript):
        return {"first": list(transcript) == ["1", "b", "a"] and transcript["1"] == ["z", "prompt", "answer"]}
"""
    (result,) = played(code, ScriptedHost("hm"), task={"z": 1, "prompt": "p", "answer": "q"})
    assert result.score == 1.0


def test_options_are_the_arguments_of_the_class_and_weights_are_replaced_by_name():
    host = ScriptedHost("1", "2", "3")
    overrides = ["environment.options.limit=3", "environment.options.greeting=Hi", "reward.weights.short=3"]
    (result,) = played(GUESS, host, task={"replies": []}, overrides=overrides)
    assert result.score == 3.0
    assert host.asked[0][0] == [{"role": "user", "content": "Hi 11"}]
    assert len(host.asked) == 3


BY_TURN = """
class Env:
    weights = {"good": 2.0, "solved": 1.0}

    async def play(self, task, ask, seed):
        messages = [{"role": "user", "content": "begin"}]
        for _ in range(2):
            reply = await ask(messages)
            messages += [reply.message, {"role": "user", "content": "next"}]
        return [0.5, -1]

    def score(self, task, transcript):
        return {"good": transcript, "solved": 1, "words": [3, 4], **task["more"]}
"""


def test_a_component_may_have_a_number_for_each_turn():
    (result,) = played(BY_TURN, ScriptedHost("a", "b"), task={"more": {}})
    assert result == Played(score=0.0, turn_rewards=(1.0, -2.0))  # 2 x (0.5 - 1) + 1
    assert dict(result.score.components) == {"good": -0.5, "solved": 1.0, "words": 7.0}


def test_numbers_for_turns_are_one_finite_number_for_each_turn():
    for more, says in (
        ({"good": [1]}, r"score returned 1 numbers for good; the episode has 2 turns \(my_env\.py:\d+\)"),
        ({"good": [1, "x"]}, r"score returned str 'x' for good, not a number"),
    ):
        (error,) = played(BY_TURN, ScriptedHost("a", "b"), task={"more": more})
        assert re.search(says, error), error


COMPARED = """
class Env:
    weights = {"best": 1.0}

    async def play(self, task, ask, seed):
        return [(await ask([{"role": "user", "content": "begin"}])).text, seed]

    async def score_group(self, task, transcripts):
        assert task == {"answer": 7} and all(seed == 11 for _, seed in transcripts)
        if transcripts[0][0] == "bad":
            return [{"best": 1}]
        if transcripts[0][0] == "worse":
            return [{"better": 1} for _ in transcripts]
        longest = max(len(text) for text, _ in transcripts)
        return [{"best": len(text) == longest, "parts": [len(text)]} for text, _ in transcripts]
"""


def test_an_environment_may_score_the_episodes_of_a_group_together():
    async def work(pool):
        hosts = [ScriptedHost(text) for text in ("a", "bcd", "ef")]
        transcripts = await asyncio.gather(*(pool.play({"answer": 7}, 11, host) for host in hosts))
        assert transcripts[1] == Transcript('["bcd",11]', 1)
        errors = []
        for text in ("bad", "worse"):
            with pytest.raises(EnvironmentFailed) as error:
                await pool.score_group({"answer": 7}, [Transcript(f'["{text}",11]', 1), *transcripts])
            errors.append(str(error.value))
        return await pool.score_group({"answer": 7}, transcripts), errors

    results, errors = run(COMPARED, work)
    assert [float(result.score) for result in results] == [0.0, 1.0, 0.0]
    assert [result.turn_rewards for result in results] == [(0.0,), (0.0,), (0.0,)]
    assert dict(results[1].score.components) == {"best": 1.0, "parts": 3.0}
    assert re.search(r"score_group returned 1 results for 4 transcripts \(my_env\.py:8\)", errors[0])
    assert re.search(r"score_group returned no best, which weights names .*\(my_env\.py:8\)", errors[1])


def test_a_class_has_one_way_to_score():
    both = COMPARED + "    def score(self, task, transcript): return {}\n"
    with pytest.raises(Invalid, match="Env has both score and score_group"):
        UserEnvironment("my_env.py:Env", both, {}, {})
    neither = COMPARED.replace("async def score_group", "async def rank")
    with pytest.raises(Invalid, match=r"Env has no method score\(self, task, transcript\)"):
        UserEnvironment("my_env.py:Env", neither, {}, {})


def test_an_episode_without_budget_is_cut_with_all_components_0():
    (result,) = played(GUESS, ScriptedHost("1"), task={"replies": []})
    assert result == Played(score=0.0, is_cut=True)
    assert dict(result.score.components) == {"solved": 0.0, "short": 0.0}


GROUPED = """
import asyncio
from pipelinerl_core.environments.api import BudgetSpent
class Env:
    weights = {"a": 1.0}
    async def play(self, task, ask, seed):
        async def other():
            try:
                await asyncio.sleep(60)
            finally:
                raise ValueError if task["fails"] else BudgetSpent
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(other())
            tasks.create_task(ask([{"role": "user", "content": "Hello"}]))
    def score(self, task, transcript): return {"a": 1.0}
"""


def test_an_episode_whose_task_group_has_no_budget_is_cut():
    (result,) = played(GROUPED, ScriptedHost(), task={"fails": False})
    assert result == Played(score=0.0, is_cut=True)
    (error,) = played(GROUPED, ScriptedHost(), task={"fails": True})
    assert "ValueError" in error


def test_an_environment_may_handle_the_end_of_the_budget():
    code = """
from pipelinerl_core.environments.api import BudgetSpent
class Env:
    weights = {"a": 1.0}
    async def play(self, task, ask, seed):
        for _ in range(2):
            try:
                await ask([{"role": "user", "content": "Hello"}])
            except BudgetSpent:
                pass
    async def score(self, task, transcript): return {"a": transcript is None}
"""
    host = ScriptedHost()
    assert played(code, host, task={}) == [Played(score=1.0)]
    assert len(host.asked) == 1


ONCE = """
import os
class Env:
    weights = {"value": 1.0}
    async def play(self, task, ask, seed):
        calls = []
        async def fetch():
            calls.append(1)
            return [len(calls), None]
        first = await ask.once("weather", fetch)
        second = await ask.once("weather", fetch)
        reply = await ask([{"role": "user", "content": str(first)}])
        if reply.text == "end" and not task["ended"]:
            os._exit(3)
        return [first, second, len(calls)]
    def score(self, task, transcript):
        return {"value": transcript[0][0], "same": transcript[0] == transcript[1], "calls": transcript[2]}
"""


def test_a_value_is_fetched_once_recorded_and_returned_again_when_the_episode_is_played_again():
    fresh, again = ScriptedHost("1"), ScriptedHost("1")
    again.once = {"weather": [7, None]}
    first, second = played(ONCE, fresh, again, task={"ended": False})
    assert fresh.once == {"weather": [1, None]}
    assert dict(first.score.components) == {"value": 1.0, "same": 1.0, "calls": 1.0}
    assert dict(second.score.components) == {"value": 7.0, "same": 1.0, "calls": 0.0}


def test_a_value_that_the_host_forgets_at_a_turn_is_fetched_again():
    class Forgetting(ScriptedHost):
        async def ask(self, messages, tools, after):
            self.once.clear()
            return await super().ask(messages, tools, after)

    code = ONCE.replace(
        "        return [first", "        second = await ask.once('weather', fetch)\n        return [first"
    )
    host = Forgetting("1")
    host.once = {"weather": [7, None]}
    (result,) = played(code, host, task={"ended": False})
    assert host.once == {"weather": [1, None]}
    assert dict(result.score.components) == {"value": 7.0, "same": 0.0, "calls": 1.0}


def test_an_episode_whose_process_dies_is_played_again_and_is_an_error_after_three_deaths():
    class Turning(ScriptedHost):
        """Ends the process in the first two starts of the episode."""

        async def ask(self, messages, tools, after):
            await super().ask(messages, tools, after)
            text = "end" if self.restarts < 2 else "go"
            return Reply(text=text, content=text)

    ends, turns = ScriptedHost("end"), Turning("end", "end")
    error, result = played(ONCE, ends, turns, task={"ended": False})
    assert error == ("environment my_env.py:Env: 3 times during this episode, the process ended (exit code 3)")
    assert result.score == 1.0
    assert turns.once == {"weather": [1, None]}


TASKS = """
class Env:
    weights = {"number": 1.0}
    calls = 0
    def task(self, index): return {"number": index}
    def held_out(self, count):
        self.calls += 1
        return [{"number": 100 * self.calls + one} for one in range(min(count, 5))]
    async def play(self, task, ask, seed): task["number"] = 0
    async def score(self, task, transcript): return {"number": task["number"]}
"""


def test_the_class_may_make_its_own_tasks_and_held_out_is_called_once_per_count():
    async def work(pool):
        assert (await pool.check()).has_tasks
        tasks = [{"index": 7}, *({"held_out": index, "of": 5} for index in (0, 4)), {"held_out": 0, "of": 3}]
        results = [(await pool.play(task, 0, ScriptedHost())).score for task in tasks]
        with pytest.raises(EnvironmentFailed, match=r"held_out\(6\) returned 5 tasks. Set eval.num_prompts to at m"):
            await pool.play({"held_out": 2, "of": 6}, 0, ScriptedHost())
        return results

    assert run(TASKS, work) == [7.0, 100.0, 104.0, 200.0]


@pytest.mark.parametrize(
    ("code", "options", "weights", "message"),
    [
        (GUESS, {"limt": 3}, {}, r"environment\.options\.limt: Env has no such option. Options: greeting, limit"),
        (
            GUESS.replace("int = 2", "int"),
            {},
            {},
            r"environment\.options\.limit is not set, but Env requires this opt",
        ),
        (GUESS, {}, {"solvd": 3}, r"reward\.weights\.solvd: Env\.weights names no such .*: solved, short"),
        (GUESS.replace("class Env", "class Guess"), {}, {}, "no class Env there. Classes: Guess"),
        ("Env = 3", {}, {}, "Env is not a class, but has the type int"),
        (GUESS.replace(": 2.0", ": 'much'"), {}, {}, "Env.weights has str 'much' for solved, not a number"),
        (GUESS.replace(": 2.0", ": float('nan')"), {}, {}, "Env.weights has nan for solved"),
        (GUESS.replace("weights = {", "other = {"), {}, {}, "Env.weights is None, not a mapping"),
        (GUESS.replace("async def", "def").replace("await", ""), {}, {}, "Env.play is not async"),
        (
            GUESS.replace("ask, seed):", "ask):"),
            {},
            {},
            r"Env.play is called with \(task, ask, seed\): .* \(my_env.py:8\)",
        ),
        (GUESS.replace("def score", "def scores"), {}, {}, r"Env has no method score\(self, task, transcript\)"),
        (TASKS.replace("def held_out", "def held"), {}, {}, "Env has task, but no held_out. Write both, or neither"),
        (TASKS.replace("def task", "async def task"), {}, {}, r"Env.task is async. Write `def task\(self, index\)`"),
        (GUESS.replace("= greeting", "= greting"), {}, {}, r"NameError: .*greting.* \(my_env.py:6\)"),
        (GUESS.replace("class Env:", "class Env"), {}, {}, r"SyntaxError: .* \(my_env.py:2\)"),
        ("import no_such_module", {}, {}, "my_env.py imports no_such_module, which is not installed"),
    ],
)
def test_a_class_that_cannot_be_used_is_refused_in_one_line(code, options, weights, message):
    with pytest.raises((Invalid, NameError, SyntaxError)) as refused:
        UserEnvironment("my_env.py:Env", code, options, weights)
    line = failure_line(refused.value)
    assert re.search(message, line)
    assert "\n" not in line


@pytest.mark.parametrize("code", ["raise SystemExit(4)", GUESS.replace("= greeting", "= exit(4)")])
def test_a_class_that_cannot_be_loaded_fails_the_check_and_every_episode(code):
    async def work(pool):
        with pytest.raises(EnvironmentFailed, match=r"environment my_env.py:Env: \w+: .* \(my_env.py:\d\)$"):
            await pool.check()
        with pytest.raises(EnvironmentFailed, match=r"\(my_env.py:\d\)$"):
            await pool.play({}, 0, ScriptedHost())

    run(code, work)


def test_unknown_builtin_environments_and_variables_that_are_not_set_are_refused(monkeypatch):
    with pytest.raises(ConfigError, match=r"environment\.path=builtin:gues: no such environment"):
        build_environments(configured("builtin:gues"), None)
    monkeypatch.delenv("SEARCH_KEY", raising=False)
    with pytest.raises(ConfigError, match=r"environment\.variables=SEARCH_KEY: SEARCH_KEY is not set"):
        build_environments(configured("my_env.py:Env", 'environment.variables=["SEARCH_KEY"]'), GUESS)


def test_errors_of_the_host_and_cancellation_end_the_episode_and_no_other():
    class Failing(ScriptedHost):
        async def ask(self, messages, tools, after):
            raise EnvironmentFailed("the chat template has no tools")

    async def work(pool):
        task = {"replies": []}
        with pytest.raises(EnvironmentFailed, match=r"^the chat template has no tools$"):
            await pool.play(task, 0, Failing())
        waiting = ScriptedHost("1", "2", hold=asyncio.Event())
        play = asyncio.create_task(pool.play(task, 0, waiting))
        await waiting.is_asked.wait()
        play.cancel()
        await asyncio.wait({play})
        return await pool.play(task, 0, ScriptedHost("1", "2"))

    assert run(GUESS, work).score == -0.5


def test_close_ends_an_episode_that_is_played():
    async def work(pool):
        waiting = ScriptedHost("1", hold=asyncio.Event())
        play = asyncio.create_task(pool.play({"replies": []}, 0, waiting))
        await waiting.is_asked.wait()
        await pool.close()
        with pytest.raises(EnvironmentFailed, match="the environment was closed"):
            await play
        with pytest.raises(EnvironmentFailed, match="the environment was closed"):
            await pool.play({}, 0, ScriptedHost())

    run(GUESS, work)


def test_a_class_of_an_installed_module_is_played(tmp_path, monkeypatch):
    (tmp_path / "installed_env.py").write_text(GUESS)
    monkeypatch.syspath_prepend(str(tmp_path))
    (result,) = played(None, ScriptedHost("1", "2"), task={"replies": []}, path="installed_env:Env")
    assert result.score == -0.5
