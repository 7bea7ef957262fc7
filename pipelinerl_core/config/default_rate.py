"""The choice of learner.lr=auto: by the size of the model and by LoRA.

This module must not import torch, so that a flow and `pipelinerl config` start fast.
"""

import re
from typing import TYPE_CHECKING

from pipelinerl_core.config.known_models import KNOWN_MODELS, model_config_of, shape_of
from pipelinerl_core.config.model_path import BUILTIN_PREFIX

if TYPE_CHECKING:
    from pipelinerl_core.config.sections import RunConfig

_SMALL_PARAMETERS = 1e8


def choose_rate(config: "RunConfig") -> float:
    """1e-4 for a model of fewer than 0.1 billion parameters, else 1e-6, which verl, TRL and PipelineRL set for every
    model; ten times as much with LoRA. Raises ConfigError for an unknown built-in model.

    A model that is neither on this host nor in KNOWN_MODELS counts as large: too low a rate wastes a run, too high a
    rate spoils the model.
    """
    path, has_adapters = config.model.path, config.learner.lora_rank > 0
    found = KNOWN_MODELS.get(re.split("[@?]", path)[0]) or model_config_of(path)
    shape = None if found is None else shape_of(found)
    is_small = path.startswith(BUILTIN_PREFIX) if shape is None else shape.num_parameters < _SMALL_PARAMETERS
    if is_small:
        return 1e-3 if has_adapters else 1e-4
    return 1e-5 if has_adapters else 1e-6
