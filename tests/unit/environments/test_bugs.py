"""Bugs of an environment: a bug ends its own episode with one line that names the place; other episodes go on."""

import asyncio
import re

import pytest

import pipelinerl_core.environments.process as process
from pipelinerl_core.errors import EnvironmentFailed, EnvironmentTimeout
from pipelinerl_core.types import Reply, Transcript
from tests.unit.environments.episode_case import ScriptedHost, played, run

CODE = """
import asyncio, itertools, os, re, sys, time

kept = []
HELLO = [{"role": "user", "content": "Hello"}]

class Env:
    weights = {"solved": 1.0}

    async def play(self, task, ask, seed):
        bug = task.get("play")
        if bug is None:
            reply = await ask([{"role": "user", "content": "Hello"}])
            await asyncio.sleep(0)
            return reply.text
        return await getattr(self, bug)(ask)

    async def score(self, task, transcript):
        if bug := task.get("score"):
            return eval(bug)
        return {"solved": len(transcript), "seen": 1}

%s
"""
TOO_LONG = "the environment took more than environment.call_seconds=1 (my_env.py:{line})"
# Method of the environment -> (code of its body, text of the error). {line} is the line of the comment `# here`.
PLAY = {
    "raises": ("raise ValueError('bad\\nsecond line')  # here", "ValueError: bad (my_env.py:{line})"),
    "raises_a_surrogate": ("raise ValueError('\\ud800')  # here", "ValueError: ? (my_env.py:{line})"),
    "raises_without_text": (
        "class Mine(Exception):\n    def __str__(self): return 1 / 0\nraise Mine  # here",
        "Mine (my_env.py:{line})",
    ),
    "exits": ("sys.exit(3)  # here", "SystemExit: 3 (my_env.py:{line})"),
    "interrupts": ("raise KeyboardInterrupt  # here", "KeyboardInterrupt (my_env.py:{line})"),
    "exits_in_a_task": (
        "async def other(): sys.exit(3)\nawait asyncio.create_task(other())  # here",
        "Exited: SystemExit: 3 (my_env.py:{line})",
    ),
    "cancels_itself": (
        "asyncio.current_task().cancel()\nawait asyncio.sleep(0)  # here",
        "CancelledError (my_env.py:{line})",
    ),
    "waits_for_input": ("input()  # here", "EOFError: EOF when reading a line (my_env.py:{line})"),
    "blocks_in_python": ("while True: pass  # here", TOO_LONG),
    "sleeps": ("time.sleep(1e6)  # here", TOO_LONG),
    "matches_for_ever": ("re.match(r'(a+)+$', 'a' * 64 + 'b')  # here", TOO_LONG),
    "blocks_in_a_task": (
        "async def other():\n    while True: pass  # here\nawait asyncio.gather(other(), other())",
        TOO_LONG,
    ),
    "never_ends": ("await asyncio.sleep(1e9)  # here", TOO_LONG),
    "asks_too_long": (
        "messages = list(HELLO)\nfor _ in itertools.count():\n    reply = await ask(messages)\n"
        "    messages += [reply.message, *HELLO]\n    await asyncio.sleep(0.5)",
        "the environment took more than environment.episode_seconds=2 (my_env.py:*)",
    ),
    "is_not_json": (
        "return {1, 2}",
        "play returned set that is not JSON: Object of type set is not JSON serializable (my_env.py:10)",
    ),
    "is_a_surrogate": ("return '\\ud800'", "play returned str that is not JSON: 'utf-8' codec can't encode *"),
    "asks_nan": (
        "await ask([{'role': 'user', 'content': float('nan')}])  # here",
        "AskError: messages[0] is not JSON: Out of range float values are not JSON compliant* (my_env.py:{line})",
    ),
    "asks_text": (
        "await ask('Hello')  # here",
        "AskError: messages[0] is not a mapping, but has the type str (my_env.py:{line})",
    ),
    "asks_nothing": ("await ask([])  # here", "AskError: ask was called without a new message (my_env.py:{line})"),
    "repeats_the_last_turn": (
        "reply = await ask(HELLO)\nawait ask([*HELLO, reply.message])  # here",
        "AskError: ask was called without a new message (my_env.py:{line})",
    ),
    "asks_nothing_and_catches": (
        "await ask(HELLO)\ntry:\n    await ask([])  # here\nexcept Exception: pass\nreturn ''",
        "AskError: ask was called without a new message (my_env.py:{line})",
    ),
    "asks_twice": (
        "await asyncio.gather(ask(HELLO), ask(HELLO))",
        "AskError: ask was called while an earlier call waits for its reply. Await each call",
    ),
    "limits_an_ask": (
        "try:\n    await asyncio.wait_for(ask(HELLO), 0)\nexcept TimeoutError: pass\n"
        "task = asyncio.create_task(ask(HELLO))\nawait asyncio.sleep(0)\ntask.cancel()\nawait asyncio.sleep(0)\n"
        "return ''",
        "AskError: a call of ask was cancelled. Await each call, without a time limit",
    ),
    "leaves_a_task": (
        "asyncio.create_task(asyncio.sleep(1e9))  # here",
        "play returned before a task that it had started (my_env.py:{line}). Await each task",
    ),
    "keeps_ask": ("kept.append(ask)\nraise ValueError  # here", "ValueError (my_env.py:{line})"),
    "asks_after_the_end": (
        "await kept[0](HELLO)  # here",
        "AskError: ask was called after the end of its episode (my_env.py:{line})",
    ),
    "sends_too_much": (
        "await ask([{'role': 'user', 'content': 'x' * (17 << 20)}])  # here",
        "AskError: * bytes at once are more than 16777216 (my_env.py:{line})",
    ),
    "prints": (
        "for _ in range(50): print('x' * 100_000)\nraise ValueError  # here",
        "ValueError (my_env.py:{line})",
    ),
    "records_no_json": (
        "async def fetch(): return object()\nawait ask.once('key', fetch)  # here",
        "AskError: the value of ask.once('key') is not JSON: * (my_env.py:{line})",
    ),
}
# Value that score returns -> text of the error.
SCORES = {
    "1 / 0": "ZeroDivisionError: division by zero (my_env.py:20)",
    "None": "score returned None (no `return`?), not a mapping of component names to numbers (my_env.py:18)",
    "1.0": "score returned float '1.0', not a mapping of component names to numbers (my_env.py:18)",
    "{'solved': float('nan')}": "score returned nan for solved; rewards are finite and * (my_env.py:18)",
    "{'solved': 10**400}": "score returned a number beyond float for solved; rewards are finite and * (my_env.py:18)",
    "{'solved': '1'}": "score returned str '1' for solved, not a number (my_env.py:18)",
    "{'solved': None}": "score returned None (no `return`?) for solved, not a number (my_env.py:18)",
    "{'other': 1}": "score returned no solved, which weights names (returned: other) (my_env.py:18)",
    "{'solved': 1, 'mean': 1}": "score returned a component named 'mean'. Name components with * (my_env.py:18)",
    "{}": "score returned 0 components; return 1 to 16 (my_env.py:18)",
    "time.sleep(1e6)": "the environment took more than environment.call_seconds=1 (my_env.py:20)",
    "asyncio.create_task(asyncio.sleep(1e9)) and {'solved': 1}": (
        "score returned before a task that it had started (my_env.py:20). Await each task"
    ),
}
# Bugs that end the process.
DEADLY = {
    "ends_the_process": (
        "os._exit(3)",
        "3 times during this episode, the process ended (exit code 3)",
    ),
    "blocks_in_c": (
        "sum(range(10**15))",
        "the environment took more than environment.call_seconds=1 and could not be interrupted",
    ),
    "swallows": ("while True:\n    try:\n        while True: pass  # here\n    except BaseException: pass", TOO_LONG),
    "ignores_cancellation": (
        "while True:\n    try: await asyncio.sleep(1e9)  # here\n    except BaseException: pass",
        TOO_LONG,
    ),
    "writes_answers": (
        "for number in range(3, 64):\n    try: os.write(number, b'{}\\n')\n    except OSError: pass\n"
        "await asyncio.sleep(1e9)",
        "3 times during this episode, the process was killed, because its answer is not valid (a line that names no "
        "episode)",
    ),
    "writes_a_reward_beyond_float": (
        'line = b\'{"done": 1, "components": {"solved": 1\' + b\'0\' * 400 + b\'}, "turn_rewards": []}\\n\'\n'
        "for number in range(3, 64):\n    try: os.write(number, line)\n    except OSError: pass\n"
        "await asyncio.sleep(1e9)",
        "3 times during this episode, the process was killed, because its answer is not valid (score returned a "
        "number beyond float for solved; rewards are finite and within 1e+09 of 0)",
    ),
}
LIMITS = ("environment.call_seconds=1", "environment.episode_seconds=2")


