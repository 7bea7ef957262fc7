"""Prompts that ask a chat model for the largest of three numbers: "Pick the largest number: 46, 56, 59"."""

import random

from pipelinerl_core.config.run import RunConfig
from pipelinerl_core.config.verifier import verifier_name
from pipelinerl_core.prompts.split import GENERATED_SHARE, is_held_out, prompt_id, stable_seed
from pipelinerl_core.types import Prompt

NAME = "largest_number"
NUMBERS = range(10, 100)
NUM_HELD_OUT = 100_000
"""Different held-out prompts, at most; there are about 141,000."""


def build(config: RunConfig) -> "LargestNumberSource":
    """The source of a configuration."""
    return LargestNumberSource(config.seed, verifier_name(config))


class LargestNumberSource:
    """Endless prompts with three different numbers of two digits."""

    name = NAME
    generates = True

    def __init__(self, seed: int, env: str) -> None:
        self._seed = seed
        self._env = env

    def prompt(self, index: int) -> Prompt:
        return self._draw(random.Random(stable_seed(self._seed, NAME, index)), held_out=False)

    def held_out(self, count: int) -> list[Prompt]:
        """At most `count` different held-out prompts, the same for every seed."""
        rng = random.Random(stable_seed(NAME, "held_out"))
        prompts: dict[str, Prompt] = {}
        while len(prompts) < min(count, NUM_HELD_OUT):
            prompt = self._draw(rng, held_out=True)
            prompts.setdefault(prompt.prompt_id, prompt)
        return list(prompts.values())

    def _draw(self, rng: random.Random, *, held_out: bool) -> Prompt:
        while True:
            numbers = rng.sample(NUMBERS, 3)
            text = "Pick the largest number: " + ", ".join(map(str, numbers))
            identity = prompt_id(NAME, text)
            if is_held_out(identity, GENERATED_SHARE) is held_out:
                task = {"answer": str(max(numbers))}
                return Prompt(prompt_id=identity, source=NAME, env=self._env, text=text, task=task)
