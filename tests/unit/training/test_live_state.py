"""A checkpoint has the state of its step, whatever the learner does while it is written."""

import itertools
import random
import threading

import pytest
import torch

from pipelinerl_core.storage.local import MemoryStore
from pipelinerl_core.training.live_state import LiveState
from pipelinerl_core.weights import checkpoint
from pipelinerl_core.weights.checkpoint import save_checkpoint
from tests.models import read_checkpoint, state_of
from tests.unit.training.learner_case import config, learner_of, rows_of, tiny_model


class SlowStore(MemoryStore):
    """Lets the learner work in the middle of a checkpoint."""

    def __init__(self, root, between):
        super().__init__(root)
        self._between = between

    def put(self, key, data, **more):
        self._between(key)
        super().put(key, data, **more)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("seed", range(4))
def test_a_checkpoint_that_is_written_during_further_steps_has_its_own_steps_state(dtype, seed, monkeypatch):
    rng = random.Random(seed)
    run_config, steps = config(40, lr=1e-3), itertools.count(1)
    learner = learner_of(tiny_model().to(dtype), run_config)

    def take_step():
        step = next(steps)
        learner.step(rows_of(run_config, step, seed=step + 100 * seed))

    take_step()
    monkeypatch.setattr(checkpoint, "FILE_BYTES", 20_000)
    wanted, values = state_of(learner)

    def between(key):
        if rng.random() < 0.5:
            take_step()
        if rng.random() < 0.3:
            learner.set_trained_weights(learner.trained_weights({}))

    store = SlowStore(f"live-{dtype}-{seed}", between)
    manifest = save_checkpoint(store, 1, 1, learner.state())
    assert len(manifest.files) > 3
    assert all(entry.size < 20_000 + 60_000 for entry in manifest.files)
    tensors, read = read_checkpoint(store, 1, 1)
    assert read == values
    assert tensors.keys() == wanted.keys()
    assert all(torch.equal(tensor, wanted[name]) for name, tensor in tensors.items())


def test_a_writer_and_a_learner_at_once_never_mix_two_states():
    tensors = {str(index): torch.zeros(1000) for index in range(200)}
    state, read = LiveState(tensors, {}), {}

    def write():
        for name in list(tensors):
            target = {name: torch.empty(1000)}
            state.take(target)
            read.update(target)

    writer = threading.Thread(target=write)
    writer.start()
    state.detach()
    for tensor in tensors.values():
        tensor.fill_(1)
    writer.join()
    assert all(not tensor.any() for tensor in read.values())
