"""Ranks write their parts of a checkpoint; rank 0 waits for the parts, or says which rank has not written one."""

import threading

import pytest
import torch
from torch.distributed import FileStore

from pipelinerl_core.errors import RankLost, StoreError, StoreUnavailable
from pipelinerl_core.roles.trainer import rank_files
from pipelinerl_core.roles.trainer.rank_files import RankFiles, RankWriter
from pipelinerl_core.run.records import checkpoint_prefix
from pipelinerl_core.storage.local import FileStore as LocalStore
from pipelinerl_core.storage.object_store import open_store
from pipelinerl_core.training.live_state import LiveState
from pipelinerl_core.weights import checkpoint
from pipelinerl_core.weights.checkpoint import save_checkpoint
from tests.models import read_checkpoint

PREFIX = checkpoint_prefix(4, 2)


def state_of_rank(rank):
    part = torch.arange(3.0) + 3 * rank
    names = {f"weights.{name}[{3 * rank} of 3x3]": part + 10 * index for index, name in enumerate("abc")}
    return LiveState({**names, f"weights.own{rank}": torch.full((2,), float(rank))}, {"version": 4})


@pytest.fixture
def meeting(tmp_path):
    return FileStore(str(tmp_path / "ranks"), 3)


def waiting_for(meeting, num_ranks=3):
    return RankFiles(meeting, num_ranks, lambda: False)


def test_the_parts_of_all_ranks_are_one_checkpoint(tmp_path, meeting, monkeypatch):
    monkeypatch.setattr(checkpoint, "FILE_BYTES", 24)
    root = str(tmp_path / "run")
    for rank in (2, 1):
        RankWriter(root, meeting, rank).write(PREFIX, state_of_rank(rank))
    state = state_of_rank(0)
    state.written_elsewhere = waiting_for(meeting).wait
    manifest = save_checkpoint(open_store(root), 4, 2, state)
    assert [entry.name for entry in manifest.files] == [
        f"state-{of_rank}0000{number}.safetensors" for of_rank in ("", "1-", "2-") for number in (1, 2)
    ]
    tensors, values = read_checkpoint(open_store(root), 4, 2)
    wanted = {f"weights.{name}": torch.arange(9.0).view(3, 3) + 10 * index for index, name in enumerate("abc")}
    wanted |= {f"weights.own{rank}": torch.full((2,), float(rank)) for rank in range(3)}
    assert tensors.keys() == wanted.keys()
    assert all(torch.equal(tensor, wanted[name]) for name, tensor in tensors.items())
    assert values == {"version": 4}
    assert not any(meeting.check([f"{PREFIX}/{rank}"]) for rank in (1, 2))  # a later checkpoint may have this name


@pytest.mark.parametrize(
    "error", [StoreError("the disk is read-only"), StoreUnavailable("no space"), ValueError("bug")]
)
def test_rank_0_raises_why_a_rank_cannot_write(tmp_path, meeting, monkeypatch, error):
    def fail(url):
        raise error

    monkeypatch.setattr(rank_files, "open_store", fail)
    RankWriter(str(tmp_path), meeting, 1).write(PREFIX, state_of_rank(1))
    kind = StoreUnavailable if isinstance(error, StoreUnavailable) else StoreError
    text = f"rank 1 has not written its part of {PREFIX}: {type(error).__name__}: {error}"
    with pytest.raises(kind, match=text) as caught:
        waiting_for(meeting, 2).wait(PREFIX)
    assert type(caught.value) is kind


class SlowStore(LocalStore):
    """Holds back the second file of a rank until `released` is set."""

    def __init__(self, path):
        super().__init__(path)
        self.released, self.num_puts = threading.Event(), 0

    def put(self, key, data, **more):
        self.num_puts += 1
        if self.num_puts == 2:
            assert self.released.wait(60)
        super().put(key, data, **more)


@pytest.fixture
def slow(tmp_path, meeting, monkeypatch):
    """The store of rank 2, whose second file takes longer than SILENT_SECONDS; rank 1 has written its files."""
    monkeypatch.setattr(rank_files, "SILENT_SECONDS", 0.5)
    monkeypatch.setattr(checkpoint, "FILE_BYTES", 24)
    RankWriter(str(tmp_path / "run"), meeting, 1).write(PREFIX, state_of_rank(1))
    store = SlowStore(tmp_path / "run")
    monkeypatch.setattr(rank_files, "open_store", lambda url: open_store(url) if url else store)
    yield store
    store.released.set()


def test_a_rank_that_gives_no_sign_of_life_is_lost(meeting, slow):
    RankWriter("", meeting, 2).write(PREFIX, state_of_rank(2))
    with pytest.raises(RankLost, match=rf"writing of {PREFIX}: rank 2 has been silent for 0 s"):
        waiting_for(meeting).wait(PREFIX)


def test_a_rank_may_write_for_as_long_as_its_store_needs(meeting, slow, monkeypatch):
    monkeypatch.setattr(rank_files, "_BEAT_SECONDS", 0.05)
    RankWriter("", meeting, 2).write(PREFIX, state_of_rank(2))
    threading.Timer(3 * rank_files.SILENT_SECONDS, slow.released.set).start()
    assert len(waiting_for(meeting).wait(PREFIX)) == 4


def test_the_wait_ends_with_the_ranks(meeting):
    files = RankFiles(meeting, 2, lambda: True)
    with pytest.raises(RankLost, match=f"writing of {PREFIX}: a rank of the trainer is gone"):
        files.wait(PREFIX)
