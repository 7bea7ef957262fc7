"""Frozen configuration sections, TOML presets and dotted overrides."""

from pipelinerl_core.config.load import as_toml, known_keys, preset_names
from pipelinerl_core.config.run import RunConfig

__all__ = ["RunConfig", "as_toml", "known_keys", "preset_names"]
