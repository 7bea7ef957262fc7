"""Decoupled PPO: the proximal policy by the age of a token, what is bounded, what weighs, and what is refused."""

import math

import numpy as np
import pytest
import torch

from pipelinerl_core.algo.losses import compute_loss, select
from pipelinerl_core.algo.losses.decoupled import proximal_logprobs
from pipelinerl_core.config.losses import DecoupledPpoLoss, PpoLoss, ReinforceLoss
from pipelinerl_core.errors import ConfigError
from pipelinerl_core.models.resolve import load_config


def tokens_of(trainer, rollout, lags, *, advantages=None, weights=None, mask=None, sequence=None):
    num = len(rollout)
    return select(
        trainer,
        rollout,
        torch.ones(num) if advantages is None else advantages,
        torch.ones(num) if weights is None else weights,
        torch.arange(num) if mask is None else mask.nonzero()[:, 0],
        entropy_N=torch.ones(num),
        sequence_N=torch.zeros(num, dtype=torch.int64) if sequence is None else sequence,
        num_sequences=1,
        lags_N=torch.tensor(lags),
    )


def logs(*probabilities):
    return torch.log(torch.tensor(probabilities))


def random_tokens(seed=3, num=60):
    """Trainer, rollout, lags, advantages, weights: float32 and int64."""
    rng = np.random.default_rng(seed)
    rollout = -rng.random(num) * 2
    columns = (rollout + rng.normal(size=num) * 0.5, rollout, rng.normal(size=num), rng.random(num) / num)
    trainer, rollout, advantages, weights = (torch.tensor(column, dtype=torch.float32) for column in columns)
    return trainer.requires_grad_(), rollout, rng.integers(0, 5, num), advantages, weights


@pytest.mark.parametrize(
    ("lag", "proximal"),
    [(0, 0.1), (1, math.sqrt(0.1 * 0.8)), (2, 0.1 ** (1 / 3) * 0.8 ** (2 / 3)), (999, 0.8 / 8 ** (1 / 1000))],
)
def test_the_proximal_policy_is_one_step_of_lag_plus_one_behind_the_trainer(lag, proximal):
    tokens = tokens_of(logs(0.8).requires_grad_(), logs(0.1), [lag])
    logprobs = proximal_logprobs(tokens)
    assert logprobs.item() == pytest.approx(math.log(proximal), rel=1e-6)
    assert not logprobs.requires_grad


def test_numbers_and_gradients_by_hand():
    # Ratio 4 to the policy that sampled, in one and in two steps; advantage 1 on all.
    trainer = logs(0.8, 0.8, 0.1, 0.1).requires_grad_()
    rollout = logs(0.2, 0.2, 0.4, 0.4)
    tokens = tokens_of(trainer, rollout, [0, 1, 0, 1], weights=torch.tensor([1.0, 10.0, 100.0, 1000.0]))
    sums = compute_loss(tokens, DecoupledPpoLoss(clip_low=0.6, clip_high=1.5, ratio_max=1.75))
    # 1: weight 1, r = 4 is cut at 2.5. 2: weight 2 is cut at 1.75, r = 2 is free. 3: r = 1/4, which a positive
    # advantage lets be. 4: weight 1/2, r = 1/2.
    assert sums.loss.item() == pytest.approx(-(2.5 + 10 * 1.75 * 2 + 100 / 4 + 1000 / 4), rel=1e-6)
    assert sums.clipped.item() == 2
    assert sums.ratio.item() == pytest.approx(4 + 4 + 1 / 4 + 1 / 4, rel=1e-6)
    sums.loss.backward()
    torch.testing.assert_close(trainer.grad, -torch.tensor([0.0, 10 * 1.75 * 2, 100 / 4, 1000 / 4]))


def test_a_negative_advantage_is_bounded_from_below_only():
    trainer = logs(0.8, 0.1).requires_grad_()
    tokens = tokens_of(trainer, logs(0.2, 0.4), [1, 1], advantages=-torch.ones(2))
    sums = compute_loss(tokens, DecoupledPpoLoss(clip_low=0.2, clip_high=0.2))
    # Weights 2 and 1/2; r = 2 goes free, 1/2 is cut at 0.8.
    assert sums.loss.item() == pytest.approx(2 * 2 + 0.5 * 0.8, rel=1e-6)
    sums.loss.backward()
    torch.testing.assert_close(trainer.grad, torch.tensor([4.0, 0.0]))
    assert sums.clipped.item() == 1


