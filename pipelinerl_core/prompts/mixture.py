"""The prompts of a mixture: each group takes the next prompt of its part."""

from collections.abc import Mapping
from dataclasses import replace

from pipelinerl_core.config.interleave import Interleave
from pipelinerl_core.interfaces import PromptSource
from pipelinerl_core.types import Prompt

NAME = "mixture"


class MixtureSource:
    """Several sources, interleaved by weight; `Prompt.source` is the name of the part."""

    name = NAME

    def __init__(self, sources: Mapping[str, PromptSource], order: Interleave) -> None:
        """sources: one for each part of `order`, by name."""
        self._sources = sources
        self._order = order

    def prompt(self, index: int) -> Prompt:
        """The prompt of group `index`: the position `turn.number` of its part's own training sequence."""
        turn = self._order.turn(index)
        return replace(self._sources[turn.part].prompt(turn.number), source=turn.part)

    def held_out(self, count: int) -> list[Prompt]:
        return [
            replace(prompt, source=name)
            for name, source in self._sources.items()
            for prompt in source.held_out(count)
        ]
