"""Configurations of runs: the keys that are `auto` get values by the model and by the processor of this host."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from pipelinerl_core import host
from pipelinerl_core.config.load import read_values, resume_values, validate, with_overrides
from pipelinerl_core.config.run import RunConfig
from pipelinerl_core.config.section import Dtype
from pipelinerl_core.models.paths import model_config_of
from pipelinerl_core.models.recipes import BUILTIN_PREFIX
from pipelinerl_core.models.shapes import KNOWN_MODELS, shape_of

_GPU_CAPABILITY = 8.0
"""Compute capability of the first NVIDIA GPUs with units for bfloat16 (Ampere)."""
_SMALL_PARAMETERS = 1e8


def load_config(source: str, overrides: Sequence[str] = ()) -> RunConfig:
    """The configuration of a preset name or TOML file, with `section.key=value` overrides; raises ConfigError."""
    return build_config(read_values(source, overrides))


def override_config(config: RunConfig, overrides: Sequence[str]) -> RunConfig:
    """The same configuration with `section.key=value` overrides; raises ConfigError."""
    return build_config(with_overrides(config, overrides)) if overrides else config


def resume_config(config: RunConfig, overrides: Sequence[str]) -> RunConfig:
    """The configuration of a resumed run, with overrides of RESUMABLE keys; ConfigError for any other key."""
    return build_config(resume_values(config, overrides)) if overrides else config


def build_config(values: Mapping[str, Any]) -> RunConfig:
    """Validate a nested mapping and choose model.dtype and learner.lr if they are auto; raises ConfigError with one
    line."""
    config = validate(values)
    if config.model.dtype == "auto":
        # Again, because rules between sections read model.dtype.
        config = validate({**values, "model": {**values["model"], "dtype": choose_dtype(config)}})
    if config.learner.lr == "auto":
        learner = config.learner.model_copy(update={"lr": choose_rate(config)})
        config = config.model_copy(update={"learner": learner})
    return config


def choose_dtype(config: RunConfig) -> Dtype:
    """The data type for the processor of this host that computes: its GPU where the run uses a GPU, else its CPU."""
    capability = None if config.stays_on_cpu else host.gpu_capability()
    has_units = host.cpu_has_bfloat16() if capability is None else capability >= _GPU_CAPABILITY
    return "bfloat16" if has_units else "float32"


def choose_rate(config: RunConfig) -> float:
    """1e-4 for a model of fewer than 0.1 billion parameters, else 1e-6, which verl, TRL and PipelineRL set for every
    model; ten times as much with LoRA. Raises ConfigError for an unknown built-in model.

    A model that is neither on this host nor in KNOWN_MODELS counts as large: too low a rate wastes a run, too high a
    rate spoils the model.
    """
    path, has_adapters = config.model.path, config.learner.lora_rank > 0
    entries = KNOWN_MODELS.get(re.split("[@?]", path)[0]) or model_config_of(path)
    shape = None if entries is None else shape_of(entries)
    is_small = path.startswith(BUILTIN_PREFIX) if shape is None else shape.num_parameters < _SMALL_PARAMETERS
    if is_small:
        return 1e-3 if has_adapters else 1e-4
    return 1e-5 if has_adapters else 1e-6
