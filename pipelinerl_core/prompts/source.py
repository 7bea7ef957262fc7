"""The prompt sources by `prompts.kind`.

To add a prompt source: a file in this folder, a section in config/prompts.py, and a line in SOURCES. A file is
imported when a source is built, because datasets and reasoning_gym take seconds to import.
"""

from collections.abc import Callable, Collection, Mapping
from functools import partial
from importlib import import_module
from types import MappingProxyType

from pipelinerl_core.config.mixture import naming
from pipelinerl_core.config.run import RunConfig
from pipelinerl_core.errors import ConfigError
from pipelinerl_core.interfaces import PromptSource
from pipelinerl_core.prompts.mixture import MixtureSource
from pipelinerl_core.prompts.table import TableSource, text_hash
from pipelinerl_core.types import Prompt

_MAX_DRAWS = 200
_FAR = 1 << 40
"""Positions from one draw to the next: no run has so many groups."""


def _build(module: str, config: RunConfig) -> PromptSource:
    """Call `build` of a file of this folder."""
    source: PromptSource = import_module(f"pipelinerl_core.prompts.{module}").build(config)
    return source


SOURCES: Mapping[str, Callable[[RunConfig], PromptSource]] = MappingProxyType(
    {
        "sums": partial(_build, "sums"),
        "largest_number": partial(_build, "largest_number"),
        "reasoning_gym": partial(_build, "gym"),
        "environment": partial(_build, "environment"),
        "file": partial(_build, "file"),
        "huggingface": partial(_build, "huggingface"),
    }
)


def build_source(config: RunConfig) -> PromptSource:
    """The prompt source of a run. Raises ConfigError, one line, if the source cannot be used as configured.

    Prompts that are held out of one part of a mixture, or are in a set of eval.sets, are in no part's training rows.
    """
    parts, _ = build_all(config)
    return MixtureSource(parts, config.mixture_order()) if config.mixture else parts[""]


def build_all(config: RunConfig) -> tuple[dict[str, PromptSource], dict[str, PromptSource]]:
    """The source of each part of a mixture, "" without a mixture; and of each set of eval.sets, whose training rows
    are of no use."""
    parts: dict[str, PromptSource] = {}
    for name, part in config.parts.items():
        with naming(name):
            parts[name] = SOURCES[part.prompts.kind](part)
    sets: dict[str, PromptSource] = {}
    for name in config.eval.sets:
        changed = config.with_set(name)
        with naming(name, "eval.sets"):
            sets[name] = SOURCES[changed.prompts.kind](changed)
    for name, source in parts.items():
        others = {f"held-out prompts of mixture.{other}": parts[other] for other in parts if other != name}
        others |= {f"prompts of eval.sets.{other}": sets[other] for other in sets}
        for told, other in others.items():
            if isinstance(source, TableSource) and isinstance(other, TableSource):
                source.leave_out(other, told)
            elif isinstance(source, TableSource) and _generates(other):
                texts = {text_hash(prompt.text) for prompt in other.held_out(config.eval.num_prompts)}
                source.leave_out_texts(texts, told)
        if _generates(source):
            tables = [other for other in others.values() if isinstance(other, TableSource)]
            if taken := set().union(*(table.held_out_texts() for table in tables)):
                parts[name] = WithoutTexts(source, taken)
    return parts, sets


def _generates(source: PromptSource) -> bool:
    """Whether the source makes up the texts of its prompts."""
    return getattr(source, "generates", False)


class WithoutTexts:
    """A source of generated prompts that draws again where a prompt is held out elsewhere."""

    generates = True

    def __init__(self, source: PromptSource, texts: Collection[str]) -> None:
        """texts: `text_hash` of the texts that are not drawn."""
        self.name = source.name
        self._source, self._texts = source, texts

    def prompt(self, index: int) -> Prompt:
        """The prompt at a position. Raises ConfigError if too few prompts are left."""
        for draw in range(_MAX_DRAWS):
            prompt = self._source.prompt(index + draw * _FAR)
            if text_hash(prompt.text) not in self._texts:
                return prompt
        raise ConfigError(
            f"prompts of {self.name}: {_MAX_DRAWS} draws in a row are prompts of eval.sets or held out of another "
            "part of the mixture. Leave prompts for training"
        )

    def held_out(self, count: int) -> list[Prompt]:
        """Those of the source."""
        return self._source.held_out(count)
