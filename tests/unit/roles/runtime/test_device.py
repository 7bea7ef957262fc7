"""Nothing is left on the CPU when the model is elsewhere.

Torch's meta device stands in for a GPU: it computes shapes alone and refuses tensors of another device as a GPU does.
"""

import numpy as np
import pytest
import torch

from pipelinerl_core.algo.logprobs import token_logprobs
from pipelinerl_core.algo.losses import LOSSES, compute_loss, select
from pipelinerl_core.batching.collate import PackBatcher
from pipelinerl_core.config.learners import TorchConfig
from pipelinerl_core.engine.embedded.decoder import SlotDecoder
from pipelinerl_core.engine.embedded.sampling import draw
from pipelinerl_core.errors import ConfigError
from pipelinerl_core.models.resolve import build_config
from pipelinerl_core.roles.runtime.device import model_device
from pipelinerl_core.training.attention import PACKED_ATTENTION
from pipelinerl_core.training.model import head_weight, hidden_states
from pipelinerl_core.training.optimizer import MasterOptimizer
from pipelinerl_core.types import TrainingRow
from tests.models import tiny_model, weights_of
from tests.rollout_rows import build_rollout

ELSEWHERE = torch.device("meta")


@torch.inference_mode()
def test_a_decode_step_with_a_prefill_stays_on_the_device_of_the_model():
    decoder = SlotDecoder(tiny_model().to(ELSEWHERE), slots=4, max_len=32)
    prefill = (np.array([1, 2]), np.zeros((2, 5), np.int64))
    positions = np.array([0, 5, 5, 0])
    logits_RV = decoder.decode(np.zeros(4, np.int64), positions, num_keys=16, prefill=prefill)
    assert logits_RV.device == ELSEWHERE
    decoder.prefill(*prefill)
    decoder.memory.move(torch.tensor([3]), torch.tensor([0]), 8)
    ones_R = torch.ones(4, device=ELSEWHERE)
    token_ids_R, logprobs_R = draw(logits_RV, ones_R, ones_R / 2, ones_R.double())
    assert (token_ids_R.device, logprobs_R.device) == (ELSEWHERE, ELSEWHERE)


def test_new_weights_are_staged_where_the_model_is():
    decoder = SlotDecoder(tiny_model(tied=False).to(ELSEWHERE), slots=4, max_len=32)
    staged = decoder.stage(weights_of(tiny_model(tied=False)))
    assert {tensor.device for tensor in staged.tensors.values()} == {ELSEWHERE}
    decoder.load(staged)


def test_forward_and_backward_of_a_pack_stay_on_the_device_of_the_model():
    model = tiny_model()
    model.set_attn_implementation(PACKED_ATTENTION)
    model = model.to(ELSEWHERE)
    rng = np.random.default_rng(0)
    rows = [
        TrainingRow(
            rollout=build_rollout(rng, num_tokens=6),
            loss_mask=np.ones(6, np.bool_),
            advantage=1.0,
            loss_weight=0.1,
        )
        for _ in range(3)
    ]
    (batch,) = (pack.to(ELSEWHERE) for pack in PackBatcher(2048).rows(rows))
    logprobs_N, entropy_N = token_logprobs(
        hidden_states(model, batch), head_weight(model), batch.target_ids_N, temperature=1.0
    )
    tokens = select(
        logprobs_N,
        batch.rollout_logprobs_N,
        batch.advantages_N,
        batch.loss_weights_N,
        batch.trained_M,
        entropy_N=entropy_N,
        sequence_N=batch.sequence_N,
        num_sequences=batch.num_sequences,
        lags_N=batch.versions_N,
    )
    optimizer = MasterOptimizer(dict(model.named_parameters()), TorchConfig(lr=1e-4))
    for kind in LOSSES:
        sums = compute_loss(tokens, build_config({"loss": {"kind": kind, "entropy_bonus": 0.1}}).loss)
        gradients = torch.autograd.grad(sums.loss, optimizer.parameters, allow_unused=True, retain_graph=True)
        optimizer.add_grads(gradients)
        assert {sums.ratio.device, sums.clipped.device, sums.num_tokens.device} == {ELSEWHERE}
    assert optimizer.grad_norm().device == ELSEWHERE


@pytest.mark.parametrize(
    ("device", "kind", "has_gpu", "expected"),
    [
        ("auto", "embedded", True, "cpu"),
        ("auto", "vllm", True, "cuda"),
        ("auto", "vllm", False, "cpu"),
        ("cpu", "vllm", True, "cpu"),
        ("cuda", "embedded", True, "cuda"),
    ],
)
def test_the_device_follows_engine_and_machine(monkeypatch, device, kind, has_gpu, expected):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: has_gpu)
    config = build_config({"model": {"device": device}, "engine": {"kind": kind}})
    assert model_device(config).type == expected


def test_a_gpu_that_is_not_there_is_a_wrong_configuration(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigError, match=r"model\.device=cuda: torch finds no GPU"):
        model_device(build_config({"model": {"device": "cuda"}}))
