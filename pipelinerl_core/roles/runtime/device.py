"""The device of a role's tensors."""

import torch

from pipelinerl_core.config import RunConfig
from pipelinerl_core.errors import ConfigError


def model_device(config: RunConfig) -> torch.device:
    """Device of learner and embedded engine. Raises ConfigError if model.device=cuda and there is no GPU.

    Models of the presets for the embedded engine are so small that a CPU is faster: model.device=auto uses the CPU.
    """
    has_gpu = torch.cuda.is_available()
    if config.model.device == "cuda" and not has_gpu:
        raise ConfigError("model.device=cuda: torch finds no GPU here. Set model.device=auto")
    return torch.device("cuda" if has_gpu and not config.stays_on_cpu else "cpu")
