"""Loading of models whose weights are divided among ranks; the loading itself is in test_divided_loading.py."""

import pytest
import torch

from pipelinerl_core.errors import ConfigError
from pipelinerl_core.training.model import _restore_buffers, load_model, prepare_model, with_biases
from pipelinerl_core.training.policy import Policy
from tests.models import tiny_model


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


def test_weights_of_a_torch_file_with_other_strides_are_contiguous(tmp_path):
    """Otherwise a learner that trains them cannot load its checkpoint: masters and moments are flat views."""
    model = tiny_model()
    model.config.save_pretrained(tmp_path)
    weights = {name: tensor for name, tensor in model.state_dict().items() if name != "lm_head.weight"}
    strided = {name: tensor.t().contiguous().t() if tensor.dim() == 2 else tensor for name, tensor in weights.items()}
    torch.save(strided, tmp_path / "pytorch_model.bin")
    loaded = load_model(str(tmp_path), "float32")
    assert all(parameter.is_contiguous() for parameter in loaded.parameters())
    assert all(torch.equal(parameter, weights[name]) for name, parameter in loaded.named_parameters())


def test_a_parameter_that_the_model_freezes_stays_frozen():
    model = tiny_model()
    model.model.norm.weight.requires_grad_(False)
    assert set(Policy(prepare_model(model), temperature=1.0).trained()) == {
        name for name, _ in model.named_parameters() if name != "model.norm.weight"
    }


def test_biases_are_drawn_on_the_cpu_for_a_model_on_another_device():
    with torch.device("meta"):
        layer = torch.nn.Linear(2, 3)
        assert with_biases(layer).bias.device.type == "meta"  # with a generator of the CPU
