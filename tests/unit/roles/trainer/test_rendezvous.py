"""Network interfaces of the ranks: loopback on one host, unless rank 0 also sends weights to other hosts."""

import os
from types import SimpleNamespace

import pytest

from pipelinerl_core.models.resolve import load_config
from pipelinerl_core.roles.trainer import learners
from pipelinerl_core.roles.trainer.learners import Learners
from pipelinerl_core.roles.trainer.rendezvous import join_rendezvous, open_rendezvous

INTERFACES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")


@pytest.fixture(autouse=True)
def no_interfaces(monkeypatch):
    for name in INTERFACES:
        monkeypatch.setenv(name, "to be removed")
        monkeypatch.delenv(name)


def pinned():
    return [os.environ.get(name) for name in INTERFACES]


def test_ranks_of_one_host_use_its_loopback(tmp_path):
    store, where = open_rendezvous(2, 5.0, directory=tmp_path, host=None)
    assert pinned() == ["lo", "lo"]
    store.set("key", "value")
    assert join_rendezvous(where, 2, 5.0).get("key") == b"value"


def test_a_rank_that_also_sends_weights_to_other_hosts_is_not_bound_to_the_loopback(tmp_path):
    store, where = open_rendezvous(2, 5.0, directory=tmp_path, host=None, sends_weights=True)
    store.set("key", "value")
    assert join_rendezvous(where, 2, 5.0).get("key") == b"value"
    assert pinned() == [None, None]


def test_the_interface_that_the_user_has_chosen_stays(tmp_path, monkeypatch):
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "eth1")
    open_rendezvous(2, 5.0, directory=tmp_path, host=None)
    assert pinned() == ["lo", "eth1"]


@pytest.mark.parametrize(
    ("overrides", "leaves_the_host"),
    [
        ((), False),
        (("weights.transport=nccl", "engine.kind=vllm"), False),
        (("weights.transport=nccl", "engine.kind=vllm", "placement.kind=work_pools"), True),
        (("placement.kind=work_pools",), False),
    ],
)
def test_the_configuration_decides(tmp_path, monkeypatch, overrides, leaves_the_host):
    given = {}

    def opened(*_, **options):
        given.update(options)
        raise InterruptedError

    monkeypatch.setattr(learners, "open_rendezvous", opened)
    config = load_config("quickstart", ["trainer.ranks=2", *overrides])
    with pytest.raises(InterruptedError):
        Learners(2, None, tmp_path, SimpleNamespace())._start(config)
    assert given["sends_weights"] is leaves_the_host
