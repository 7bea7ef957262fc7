"""From a configuration to its prompt source. A source's libraries are loaded only when it is the one asked for."""

from importlib import import_module

from pipelinerl_core.config.sections import RunConfig
from pipelinerl_core.interfaces import PromptSource

SOURCE_MODULES = {
    "sums": "pipelinerl_core.prompts.sums",
    "reasoning_gym": "pipelinerl_core.prompts.gym",
    "file": "pipelinerl_core.prompts.file",
    "huggingface": "pipelinerl_core.prompts.huggingface",
}
"""prompts.kind -> module with `build(config) -> PromptSource`. datasets and reasoning_gym take seconds to import."""


def build_source(config: RunConfig) -> PromptSource:
    """The prompt source of a run. Raises ConfigError, one line, for whatever makes it impossible."""
    source: PromptSource = import_module(SOURCE_MODULES[config.prompts.kind]).build(config)
    return source
