"""A pack never waits for the device: nothing in forward, loss and backward asks it for a number.

Torch's dispatcher sees every operation. What would make a GPU finish its queue is refused here, on the CPU, where the
data are real, and on the meta device, which tells copies between devices.
"""

import pytest
import torch

from pipelinerl_core.algo.losses import LOSSES
from pipelinerl_core.algo.packed import moved
from pipelinerl_core.batching.collate import PackBatcher
from pipelinerl_core.models.resolve import build_config
from pipelinerl_core.training.attention import PACKED_ATTENTION
from pipelinerl_core.training.learner import TorchLearner
from pipelinerl_core.training.step_sums import StepSums
from tests.models import tiny_model
from tests.unit.training.no_waiting_case import NoWaiting, aten, packs_of


@pytest.mark.parametrize(
    "waits",
    [
        lambda numbers: numbers.sum().item(),
        lambda numbers: numbers[numbers > 0],
        lambda numbers: bool((numbers > 0).all()),
        lambda numbers: (numbers > 0).nonzero(),
        lambda numbers: numbers.index_put((numbers > 0,), numbers.new_zeros(())),
        lambda numbers: torch.where(numbers.to("meta") > 0, 0.0, numbers.to("meta")),
        lambda numbers: numbers.to("meta"),
    ],
)
def test_the_watch_sees_operations_that_wait(waits):
    with pytest.raises(AssertionError, match=r"waits for the device|copies between"), NoWaiting():
        waits(torch.ones(3))


def learner_on(device, kind="reinforce", *, everything=True, **model):
    extras = {"advantage": "value", "kl_coefficient": 0.1, "sequence_ratio_max": 1.5, "entropy_bonus": 0.01}
    extras |= {"kl_weighted": True, "negative_kl_max": 0.1}
    loss = {"kind": kind, **(extras if everything else {})}
    config = build_config({"loss": loss, "trainer": {"pack_tokens": 64}, "schedule": {"max_lag": 2}})
    policies = [tiny_model(seed=seed, **model) for seed in (0, 1)]
    for policy in policies:
        policy.set_attn_implementation(PACKED_ATTENTION)
        policy.to(device)
    reference = policies[1].requires_grad_(False) if everything else None
    return TorchLearner(policies[0], config, batcher=PackBatcher(64), reference=reference), config


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("kind", LOSSES)
def test_forward_loss_and_backward_of_a_pack_ask_for_nothing(kind, device):
    learner, config = learner_on(torch.device(device), kind)
    learner.version = 4
    sums = StepSums(4, 64)
    batches = [pack.to(torch.device(device)) for pack in packs_of(config)]
    for batch in batches:
        with NoWaiting() as mode:
            result = learner._backward(batch)
            learner._optimizer.add_grads(result.gradients)
            sums.add(result.batch, result.sums, result.trainer_logprobs_N, result.entropy_N)
        # The backward pass was seen too, and its parts of this code.
        assert {aten.index_copy_, aten.addmm_, aten._softmax_backward_data} & set(mode.seen)
        assert len(mode.seen) > 300


def test_a_large_bfloat16_head_is_cut_without_asking():
    learner, config = learner_on(torch.device("cpu"), everything=False, vocab_size=5000)
    learner._model.to(torch.bfloat16)
    with NoWaiting():
        learner._backward(packs_of(config)[0])


def test_a_step_asks_once():
    learner, config = learner_on(torch.device("cpu"), everything=False)
    packs = packs_of(config)
    learner.version = 4
    asked = []
    tolist = torch.Tensor.tolist

    class Counting(NoWaiting):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            try:
                return super().__torch_dispatch__(function, types, args, kwargs)
            except AssertionError:
                asked.append(function)
                return function(*args, **(kwargs or {}))

    with pytest.MonkeyPatch.context() as patch, Counting():
        patch.setattr(torch.Tensor, "tolist", lambda tensor: asked.append(tuple(tensor.shape)) or tolist(tensor))
        learner.step_packs(packs)
    # All figures and the gradient's norm at once. Vectors of 3 are made of the answer, on the host (total_ess).
    assert [sizes for sizes in asked if sizes != (3,)] == [(1, 358)]


class Recorded:
    """Stands in for a tensor on the CPU; there is no GPU to move one to."""

    device = torch.device("cpu")

    def __init__(self):
        self.calls = []

    def pin_memory(self):
        self.calls.append("pin")
        return self

    def to(self, device, non_blocking=False):
        self.calls.append((device.type, non_blocking))
        return self


def test_a_copy_to_a_gpu_goes_through_pinned_memory_and_is_not_waited_for():
    to_gpu, to_cpu = Recorded(), Recorded()
    moved(to_gpu, torch.device("cuda"))
    moved(to_cpu, torch.device("cpu"))
    assert to_gpu.calls == ["pin", ("cuda", True)]
    assert to_cpu.calls == [("cpu", False)]
