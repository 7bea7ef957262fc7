"""The prompt sources by `prompts.kind`.

To add a prompt source: a file in this folder, a section in config/sections.py, a function here, and the line of the
function in SOURCES. The function imports the file, because datasets and reasoning_gym take seconds to import.
"""

from collections.abc import Callable, Mapping
from types import MappingProxyType

from pipelinerl_core.config.mixture import naming
from pipelinerl_core.config.sections import RunConfig
from pipelinerl_core.errors import ConfigError
from pipelinerl_core.interfaces import PromptSource
from pipelinerl_core.prompts.mixture import MixtureSource


def _sums(config: RunConfig) -> PromptSource:
    from pipelinerl_core.prompts import sums

    return sums.build(config)


def _largest_number(config: RunConfig) -> PromptSource:
    from pipelinerl_core.prompts import largest_number

    return largest_number.build(config)


def _reasoning_gym(config: RunConfig) -> PromptSource:
    from pipelinerl_core.prompts import gym

    return gym.build(config)


def _environment(config: RunConfig) -> PromptSource:
    from pipelinerl_core.prompts import environment

    return environment.build(config)


def _file(config: RunConfig) -> PromptSource:
    from pipelinerl_core.prompts import file

    return file.build(config)


def _huggingface(config: RunConfig) -> PromptSource:
    from pipelinerl_core.prompts import huggingface

    return huggingface.build(config)


SOURCES: Mapping[str, Callable[[RunConfig], PromptSource]] = MappingProxyType(
    {
        "sums": _sums,
        "largest_number": _largest_number,
        "reasoning_gym": _reasoning_gym,
        "environment": _environment,
        "file": _file,
        "huggingface": _huggingface,
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
        try:
            sets[name] = SOURCES[changed.prompts.kind](changed)
        except ConfigError as error:
            raise ConfigError(f"eval.sets.{name}: {error}") from None
    for name, source in parts.items():
        others = {f"held-out prompts of mixture.{other}": parts[other] for other in parts if other != name}
        others |= {f"prompts of eval.sets.{other}": sets[other] for other in sets}
        for told, other in others.items():
            if hasattr(source, "leave_out") and hasattr(other, "leave_out"):  # tables of rows
                source.leave_out(other, told)
    return parts, sets