def methods(bugs):
    return "\n".join(
        f"    async def {name}(self, ask):\n" + "".join(f"        {line}\n" for line in body.split("\n"))
        for name, (body, _) in bugs.items()
    )


def expected(code, bugs):
    """The texts of the errors, with the line of each method's comment `# here`."""
    lines = code.split("\n")

    def line_of(name):
        start = lines.index(f"    async def {name}(self, ask):")
        return next((at + 1 for at in range(start, len(lines)) if "# here" in lines[at]), None)

    return {name: text.replace("{line}", str(line_of(name))) for name, (_, text) in bugs.items()}


async def play_all(pool, tasks, other):
    """The error of each task, one after the other, while another episode waits for its model's turn."""
    other_play = asyncio.create_task(pool.play({}, 0, other))
    await other.is_asked.wait()
    errors = []
    for task in tasks:
        try:
            errors.append(await pool.play(task, 0, ScriptedHost(*["Hi"] * 1000)))
        except EnvironmentFailed as error:
            errors.append(str(error).removeprefix("environment my_env.py:Env: "))
    assert not other_play.done()
    other.hold.set()
    return errors, (await other_play).score


def differing(errors, texts):
    """Name -> (error, expected text) where they differ; `*` stands for any text."""
    assert errors.keys() == texts.keys()
    patterns = {name: re.escape(text).replace(r"\*", ".*") for name, text in texts.items()}
    return {name: (error, texts[name]) for name, error in errors.items() if not re.fullmatch(patterns[name], error)}


