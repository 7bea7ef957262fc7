"""The prompt sources by `prompts.kind`.

To add a prompt source: a file in this folder, a section in config/sections.py, a function here, and the line of the
function in SOURCES. The function imports the file, because datasets and reasoning_gym take seconds to import.
"""

from collections.abc import Callable, Mapping
from types import MappingProxyType

from pipelinerl_core.config.mixture import naming
from pipelinerl_core.config.sections import RunConfig
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
    """The prompt source of a run. Raises ConfigError, one line, if the source cannot be used as configured."""
    if not config.mixture:
        return SOURCES[config.prompts.kind](config)
    sources: dict[str, PromptSource] = {}
    for name, part in config.parts.items():
        with naming(name):
            sources[name] = build_source(part)
    return MixtureSource(sources, config.mixture_order())
