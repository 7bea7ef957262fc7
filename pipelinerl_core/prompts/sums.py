"""Prompts that are sums of one-digit numbers, "3+4+8=", and demonstrations of answers.

>>> total("3+4+8=")
15
"""

import itertools
import random
from collections.abc import Iterator

from pipelinerl_core.config.prompts import SumsPrompts
from pipelinerl_core.config.run import RunConfig
from pipelinerl_core.config.verifier import verifier_name
from pipelinerl_core.errors import ConfigError
from pipelinerl_core.models.recipes import SumsModel
from pipelinerl_core.prompts.split import GENERATED_SHARE, is_held_out, prompt_id, stable_seed
from pipelinerl_core.types import Prompt

NAME = "sums"

_DIGITS = "0123456789"
LISTED_LENGTH = 4
"""Largest number of summands whose held-out sums are listed (about 2,000); sums with more summands are drawn."""


def build(config: RunConfig) -> "SumsSource":
    """The source of a configuration; raises ConfigError if a length is below 2."""
    assert isinstance(config.prompts, SumsPrompts)
    return SumsSource(config.prompts.lengths, config.seed, verifier_name(config))


class SumsSource:
    """Endless sums; every position takes the same few microseconds."""

    name = NAME
    generates = True

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
        return self._as_prompt(*_draw(rng, self._lengths, held_out=False))

    def held_out(self, count: int) -> list[Prompt]:
        """`count` held-out sums with lengths as in training, the same for every seed for comparable runs.

        A sum is repeated only if there are too few sums of its length: sixteen held-out sums have two summands.
        """
        rng = random.Random(stable_seed(NAME, "held_out"))
        sums = {length: _held_out_sums(length) for length in set(self._lengths)}
        texts = [next(sums[rng.choice(self._lengths)]) for _ in range(count)]
        return [self._as_prompt(text, prompt_id(NAME, text)) for text in texts]

    def _as_prompt(self, text: str, identity: str) -> Prompt:
        return Prompt(
            prompt_id=identity,
            source=NAME,
            env=self._env,
            text=text,
            task={"answer": str(total(text))},
        )


def draw_sum(rng: random.Random, lengths: tuple[int, ...], *, held_out: bool) -> str:
    """A sum of one of the lengths, held out or for training."""
    return _draw(rng, lengths, held_out=held_out)[0]


def _draw(rng: random.Random, lengths: tuple[int, ...], *, held_out: bool) -> tuple[str, str]:
    """The sum and its prompt_id. The hub draws one for every lease."""
    length = rng.choice(lengths)
    draw_bits = rng.getrandbits
    while True:  # ends: even the 100 sums of two summands contain both held-out and training sums
        digits: list[str] = []
        while len(digits) < length:  # the same draws as randrange(10), three times as fast
            digit = draw_bits(4)
            if digit < 10:
                digits.append(_DIGITS[digit])
        text = "+".join(digits) + "="
        identity = prompt_id(NAME, text)
        if is_held_out(identity, GENERATED_SHARE) is held_out:
            return text, identity


def _held_out_sums(length: int) -> Iterator[str]:
    """Endless held-out sums of one length. Up to LISTED_LENGTH every pass has each sum once, in a new random order;
    longer sums repeat when half of all sums have been drawn."""
    rng = random.Random(stable_seed(NAME, "held_out", length))
    if length <= LISTED_LENGTH:
        texts = ["+".join(digits) + "=" for digits in itertools.product("0123456789", repeat=length)]
        texts = [text for text in texts if is_held_out(prompt_id(NAME, text), GENERATED_SHARE)]
        while True:
            rng.shuffle(texts)
            yield from texts
    seen: set[str] = set()
    while True:
        text = draw_sum(rng, (length,), held_out=True)
        if text not in seen or len(seen) > GENERATED_SHARE * 10**length / 2:
            seen.add(text)
            yield text


def summands(text: str) -> list[int]:
    """The numbers of "3+4+8=" -> [3, 4, 8]."""
    return [int(number) for number in text.removesuffix("=").split("+")]


def total(text: str) -> int:
    """The right answer to a sum."""
    return sum(summands(text))


def demonstrations(recipe: SumsModel) -> Iterator[tuple[str, str]]:
    """Endless (sum, answer) pairs for the warm start, from training sums only; some answers are wrong guesses.

    Example: "7+8+1=" has the worked-out answer "15,16.16" or a guess such as ".13".
    """
    rng = random.Random(stable_seed(recipe.seed, NAME, "demonstrations"))
    for index in itertools.count():
        text = draw_sum(rng, recipe.lengths, held_out=False)
        is_early = index < recipe.early_steps * recipe.rows
        if rng.random() < (recipe.early_worked_out_share if is_early else recipe.worked_out_share):
            yield text, _worked_out(text)
        else:
            yield text, f".{max(0, total(text) + rng.randint(-recipe.guess_error, recipe.guess_error))}"


def _worked_out(text: str) -> str:
    """The sums of the first two, three, ... summands, and the last partial sum as the answer."""
    running = list(itertools.accumulate(summands(text)))[1:]
    return ",".join(map(str, running)) + f".{running[-1]}"
