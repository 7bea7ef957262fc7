"""Frozen configuration sections, TOML presets and dotted overrides."""

from pipelinerl_core.config.load import (
    as_toml,
    build_config,
    known_keys,
    load_config,
    preset_names,
    resume_config,
)
from pipelinerl_core.config.sections import RunConfig

__all__ = [
    "RunConfig",
    "as_toml",
    "build_config",
    "known_keys",
    "load_config",
    "preset_names",
    "resume_config",
]