@pytest.mark.slow
def test_a_bug_ends_its_episode_with_file_and_line_and_the_other_episode_goes_on(capfd):
    code = CODE % methods(PLAY)
    tasks = [*({"play": name} for name in PLAY), *({"score": value} for value in SCORES)]
    other = ScriptedHost("four", hold=asyncio.Event())
    errors, score = run(code, lambda pool: play_all(pool, tasks, other), *LIMITS)
    out, err = capfd.readouterr()
    assert "xxx" not in out
    assert differing(dict(zip([*PLAY, *SCORES], errors, strict=True)), expected(code, PLAY) | SCORES) == {}
    assert (score, other.restarts) == (4.0, 0)
    assert err.count("x") >= 50 * 100_000


@pytest.mark.parametrize(
    ("name", "kind"),
    [("never_ends", EnvironmentTimeout), ("blocks_in_python", EnvironmentTimeout), ("raises", EnvironmentFailed)],
)
def test_only_an_episode_that_takes_too_long_is_a_timeout(name, kind):
    code = CODE % methods(PLAY)
    with pytest.raises(EnvironmentFailed) as caught:
        run(code, lambda pool: pool.play({"play": name}, 0, ScriptedHost("Hi")), *LIMITS)
    assert caught.type is kind


def test_an_episode_that_cannot_be_interrupted_is_a_timeout_and_the_scoring_of_a_group_is_none(monkeypatch):
    monkeypatch.setattr(process, "GRACE_SECONDS", 1.0)
    score_group = "    async def score_group(self, task, transcripts):\n        time.sleep(1e6)\n"
    code = CODE.replace("    async def score(", "    async def other(") % (methods(DEADLY) + score_group)

    async def work(pool):
        calls = (
            pool.play({"play": "blocks_in_c"}, 0, ScriptedHost("Hi")),
            pool.score_group({}, [Transcript("1", 1)]),
        )
        return [await asyncio.gather(call, return_exceptions=True) for call in calls]

    outcomes = run(code, work, *LIMITS)
    assert [type(error) for (error,) in outcomes] == [EnvironmentTimeout, EnvironmentFailed]


@pytest.mark.parametrize("name", DEADLY)
def test_a_bug_that_ends_the_process_ends_its_episode_and_the_other_episode_is_played_again(name, monkeypatch):
    monkeypatch.setattr(process, "GRACE_SECONDS", 1.0)
    code = CODE % methods(DEADLY)
    other = ScriptedHost("four", hold=asyncio.Event())

    async def work(pool):
        errors, score = await play_all(pool, [{"play": name}], other)
        # With a process that ends after the error of the episode, the next episode finds the new process.
        return errors, score, (await pool.play({}, 0, ScriptedHost("five!"))).score

    (error,), score, next_score = run(code, work, *LIMITS)
    assert error == expected(code, DEADLY)[name]
    assert (score, next_score) == (4.0, 5.0)


@pytest.mark.slow
def test_a_process_whose_tasks_ignore_their_cancellation_ends_and_the_other_episode_is_played_again():
    other = ScriptedHost("four", hold=asyncio.Event())

    async def work(pool):
        other_play = asyncio.create_task(pool.play({}, 0, other))
        with pytest.raises(EnvironmentFailed):
            await pool.play({"play": "ignores_cancellation"}, 0, ScriptedHost())
        await other.is_restarted.wait()
        other.hold.set()
        return (await other_play).score

    assert run(CODE % methods(DEADLY), work, *LIMITS) == 4.0


TURNS = """
import asyncio, os, time
class Env:
    weights = {"a": 1.0}
    async def play(self, task, ask, seed):
        reply = await ask([{"role": "user", "content": "Hello"}])
        if task["is_bad"]:
            os._exit(3)
        if reply.text == "wait":
            await asyncio.sleep(1e9)
    def score(self, task, transcript): return {"a": 1.0}
"""


