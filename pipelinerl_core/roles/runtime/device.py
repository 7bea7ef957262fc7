"""Which device the tensors of a role are on."""

import torch

from pipelinerl_core.config import RunConfig
from pipelinerl_core.errors import ConfigError


def model_device(config: RunConfig) -> torch.device:
    """Of learner and embedded engine. Raises ConfigError where a GPU is asked for and there is none.

    The presets for the embedded engine are models so small that a CPU serves them better: auto leaves them there.
    """
    has_gpu = torch.cuda.is_available()
    if config.model.device == "cuda" and not has_gpu:
        raise ConfigError("model.device=cuda: torch finds no GPU here. Set model.device=auto")
    return torch.device("cuda" if has_gpu and not config.stays_on_cpu else "cpu")
