"""What the committer does when another trainer takes over."""

import pytest
import torch

from pipelinerl_core.config import load_config
from pipelinerl_core.errors import Fenced
from pipelinerl_core.messages import Ack
from pipelinerl_core.roles.trainer.committer import Committer, ComputedStep
from pipelinerl_core.run.history import counted_commit_keys, read_epochs, take_epoch
from pipelinerl_core.run.records import commit_key
from pipelinerl_core.testing.fakes import MemoryStore
from tests.builders import put_epoch

WEIGHTS = {"w": torch.arange(4.0)}


class Link:
    """Acknowledges; remembers the announced manifests."""

    def __init__(self):
        self.manifests = []

    def request(self, message, rows=None):
        self.manifests.append(message.manifest)
        return Ack(re=0)


@pytest.fixture
def parts(monkeypatch, tmp_path):
    monkeypatch.setattr("pipelinerl_core.weights.publish.SHM_ROOT", tmp_path / "shm")
    store, link = MemoryStore(), Link()
    epoch = put_epoch(store, 2)
    config = load_config("quickstart", ["weights.durable_every=1000"])
    committer = Committer(store, config, run_id="run", epoch=epoch, link=link)
    for step in (0, 1):
        committer.submit(computed(step))
    committer.flush()
    yield store, link, committer
    committer.close()


def computed(step):
    return ComputedStep(
        step=step, weights=WEIGHTS, state=None, batch=None, reserved=None, reserved_at=0.0, computed_at=0.0
    )


def test_a_commit_that_its_successor_has_not_adopted_is_not_announced(parts, monkeypatch):
    store, link, committer = parts
    put = store.put

    def take_over_first(key, data, **options):
        if key == commit_key(2, 2):  # it has just seen that nobody took over
            take_epoch(store, "trainer", adopted_through=1)
        put(key, data, **options)

    monkeypatch.setattr(store, "put", take_over_first)
    committer.submit(computed(2))
    with pytest.raises(Fenced, match="trainer epoch 2 was taken over by epoch 3 "):
        committer.flush()
    assert [manifest.version for manifest in link.manifests] == [0, 1]
    assert committer.newest.step == max(counted_commit_keys(store, read_epochs(store))) == 1
