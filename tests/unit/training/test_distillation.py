"""On-policy distillation: the advantage of a token from a teacher's log-probability."""

import copy
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from pipelinerl_core.algo.losses import LOSSES
from pipelinerl_core.config.losses import ReinforceLoss
from pipelinerl_core.models.resolve import build_config
from pipelinerl_core.training.model import prepare_model
from pipelinerl_core.training.policy import PolicyOutput, pack_loss
from tests.unit.training.learner_case import config, learner_of, plain_logprobs, rows_of, tiny_model

RATIO_MAX = 1.5


def teacher_model():
    torch.manual_seed(7)
    model = tiny_model()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    return model


def loss(**more):
    return ReinforceLoss(ratio_max=RATIO_MAX, teacher="/models/teacher", **more)


@pytest.mark.parametrize("pack_tokens", [16, 2048])
@pytest.mark.parametrize("reward_coefficient", [0.0, 1.0])
def test_the_gradient_of_a_step_equals_that_of_float64(pack_tokens, reward_coefficient):
    run_config = config(pack_tokens, loss(teacher_coefficient=0.7, reward_coefficient=reward_coefficient))
    rows = rows_of(run_config)
    plain, plain_teacher = tiny_model().double(), teacher_model().double()
    terms, gaps = [], []
    for row in rows:
        logprobs, _ = plain_logprobs(plain, row.rollout)
        with torch.no_grad():
            gap = logprobs.detach() - plain_logprobs(plain_teacher, row.rollout)[0]
        ratio = (logprobs.detach() - torch.from_numpy(row.rollout.rollout_logprobs)).exp().clamp(max=RATIO_MAX)
        advantage = reward_coefficient * row.advantage - 0.7 * gap
        mask = torch.from_numpy(row.loss_mask)
        terms.append((-(ratio * advantage * logprobs) * row.loss_weight)[mask].sum())
        gaps.append(gap[mask])
    torch.stack(terms).sum().backward()
    learner = learner_of(tiny_model(), run_config, teacher=prepare_model(teacher_model()).requires_grad_(False))
    metrics = learner.step(rows)
    for name, parameter in learner._model.named_parameters():
        wanted = dict(plain.named_parameters())[name].grad
        torch.testing.assert_close(parameter.grad.double(), wanted, rtol=1e-4, atol=5e-7, msg=name)
    assert metrics["policy/kl_teacher"] == pytest.approx(torch.cat(gaps).mean().item(), rel=1e-4)
    assert all(tensor.grad is None for tensor in learner._teacher.parameters())


@pytest.mark.parametrize("kind", ["reinforce", "ppo", "icepop"])
@pytest.mark.parametrize("is_off_policy", [False, True])
def test_over_all_tokens_the_gradient_is_that_of_the_reverse_kl_divergence(kind, is_off_policy):
    """Each token of a small vocabulary once, weighted by its probability when sampled: an exact expectation."""
    generator = torch.Generator().manual_seed(3)
    logits_V, teacher_V, noise_V = torch.randn(3, 6, dtype=torch.float64, generator=generator)
    logits_V.requires_grad_(True)
    logprobs_V, teacher_logprobs_V = torch.log_softmax(logits_V, 0), torch.log_softmax(teacher_V, 0)
    rollout_V = torch.log_softmax(logits_V.detach() + 0.05 * noise_V * is_off_policy, 0)
    places, zeros = torch.arange(6), torch.zeros(6, dtype=torch.int64)
    batch = SimpleNamespace(
        rollout_logprobs_N=rollout_V, advantages_N=torch.zeros(6), loss_weights_N=rollout_V.exp(), trained_M=places,
        sequence_N=zeros, versions_N=zeros, num_sequences=1,
    )  # fmt: skip
    section = build_config({"loss": {"kind": kind, "teacher": "/models/teacher"}}).loss
    sums = pack_loss(
        batch, PolicyOutput(logprobs_V, torch.zeros(6), None), section, version=0,
        teacher=lambda batch: (teacher_logprobs_V,),
    )  # fmt: skip
    [gradient] = torch.autograd.grad(sums.loss, logits_V, retain_graph=True)
    divergence = (logprobs_V.exp() * (logprobs_V - teacher_logprobs_V)).sum()
    [wanted] = torch.autograd.grad(divergence, logits_V)
    torch.testing.assert_close(gradient, wanted, rtol=1e-5, atol=1e-6)


def test_a_student_that_equals_its_teacher_does_not_move_and_another_student_approaches():
    run_config = config(loss=loss(reward_coefficient=0.0), lr=2e-3)
    rows = rows_of(run_config)
    equal = learner_of(tiny_model(), run_config, teacher=prepare_model(tiny_model()).requires_grad_(False))
    metrics = equal.step(rows)
    assert metrics["policy/kl_teacher"] == 0
    assert metrics["train/grad_norm"] == 0
    teacher = prepare_model(teacher_model()).requires_grad_(False)
    before = copy.deepcopy(teacher.state_dict())
    learner = learner_of(tiny_model(), run_config, teacher=teacher)
    rollouts = [row.rollout for row in rows]

    taught = np.concatenate(learner_of(teacher_model(), run_config).logprobs_of(rollouts))

    def distance():
        return float(np.abs(np.concatenate(learner.logprobs_of(rollouts)) - taught).mean())

    first = distance()
    for _ in range(30):
        learner.step(rows)
    assert distance() < first
    assert all(torch.equal(tensor, before[name]) for name, tensor in teacher.state_dict().items())


@pytest.mark.parametrize("kind", LOSSES)
def test_every_loss_takes_a_teacher(kind):
    section = build_config({"loss": {"kind": kind, "teacher": "/models/teacher"}}).loss
    run_config = config(loss=section)
    learner = learner_of(tiny_model(), run_config, teacher=prepare_model(teacher_model()).requires_grad_(False))
    assert np.isfinite(learner.step(rows_of(run_config))["policy/kl_teacher"])
