"""What ranks compare before they train, and where rank 0 is reached."""

import socket
from types import SimpleNamespace

import pytest
import torch

from pipelinerl_core.errors import ConfigError
from pipelinerl_core.models.resolve import load_config
from pipelinerl_core.roles.trainer.learners import _require_equal
from pipelinerl_core.roles.trainer.rendezvous import own_address


def ranks(*others):
    return SimpleNamespace(size=1 + len(others), gather=lambda own: [own.tolist(), *([number] for number in others)])


def model(*values):
    layer = torch.nn.Linear(2, 1, dtype=torch.bfloat16)
    with torch.no_grad():
        layer.weight.copy_(torch.tensor([values]))
        layer.bias.zero_()
    return layer


def test_ranks_with_other_weights_than_rank_0_are_named():
    seen = []
    alike = SimpleNamespace(size=2, gather=lambda own: seen.append(own.tolist()) or [own.tolist()] * 2)
    _require_equal(alike, {"model.path": model(1.0, 2.0), "loss.teacher": None})
    _require_equal(alike, {"model.path": model(1.0, 2.5)})
    assert seen[0] != seen[1]
    with pytest.raises(ConfigError, match=r"^model\.path: ranks 1 have another model than rank 0"):
        _require_equal(ranks(*seen[1]), {"model.path": model(1.0, 2.0)})
    _require_equal(ranks(), {"model.path": model(1.0, 2.0)})


def test_rank_0_is_reached_at_the_given_address_only_if_it_is_an_address_of_its_host():
    assert own_address(load_config("quickstart")) == socket.gethostname()
    assert own_address(load_config("quickstart", ["placement.trainer_host=127.0.0.1"])) == "127.0.0.1"
    elsewhere = own_address(load_config("quickstart", ["placement.trainer_host=192.0.2.77"]))
    assert elsewhere != "192.0.2.77"