def test_an_independent_derivation_in_float64_agrees():
    """From the definitions: pi_prox = pi_rollout^alpha * pi_trainer^(1 - alpha); slopes by central differences."""
    config = DecoupledPpoLoss(clip_low=0.15, clip_high=0.25, ratio_max=1.3)
    trainer, rollout, lags, advantages, weights = random_tokens()
    sums = compute_loss(tokens_of(trainer, rollout, lags, advantages=advantages, weights=weights), config)
    sums.loss.backward()
    here, there, gains, shares = (
        tensor.detach().double().numpy() for tensor in (trainer, rollout, advantages, weights)
    )
    proximal = np.exp(there) ** (1 / (lags + 1)) * np.exp(here) ** (lags / (lags + 1))
    behaviour = np.minimum(proximal / np.exp(there), 1.3)

    def value(moving):
        ratio = np.exp(moving) / proximal
        surrogate = np.where(gains > 0, np.minimum(ratio, 1.25) * gains, np.maximum(ratio, 0.85) * gains)
        return -(shares * behaviour * surrogate).sum()

    assert sums.loss.item() == pytest.approx(value(here), abs=1e-6)
    step = 1e-6
    units = np.eye(len(here)) * step
    slopes = [(value(here + unit) - value(here - unit)) / (2 * step) for unit in units]
    np.testing.assert_allclose(trainer.grad.numpy(), slopes, rtol=0, atol=1e-6)
    assert 10 < sums.clipped.item() < 50


@pytest.mark.parametrize(
    ("lags", "config", "other"),
    [
        ([0] * 60, DecoupledPpoLoss(), PpoLoss()),
        # Far behind, the proximal policy is the trainer's own: REINFORCE, nothing to clip.
        ([10**7] * 60, DecoupledPpoLoss(ratio_max=2.0), ReinforceLoss(ratio_max=2.0)),
    ],
    ids=["ppo at lag 0", "reinforce at a large lag"],
)
def test_the_decoupled_loss_lies_between_ppo_and_reinforce(lags, config, other):
    trainer, rollout, _, advantages, weights = random_tokens()
    tokens = tokens_of(trainer, rollout, lags, advantages=advantages, weights=weights)
    actual, wanted = (compute_loss(tokens, loss_config) for loss_config in (config, other))
    gradients = [torch.autograd.grad(sums.loss, [trainer], retain_graph=True)[0] for sums in (actual, wanted)]
    torch.testing.assert_close(*gradients, rtol=1e-5, atol=1e-7)
    assert actual.clipped.item() == wanted.clipped.item()


def test_an_unclipped_token_has_the_gradient_of_the_whole_ratio_at_any_lag():
    trainer, rollout, lags, advantages, weights = random_tokens()
    wide = DecoupledPpoLoss(clip_low=1.0, clip_high=1e6, ratio_max=1e6)
    sums = compute_loss(tokens_of(trainer, rollout, lags, advantages=advantages, weights=weights), wide)
    sums.loss.backward()
    ratio = (trainer.detach() - rollout).exp()
    torch.testing.assert_close(trainer.grad, -weights * ratio * advantages, rtol=1e-5, atol=1e-7)
    assert sums.clipped.item() == 0


def test_garbage_on_masked_tokens_reaches_neither_loss_nor_gradient():
    trainer = torch.tensor([math.nan, -math.inf, -0.5], requires_grad=True)
    tokens = tokens_of(
        trainer,
        torch.tensor([math.nan, -0.5, -0.5]),
        [-1, -7, 1],  # a lag of -1 would divide by 0
        advantages=torch.tensor([math.nan, math.inf, 2.0]),
        weights=torch.tensor([math.nan, math.inf, 1.0]),
        mask=torch.tensor([False, False, True]),
    )
    sums = compute_loss(tokens, DecoupledPpoLoss())
    sums.loss.backward()
    assert sums.loss.item() == pytest.approx(-2.0)
    torch.testing.assert_close(trainer.grad, torch.tensor([0.0, 0.0, -2.0]))


@pytest.mark.parametrize(
    "lags", [torch.zeros(2, dtype=torch.int64), torch.zeros(3), torch.zeros(3, dtype=torch.int32)]
)
def test_lags_of_another_shape_or_type_are_refused(lags):
    arguments = {"entropy_N": torch.ones(3), "sequence_N": torch.zeros(3).long(), "num_sequences": 1}
    with pytest.raises(ValueError, match=r"lags is \([23],\) .*it must be int64, one number per token"):
        select(*[torch.ones(3)] * 4, torch.arange(3), lags_N=lags, **arguments)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("loss.ratio_max=0.5", "loss.ratio_max=0.5: input should be greater than or equal to 1"),
        ("loss.clip_low=0", "loss.clip_low=0: input should be greater than 0"),
        ("loss.ratio_min=0.5", "loss.ratio_min needs loss.kind=icepop"),
    ],
)
def test_a_wrong_option_is_one_line(override, message):
    with pytest.raises(ConfigError, match=message) as caught:
        load_config("quickstart", ["loss.kind=decoupled_ppo", override])
    assert "\n" not in str(caught.value)
