"""loss.advantage=value: numbers by hand, what learns, and what engines do not see."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from pipelinerl_core.algo.advantages import ADVANTAGES
from pipelinerl_core.batching.collate import PackBatcher
from pipelinerl_core.config.losses import PpoLoss, ReinforceLoss
from pipelinerl_core.errors import ConfigError
from pipelinerl_core.models.resolve import load_config
from pipelinerl_core.training.policy import Policy, PolicyOutput, pack_loss
from tests.models import published_by, state_of
from tests.unit.training.learner_case import config, learner_of, rows_of, tiny_model

VALUE = ReinforceLoss(advantage="value", value_coefficient=0.5)


def output_of(batch, logprobs, values):
    return PolicyOutput(logprobs, torch.zeros_like(logprobs), values)


def test_rows_carry_rewards_and_the_learner_takes_the_values_from_them():
    assert ADVANTAGES["value"]([1.0, 0.0, 0.25]) == [1.0, 0.0, 0.25]
    run_config = config(loss=VALUE)
    rows = rows_of(run_config)
    assert [row.advantage for row in rows] == [float(np.float32(row.rollout.reward)) for row in rows]
    (batch,) = PackBatcher(2048).rows(rows)
    num = len(batch.target_ids_N)
    logprobs = batch.rollout_logprobs_N.clone().requires_grad_()  # on policy: every ratio is 1
    values = torch.linspace(-1.0, 1.0, num, requires_grad=True)
    sums = pack_loss(batch, output_of(batch, logprobs, values), VALUE, version=0)

    rewards, weights = batch.advantages_N.double(), batch.loss_weights_N.double()
    policy_loss = -(weights * (rewards - values.double()) * logprobs.double()).sum()
    error = (values.double() - rewards).square()
    assert sums.loss.item() == pytest.approx((policy_loss + 0.25 * (weights * error).sum()).item(), rel=1e-5)
    assert sums.value_error.item() == pytest.approx(error.sum().item(), rel=1e-5)
    sums.loss.backward()
    # The baseline is a constant of the policy's gradient; the head learns from its error alone.
    torch.testing.assert_close(logprobs.grad.double(), -(weights * (rewards - values.double())).detach())
    torch.testing.assert_close(values.grad.double(), (0.5 * weights * (values - rewards)).detach(), check_dtype=False)


def test_the_value_of_a_masked_token_reaches_no_loss_and_no_gradient():
    run_config = config(loss=VALUE)
    (batch,) = PackBatcher(2048).rows(rows_of(run_config))
    batch = replace(batch, trained_M=batch.trained_M[1:])
    values = torch.zeros(len(batch.target_ids_N))
    values[0] = math.nan
    values.requires_grad_()
    logprobs = batch.rollout_logprobs_N.clone().requires_grad_()
    sums = pack_loss(batch, output_of(batch, logprobs, values), VALUE, version=0)
    sums.loss.backward()
    assert math.isfinite(sums.loss.item())
    assert math.isfinite(sums.value_error.item())
    assert logprobs.grad.isfinite().all()
    assert values.grad[0] == 0


def test_a_rollout_that_is_too_far_is_left_out_of_the_values_too():
    loss = VALUE.model_copy(update={"sequence_ratio_max": 1.5})
    (batch,) = PackBatcher(2048).rows(rows_of(config(loss=loss)))
    is_first_N = batch.sequence_N == 0
    logprobs = (batch.rollout_logprobs_N + is_first_N).requires_grad_()  # ratio e of each of its tokens
    values = torch.full(is_first_N.shape, 0.3, requires_grad=True)
    sums = pack_loss(batch, output_of(batch, logprobs, values), loss, version=0)
    sums.loss.backward()
    assert (values.grad[is_first_N] == 0).all()
    wanted = 0.5 * batch.loss_weights_N * (0.3 - batch.advantages_N)
    torch.testing.assert_close(values.grad[~is_first_N], wanted[~is_first_N])
    assert sums.clipped.item() == is_first_N.sum()


def test_the_head_is_the_same_at_every_start_and_draws_no_number_of_others():
    before = torch.get_rng_state()
    heads = [Policy(tiny_model(), temperature=1.0, value_seed=seed).value_head.weight for seed in (3, 3, 4)]
    assert torch.equal(heads[0], heads[1])
    assert not torch.equal(heads[0], heads[2])
    assert heads[0].std().item() == pytest.approx(1e-3, rel=0.5)
    torch.manual_seed(0)
    wanted = torch.get_rng_state()
    torch.manual_seed(0)
    Policy(tiny_model(), temperature=1.0)
    torch.manual_seed(0)
    assert torch.equal(torch.get_rng_state(), wanted)
    assert before.shape == wanted.shape


@pytest.mark.parametrize("loss", [VALUE, PpoLoss(advantage="value")])
def test_values_are_learned_and_engines_never_see_them(loss):
    run_config = config(loss=loss, lr=3e-3, warmup_steps=0)
    learner = learner_of(tiny_model(), run_config)
    rows = rows_of(run_config)
    errors = [learner.step(rows)["policy/value_error"] for _ in range(30)]
    assert errors[-1] < 0.5 * errors[0]
    assert not any("value_head" in name for name in published_by(learner))
    tensors, values = state_of(learner)
    assert {"weights.value_head.weight", "optimizer.value_head.bias.exp_avg"} <= tensors.keys()
    again = learner_of(tiny_model(seed=1), run_config)
    again.load_state([tensors], values)
    assert again.step(rows) == {**learner.step(rows), "time/compute_seconds": pytest.approx(0, abs=60)}
    plain = learner_of(tiny_model(), config())
    assert "policy/value_error" not in plain.step(rows_of(config()))


def test_cutting_a_step_into_packs_changes_no_gradient():
    gradients = []
    for pack_tokens in (2048, 24):
        run_config = config(pack_tokens, loss=VALUE)
        learner = learner_of(tiny_model(), run_config)
        learner.step(rows_of(run_config))
        gradients.append({name: parameter.grad.clone() for name, parameter in learner._policy.trained().items()})
    for name, gradient in gradients[0].items():
        torch.testing.assert_close(gradients[1][name], gradient, rtol=1e-4, atol=2e-7)
    assert gradients[0]["value_head.weight"].abs().max() > 0


def test_a_coefficient_that_nothing_reads_is_refused():
    with pytest.raises(
        ConfigError, match=r"loss.value_coefficient=0.5 is not used with loss.advantage=leave_one_out"
    ):
        load_config("quickstart", ["loss.value_coefficient=0.5"])
    assert load_config("quickstart", ["loss.value_coefficient=0.5", "loss.advantage=value"]).loss.advantage == "value"
