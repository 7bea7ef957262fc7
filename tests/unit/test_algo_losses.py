"""Losses and importance weights: sums done by hand, and what must not reach them."""

import math

import pytest
import torch

from pipelinerl_core.algo.importance import MAX_LOG_RATIO, ess, log_ratio, sequence_log_ratios
from pipelinerl_core.algo.losses import reinforce
from pipelinerl_core.config.sections import LossConfig

CONFIG = LossConfig(ratio_max=2.0)


def four_tokens():
    # token:                       masked  on-policy  ratio 1.5   ratio 4 -> 2
    trainer = torch.log(torch.tensor([0.9, 0.5, 0.6, 0.8])).requires_grad_()
    rollout = torch.log(torch.tensor([0.9, 0.5, 0.4, 0.2]))
    advantages = torch.tensor([7.0, 1.0, -1.0, 2.0])
    weights = torch.tensor([9.0, 0.5, 0.25, 0.125])
    mask = torch.tensor([False, True, True, True])
    return trainer, rollout, advantages, weights, mask


def test_reinforce_matches_the_sum_done_by_hand():
    trainer, *rest = four_tokens()
    sums = reinforce(trainer, *rest, config=CONFIG)

    by_hand = -(
        0.5 * 1.0 * 1.0 * math.log(0.5) + 0.25 * 1.5 * -1.0 * math.log(0.6) + 0.125 * 2.0 * 2.0 * math.log(0.8)
    )
    assert sums.loss.item() == pytest.approx(by_hand, rel=1e-5)
    assert sums.num_tokens.item() == 3
    assert sums.ratio.item() == pytest.approx(1.0 + 1.5 + 4.0, rel=1e-5)
    assert sums.clipped.item() == 1
    assert sums.kl.item() == pytest.approx(math.log(0.4 / 0.6) + math.log(0.2 / 0.8), rel=1e-5)
    sums.loss.backward()
    # d loss / d logprob = -loss_weight * min(ratio, 2) * advantage; the ratio is a constant
    torch.testing.assert_close(trainer.grad, torch.tensor([0.0, -0.5, 0.375, -0.5]))


def test_garbage_on_masked_tokens_reaches_neither_loss_nor_gradient():
    trainer = torch.tensor([math.nan, -math.inf, -0.5], requires_grad=True)
    rollout = torch.tensor([math.nan, -math.inf, -0.5])
    advantages = torch.tensor([math.nan, 3.0, 1.0])
    weights = torch.tensor([math.inf, math.nan, 1.0])
    mask = torch.tensor([False, False, True])
    sums = reinforce(trainer, rollout, advantages, weights, mask, config=CONFIG)
    sums.loss.backward()
    assert sums.loss.item() == pytest.approx(0.5)
    assert (sums.ratio.item(), sums.kl.item()) == (1.0, 0.0)
    torch.testing.assert_close(trainer.grad, torch.tensor([0.0, 0.0, -1.0]))


def test_the_loss_of_a_step_is_the_sum_over_its_parts():
    trainer, *rest = four_tokens()
    whole = reinforce(trainer, *rest, config=CONFIG)
    parts = [
        reinforce(trainer[part], *(tensor[part] for tensor in rest), config=CONFIG)
        for part in (slice(0, 2), slice(2, 4))
    ]
    for name in ("loss", "num_tokens", "ratio", "clipped", "kl"):
        added = sum(getattr(part, name).item() for part in parts)
        assert added == pytest.approx(getattr(whole, name).item(), rel=1e-6)


def test_nothing_to_train_is_a_zero_with_a_gradient():
    trainer, rollout, advantages, weights, mask = four_tokens()
    sums = reinforce(trainer, rollout, advantages, weights, torch.zeros_like(mask), config=CONFIG)
    sums.loss.backward()
    assert (sums.loss.item(), sums.num_tokens.item()) == (0.0, 0)
    assert trainer.grad.abs().sum() == 0


@pytest.mark.parametrize(
    ("position", "replacement", "message"),
    [
        (4, torch.ones(4), "loss_mask is torch.float32"),
        (1, torch.zeros(3), r"rollout_logprobs is \(3,\)"),
        (2, torch.ones(4, dtype=torch.int64), "advantages is .* torch.int64"),
        (3, torch.ones(4, 1), r"loss_weights is \(4, 1\)"),
        (0, torch.zeros(1, 4), r"trainer_logprobs is \(1, 4\)"),
    ],
)
def test_wrong_shapes_and_types_are_refused(position, replacement, message):
    arguments = list(four_tokens())
    arguments[position] = replacement
    with pytest.raises(ValueError, match=message):
        reinforce(*arguments, config=CONFIG)


def test_log_ratio_is_trainer_minus_rollout_clamped_and_constant():
    trainer = torch.tensor([-1.0, -500.0, -1.0], requires_grad=True)
    found = log_ratio(trainer, torch.tensor([-3.0, -1.0, -500.0]))
    assert found.tolist() == [2.0, -MAX_LOG_RATIO, MAX_LOG_RATIO]
    assert not found.requires_grad


def test_ess_matches_the_fractions_done_by_hand():
    # weights 1, 1, 2: (1 + 1 + 2)^2 / (3 * (1 + 1 + 4)) = 16/18
    assert ess(torch.log(torch.tensor([1.0, 1.0, 2.0]))) == pytest.approx(16 / 18)
    assert ess(torch.full((5,), 3.7)) == pytest.approx(1.0)
    assert ess(torch.zeros(0)) == 1.0


def test_ess_survives_weights_that_no_float_can_hold():
    # weights e^2000, e^2000, 0: 2^2 / (3 * 2)
    assert ess(torch.tensor([2000.0, 2000.0, -2000.0])) == pytest.approx(4 / 6)
    assert ess(torch.tensor([-2000.0, -2000.0])) == pytest.approx(1.0)


def test_ess_does_not_hide_a_nan():
    assert math.isnan(ess(torch.tensor([0.0, math.nan])))


def test_the_ratio_of_a_sequence_is_the_product_over_its_tokens():
    logs = torch.log(torch.tensor([2.0, 3.0, 5.0, 7.0]))
    found = sequence_log_ratios(logs, torch.tensor([0, 2, 0, 2]), num_sequences=3)
    torch.testing.assert_close(found.exp(), torch.tensor([10.0, 1.0, 21.0], dtype=torch.float64))
