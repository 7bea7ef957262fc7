"""Sums of one-digit numbers, "3+4+8=", and how people answer them.

>>> total("3+4+8=")
15
"""

import itertools
import random
from collections.abc import Iterator

from pipelinerl_core.config.model_path import SumsModel
from pipelinerl_core.config.sections import RunConfig, SumsPrompts
from pipelinerl_core.config.verifier import verifier_name
from pipelinerl_core.errors import ConfigError
from pipelinerl_core.prompts.split import GENERATED_SHARE, is_held_out, prompt_id, stable_seed
from pipelinerl_core.types import Prompt

NAME = "sums"

MAX_DRAWS = 2000
"""Draws after which there is taken to be no other problem: a fifth of all is held out, and the fewest held-out
problems are some twenty of two summands, the last of which is missed with probability (1 - 1/100)^2000 = 2e-9."""


def build(config: RunConfig) -> "SumsSource":
    """The source of a configuration; raises ConfigError for lengths that make no problem."""
    assert isinstance(config.prompts, SumsPrompts)
    return SumsSource(config.prompts.lengths, config.seed, verifier_name(config))


class SumsSource:
    """Endless sums; any position costs the same few microseconds."""

    name = NAME

    def __init__(self, lengths: tuple[int, ...], seed: int, env: str) -> None:
        """`lengths` are numbers of summands, drawn uniformly."""
        if min(lengths) < 2:
            raise ConfigError(
                f"prompts.lengths={list(lengths)}: a sum has at least 2 summands. Leave out {min(lengths)}"
            )
        self._lengths = lengths
        self._seed = seed
        self._env = env

    def prompt(self, index: int) -> Prompt:
        """The sum at a position of the training sequence; never a held-out one."""
        rng = random.Random(stable_seed(self._seed, NAME, index))
        return self._as_prompt(draw_sum(rng, self._lengths, held_out=False))

    def held_out(self, count: int) -> list[Prompt]:
        """`count` held-out sums with lengths as in training, the same for every seed so that runs can be compared.

        A sum occurs again only when all held-out sums of its length have occurred equally often: there are about
        twenty of two summands.
        """
        rng = random.Random(stable_seed(NAME, "held_out"))
        seen: dict[int, set[str]] = {length: set() for length in self._lengths}
        prompts = []
        for _ in range(count):
            length = rng.choice(self._lengths)
            text = _unseen(rng, length, seen[length])
            seen[length].add(text)
            prompts.append(self._as_prompt(text))
        return prompts

    def _as_prompt(self, text: str) -> Prompt:
        return Prompt(
            prompt_id=prompt_id(NAME, text),
            source=NAME,
            env=self._env,
            text=text,
            task={"answer": str(total(text))},
        )


def draw_sum(rng: random.Random, lengths: tuple[int, ...], *, held_out: bool) -> str:
    """A sum of one of the lengths, from the held-out side or from the other."""
    length = rng.choice(lengths)
    while True:  # ends: even of two summands, 20 of 100 sums are held out and 80 are not
        text = "+".join([str(rng.randrange(10)) for _ in range(length)]) + "="
        if is_held_out(prompt_id(NAME, text), GENERATED_SHARE) is held_out:
            return text


def summands(text: str) -> list[int]:
    """The numbers of "3+4+8=" -> [3, 4, 8]."""
    return [int(number) for number in text.removesuffix("=").split("+")]


def total(text: str) -> int:
    """The right answer to a sum."""
    return sum(summands(text))


def demonstrations(recipe: SumsModel) -> Iterator[tuple[str, str]]:
    """Endless (sum, answer) pairs as people write them, from training sums only.

    Example: "7+8+1=" is worked out as "15,16.16" or guessed as ".13".
    """
    rng = random.Random(stable_seed(recipe.seed, NAME, "demonstrations"))
    while True:
        text = draw_sum(rng, recipe.lengths, held_out=False)
        yield text, _demonstrated(text, recipe, rng)


def _demonstrated(text: str, recipe: SumsModel, rng: random.Random) -> str:
    if rng.random() < recipe.worked_out_share:
        running = list(itertools.accumulate(summands(text)))[1:]
        return ",".join(map(str, running)) + f".{running[-1]}"
    return f".{max(0, total(text) + rng.randint(-recipe.guess_error, recipe.guess_error))}"


def _unseen(rng: random.Random, length: int, seen: set[str]) -> str:
    """A held-out sum that is not in `seen`; when that holds all of them it is emptied first."""
    for _ in range(MAX_DRAWS):
        text = draw_sum(rng, (length,), held_out=True)
        if text not in seen:
            return text
    seen.clear()
    return draw_sum(rng, (length,), held_out=True)
