"""Loading of models whose weights are divided among ranks; the loading itself is in test_divided_loading.py."""

import pytest
import torch

from pipelinerl_core.errors import ConfigError
from pipelinerl_core.training.model import _restore_buffers, with_biases


class _Positions(torch.nn.Module):
    """A module with a buffer that no file has."""

    def __init__(self, name, values):
        super().__init__()
        self.register_buffer(name, values, persistent=False)


def test_buffers_that_are_rounded_while_weights_are_divided_are_restored_or_refused():
    exact = _Positions("inv_freq", torch.tensor([1.0, 0.1]))
    rounded = _Positions("inv_freq", exact.inv_freq.bfloat16())
    _restore_buffers(rounded, exact, "model.path=m")
    assert torch.equal(rounded.inv_freq, exact.inv_freq)
    with pytest.raises(ConfigError, match=r"model.path=m: learner.zero_stage=3 would round scale. Set"):
        _restore_buffers(_Positions("scale", torch.ones(2).bfloat16()), exact, "model.path=m")


def test_biases_are_drawn_on_the_cpu_for_a_model_on_another_device():
    with torch.device("meta"):
        layer = torch.nn.Linear(2, 3)
        assert with_biases(layer).bias.device.type == "meta"  # with a generator of the CPU