def test_an_episode_that_waits_with_the_turn_is_not_blamed_for_the_deaths_of_its_process():
    class Waiting(ScriptedHost):
        """Lets the environment wait in the first three starts of the episode."""

        async def ask(self, messages, tools, after):
            await super().ask(messages, tools, after)
            text = "wait" if self.restarts < 3 else "go"
            return Reply(text=text, content=text)

    waiting = Waiting()
    error, result = played(TURNS, ScriptedHost("a"), waiting, tasks=[{"is_bad": True}, {"is_bad": False}])
    assert error.endswith("3 times during this episode, the process ended (exit code 3)")
    assert (result.score, waiting.restarts) == (1.0, 3)


FAIR = """
import asyncio, time
class Env:
    weights = {"a": 1.0}
    async def play(self, task, ask, seed):
        if task["is_bad"]:
            time.sleep(1e6)
        await asyncio.sleep(0.3)
    def score(self, task, transcript): return {"a": 1.0}
"""


def test_an_episode_is_not_charged_for_the_time_in_which_another_blocks_the_process():
    tasks = [{"is_bad": False}, {"is_bad": True}]
    result, error = played(FAIR, ScriptedHost(), ScriptedHost(), tasks=tasks, overrides=LIMITS)
    assert result.score == 1.0
    assert error.endswith("the environment took more than environment.call_seconds=1 (my_env.py:7)")


STEPS = """
import asyncio, time
class Env:
    weights = {"a": 1.0}
    async def play(self, task, ask, seed):
        for _ in range(8):
            time.sleep(0.15)
            await asyncio.sleep(0)
    def score(self, task, transcript): return {"a": 1.0}
"""


def test_blocking_steps_are_charged_once():
    (result,) = played(STEPS, ScriptedHost(), task={}, overrides=("environment.call_seconds=2",))
    assert result.score == 1.0


def test_secrets_are_removed_from_errors(monkeypatch):
    monkeypatch.setenv("SEARCH_KEY", "a-long-secret-key")
    code = TURNS.replace("os._exit(3)", "raise ValueError(os.environ['SEARCH_KEY'] + '\\x1b')")
    variables = ('environment.variables=["SEARCH_KEY"]',)
    (error,) = played(code, ScriptedHost("a"), tasks=[{"is_bad": True}], overrides=variables)
    assert error == "environment my_env.py:Env: ValueError: $SEARCH_KEY (my_env.py:8)"


ANSWERS = """
import asyncio, os
class Env:
    weights = {"a": 1.0}
    async def play(self, task, ask, seed):
        for number in range(3, 64):
            try:
                os.write(number, task["line"].encode() + b"\\n")
            except OSError:
                pass
        await asyncio.sleep(1e9)
    def score(self, task, transcript): return {"a": 1.0}
"""


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("[" * 100_000, "a line that names no episode"),
        ('{"done": 99, "components": {"a": 1.0}, "turn_rewards": []}', "a line that names no episode"),
        ('{"done": true, "components": {"a": 1.0}, "turn_rewards": []}', "a line that names no episode"),
        ('{"done": 0, "components": {"a": NaN}, "turn_rewards": []}', "score returned nan for a"),
        ('{"done": 0, "components": {"b": 1.0}, "turn_rewards": []}', "score returned no a"),
        ('{"done": 0, "components": {"a": 1.0}, "turn_rewards": ["1"]}', "score returned str '1' for a turn"),
        ('{"ask": 0, "messages": [], "tools": [], "after": -1}', "a line with wrong fields"),
        ('{"ask": 0, "messages": ["text"], "tools": [], "after": -1}', "a line with wrong fields"),
        ('{"ask": 0, "messages": [{"role": "user"}], "tools": [1], "after": -1}', "an ask that is not possible now"),
        ('{"once": 0, "key": 1, "value": 2}', "a line with wrong fields"),
    ],
)
def test_lines_of_the_process_are_checked(line, reason):
    (error,) = played(ANSWERS, ScriptedHost(), task={"line": line})
    assert "3 times during this episode, the process was killed, because its answer is not valid" in error
    assert reason in error


def test_a_value_that_the_log_cannot_write_is_a_wrong_line():
    class Logging(ScriptedHost):
        def record(self, key, value):
            raise RecursionError("too many levels")

    (error,) = played(ANSWERS, Logging(), task={"line": '{"once": 0, "key": "a", "value": 2}'})
    assert "3 times during this episode, the process was killed, because its answer is not valid (too many" in error


def test_a_host_that_cancels_its_turn_cancels_the_episode():
    class Cancelling(ScriptedHost):
        async def ask(self, messages, tools, after):
            raise asyncio.CancelledError

    async def work(pool):
        play = asyncio.create_task(pool.play({"is_bad": False}, 0, Cancelling()))
        await asyncio.wait({play})
        return play.cancelled()

    assert run(TURNS, work)
