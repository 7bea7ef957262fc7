"""What the committer does for actors that cannot read the newest version."""

from pathlib import Path

import pytest
import torch

from pipelinerl_core.config import load_config
from pipelinerl_core.messages import Ack
from pipelinerl_core.records import ActorSample, EpochRecord
from pipelinerl_core.roles.committer import Committer, ComputedStep
from pipelinerl_core.testing.fakes import MemoryStore
from pipelinerl_core.weights.files import UNREADABLE_COUNTER
from pipelinerl_core.weights.subscribe import WeightSubscriber

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
    epoch = EpochRecord(epoch=2, role="trainer", parent=None, adopted_through=-1, started_at=0.0, host="here", pid=1)
    config = load_config("quickstart", ["weights.durable_every=1000"])
    committer = Committer(store, config, run_id="run", epoch=epoch, link=link)
    for step in (0, 1):
        committer.submit(
            ComputedStep(
                step=step, weights=WEIGHTS, state=None, batch=None, reserved=None, reserved_at=0.0, computed_at=0.0
            )
        )
    committer.flush()
    yield store, link, committer
    committer.close()


def sample(version):
    return ActorSample(
        at=0.0, engine_version=0, running=0, waiting=0, concurrency=1, num_tokens=0, running_seconds=0.0,
        counters={UNREADABLE_COUNTER: float(version)},
    ).model_dump()  # fmt: skip


def test_a_version_that_an_actor_cannot_read_is_published_again_once(parts):
    store, link, committer = parts
    announced = link.manifests[-1]
    assert (announced.version, announced.key) == (1, None)
    (Path(announced.shm) / "model.safetensors").write_bytes(b"damaged")
    for _ in range(3):
        committer.attend({"a/1": sample(-1), "b/1": sample(1)}, 1, lambda: WEIGHTS)
        committer.flush()
        if committer._rescue is not None:
            committer._rescue.result(10)
    assert len(link.manifests) == 3
    again = link.manifests[-1]
    assert (again.version, again.files, again.key) == (1, announced.files, "weights/00000001.2")
    assert torch.equal(WeightSubscriber(store).fetch(again).tensors["w"], WEIGHTS["w"])
    assert torch.equal(WeightSubscriber(store).fetch(announced).tensors["w"], WEIGHTS["w"])


@pytest.mark.parametrize(("told", "version"), [(-1, 1), (0, 1), (1, 2)])
def test_nothing_is_published_again_unless_it_is_the_newest_and_unreadable(parts, told, version):
    _, link, committer = parts

    def weights():
        raise AssertionError("no snapshot is needed")

    committer.attend({"a/1": sample(told)}, version, weights)
    assert len(link.manifests) == 2
