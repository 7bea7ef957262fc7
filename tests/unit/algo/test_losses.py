"""Losses and importance weights: numbers by hand, a second implementation, and what must not reach them."""

import math

import numpy as np
import pytest
import torch

from pipelinerl_core.algo.importance import MAX_LOG_RATIO, EssTerms, ess_terms, sequence_log_ratios, total_ess
from pipelinerl_core.algo.losses import LOSSES, LossSums, compute_loss, select
from pipelinerl_core.config.losses import (
    CispoLoss,
    DapoLoss,
    DecoupledPpoLoss,
    DppoLoss,
    DrGrpoLoss,
    GrpoLoss,
    GspoLoss,
    IcepopLoss,
    PpoLoss,
    ReinforceLoss,
    SapoLoss,
    SequenceProductLoss,
)

SEQUENCES = torch.tensor([0, 0, 1, 1])
CONFIGS = [
    ReinforceLoss(ratio_max=2.0),
    CispoLoss(clip_low=0.4, clip_high=0.3),
    PpoLoss(dual_clip=1.4),
    GrpoLoss(),
    DrGrpoLoss(clip_low=0.5, dual_clip=0.0),
    DapoLoss(dual_clip=1.1),
    GspoLoss(clip_low=0.1, clip_high=0.2, dual_clip=1.05),
    IcepopLoss(ratio_max=2.0),
    DecoupledPpoLoss(clip_low=0.1, clip_high=0.1, ratio_max=1.2, dual_clip=1.2),
    DppoLoss(divergence_max=0.1, ratio_max=1.5),
    SapoLoss(tau_positive=2.0, tau_negative=3.0),
    SequenceProductLoss(ratio_max=1.5),
    SequenceProductLoss(ratio_max=1.5, masks=True),
]


def ess(log_weights_N):
    return total_ess([EssTerms(*ess_terms([log_weights_N]).tolist())])


def compute(config, trainer, rollout, advantages, weights, mask, sequence=SEQUENCES, entropy=None) -> LossSums:
    entropy = torch.ones_like(rollout) if entropy is None else entropy
    # The number of a sequence is the lag of its tokens too.
    others = {"entropy_N": entropy, "sequence_N": sequence, "num_sequences": 800, "lags_N": sequence}
    return compute_loss(select(trainer, rollout, advantages, weights, mask.nonzero()[:, 0], **others), config)


def four_tokens():
    # token:                       masked  on-policy  ratio 1.5   ratio 4
    trainer = torch.log(torch.tensor([0.9, 0.5, 0.6, 0.8])).requires_grad_()
    rollout = torch.log(torch.tensor([0.9, 0.5, 0.4, 0.2]))
    advantages = torch.tensor([7.0, 1.0, -1.0, 2.0])
    weights = torch.tensor([9.0, 0.5, 0.25, 0.125])
    mask = torch.tensor([False, True, True, True])
    return trainer, rollout, advantages, weights, mask


# d/d logprob of a ratio is the ratio. GSPO: tokens 3 and 4 are one rollout of ratio s = sqrt(1.5 * 4) = sqrt(6), the
# mean log ratio, so each of its tokens moves the terms of both by s / 2.
S = math.sqrt(6)


def sigmoid(value: float) -> float:
    return 1 / (1 + math.exp(-value))


GATE = sigmoid(1.05 * 0.5)

BY_HAND = {
    # ratio 4 is cut at 2, and stays in the gradient
    "reinforce": (
        ReinforceLoss(ratio_max=2.0),
        -(0.5 * math.log(0.5) - 0.25 * 1.5 * math.log(0.6) + 0.125 * 2 * 2 * math.log(0.8)),
        [0.0, -0.5, 0.375, -0.5],
        1,
    ),
    # 1.5 and 4 become 1.25
    "cispo": (
        CispoLoss(clip_low=0.5, clip_high=0.25),
        -(0.5 * math.log(0.5) - 0.25 * 1.25 * math.log(0.6) + 0.125 * 1.25 * 2 * math.log(0.8)),
        [0.0, -0.5, 0.3125, -0.3125],
        2,
    ),
    # 1.5 with a negative advantage is not clipped, 4 with a positive one is, and has no gradient
    "ppo": (PpoLoss(), -(0.5 - 0.25 * 1.5 + 0.125 * 1.2 * 2), [0.0, -0.5, 0.375, 0.0], 1),
    "grpo": (GrpoLoss(clip_high=0.1), -(0.5 - 0.25 * 1.5 + 0.125 * 1.1 * 2), [0.0, -0.5, 0.375, 0.0], 1),
    "dr_grpo": (DrGrpoLoss(clip_high=4.0), -(0.5 - 0.25 * 1.5 + 0.125 * 4 * 2), [0.0, -0.5, 0.375, -1.0], 0),
    "dapo": (DapoLoss(), -(0.5 - 0.25 * 1.5 + 0.125 * 1.28 * 2), [0.0, -0.5, 0.375, 0.0], 1),
    # of the second rollout the term with advantage -1 is free, that with 2 is clipped at 1.02 and has no gradient
    "gspo": (GspoLoss(), -(0.5 - 0.25 * S + 0.125 * 1.02 * 2), [0.0, -0.5, 0.25 * S, 0.0], 1),
    # 4 is outside of the bounds
    "icepop": (
        IcepopLoss(ratio_max=2.0),
        -(0.5 * math.log(0.5) - 0.25 * 1.5 * math.log(0.6)),
        [0, -0.5, 0.375, 0],
        1,
    ),
    # at lag 1 the proximal policy is half-way: ratios sqrt(1.5) and 2 on either side of it, the second one cut at 1.5
    "decoupled_ppo": (
        DecoupledPpoLoss(clip_high=1.5, ratio_max=1.5),
        -(0.5 - 0.25 * 1.5 + 0.125 * 1.5 * 2 * 2),
        [0.0, -0.5, 0.375, -0.75],
        1,
    ),
    # the gates are sigmoid(0), sigmoid(1.05 / 2) and sigmoid(3): the last lowers its gradient to 0.18
    "sapo": (
        SapoLoss(),
        -(0.5 * 4 * 0.5 - 0.25 * 4 / 1.05 * GATE + 0.125 * 4 * sigmoid(3.0) * 2),
        [0.0, -0.5, 1.5 * GATE * (1 - GATE), -4 * sigmoid(3.0) * (1 - sigmoid(3.0))],
        1,
    ),
    # of the second rollout the product is 6, and is cut at 5
    "sequence_product": (
        SequenceProductLoss(ratio_max=5.0),
        -(0.5 * math.log(0.5) - 0.25 * 5 * math.log(0.6) + 0.125 * 5 * 2 * math.log(0.8)),
        [0.0, -0.5, 1.25, -1.25],
        2,
    ),
    # 0.4 to 0.6 is further than 0.15, but A = -1 moves it back; 0.2 to 0.8 with A = 2 is outside of the trust region
    "dppo": (
        DppoLoss(divergence_max=0.15),
        -(0.5 * math.log(0.5) - 0.25 * 1.5 * math.log(0.6)),
        [0.0, -0.5, 0.375, 0.0],
        1,
    ),
}


@pytest.mark.parametrize("kind", LOSSES)
def test_value_and_gradient_match_the_numbers_done_by_hand(kind):
    config, value, gradient, num_clipped = BY_HAND[kind]
    trainer, *rest = four_tokens()
    sums = compute(config, trainer, *rest)
    assert sums.loss.item() == pytest.approx(value, rel=1e-5)
    assert sums.num_tokens.item() == 3
    assert sums.ratio.item() == pytest.approx(1.0 + 1.5 + 4.0, rel=1e-5)
    assert sums.clipped.item() == num_clipped
    assert sums.kl.item() == pytest.approx(math.log(0.4 / 0.6) + math.log(0.2 / 0.8), rel=1e-5)
    sums.loss.backward()
    torch.testing.assert_close(trainer.grad, torch.tensor(gradient, dtype=torch.float32))


def surrogate_of(config, ratio, advantage) -> float:
    bounded = min(max(ratio, 1 - config.clip_low), 1 + config.clip_high)
    value = min(ratio * advantage, bounded * advantage)
    return max(value, config.dual_clip * advantage) if config.dual_clip and advantage < 0 else value


def reference(config, trainer, rollout, advantages, weights, sequence) -> float:
    """The loss of a step once more: one token after the other, in float64, straight from the papers.

    Where a paper holds a ratio constant, `trainer` is a pair: (values that ratios see, values that logprobs see).
    """
    frozen, moving = trainer
    total = 0.0
    for t, (advantage, weight) in enumerate(zip(advantages, weights, strict=True)):
        ratio = math.exp(frozen[t] - rollout[t])
        if config.kind == "reinforce":
            term = min(ratio, config.ratio_max) * advantage * moving[t]
        elif config.kind == "cispo":
            term = min(max(ratio, 1 - config.clip_low), 1 + config.clip_high) * advantage * moving[t]
        elif config.kind == "icepop":
            term = ratio * advantage * moving[t] if config.ratio_min <= ratio <= config.ratio_max else 0.0
        elif config.kind == "dppo":
            moved = math.exp(frozen[t]) - math.exp(rollout[t])
            is_outside = moved > config.divergence_max if advantage > 0 else -moved > config.divergence_max
            term = 0.0 if is_outside else min(ratio, config.ratio_max) * advantage * moving[t]
        elif config.kind == "sapo":
            tau = config.tau_positive if advantage > 0 else config.tau_negative
            term = 4 / tau * sigmoid(tau * (math.exp(moving[t] - rollout[t]) - 1)) * advantage
        elif config.kind == "sequence_product":
            same = [i for i in range(len(rollout)) if sequence[i] == sequence[t]]
            product = math.exp(sum(frozen[i] - rollout[i] for i in same))
            is_above = product > config.ratio_max
            weight_of_all = (0.0 if config.masks else config.ratio_max) if is_above else product
            term = weight_of_all * advantage * moving[t]
        elif config.kind == "decoupled_ppo":
            proximal = frozen[t] + (rollout[t] - frozen[t]) / (sequence[t] + 1)  # the lag is the sequence's number
            ratio = math.exp(moving[t] - proximal)
            behaviour = min(math.exp(proximal - rollout[t]), config.ratio_max)
            term = behaviour * surrogate_of(config, ratio, advantage)
        else:
            same = [i for i in range(len(rollout)) if sequence[i] == sequence[t]] if config.kind == "gspo" else [t]
            mean = sum(frozen[i] - rollout[i] for i in same) / len(same)
            ratio = math.exp(mean + moving[t] - frozen[t])  # GSPO-token
            term = surrogate_of(config, ratio, advantage)
        total -= weight * term
    return total


@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: config.kind)
def test_a_second_implementation_in_float64_agrees_on_value_and_gradient(config):
    rng = np.random.default_rng(7)
    num = 40
    sequence = np.sort(rng.integers(0, 6, num))
    rollout, advantages = -rng.random(num) * 2, rng.normal(size=num)
    trainer, weights = rollout + rng.normal(size=num) * 0.4, rng.random(num)
    tensor = torch.tensor(trainer, dtype=torch.float32, requires_grad=True)
    others = [torch.tensor(values, dtype=torch.float32) for values in (rollout, advantages, weights)]
    sums = compute(config, tensor, *others, torch.ones(num, dtype=torch.bool), torch.tensor(sequence))
    sums.loss.backward()
    arguments = [values.detach().double().numpy() for values in (tensor, *others)]
    trainer = arguments[0]

    def value(moving):
        return reference(config, (trainer, moving), *arguments[1:], sequence)

    assert sums.loss.item() == pytest.approx(value(trainer), rel=1e-5, abs=1e-6)
    step = 1e-6
    slopes = [(value(trainer + step * unit) - value(trainer - step * unit)) / (2 * step) for unit in np.eye(num)]
    np.testing.assert_allclose(tensor.grad.numpy(), slopes, rtol=1e-4, atol=1e-6)
    assert 0 < sums.clipped.item() < num


PPO_FAMILY = [PpoLoss, GrpoLoss, DrGrpoLoss, DapoLoss, GspoLoss, DecoupledPpoLoss]


@pytest.mark.parametrize("section", PPO_FAMILY)
@pytest.mark.parametrize(
    ("dual_clip", "value", "gradient", "num_clipped"),
    # Three rollouts of one token. Ratios 2 and 4 with A = -1: 4 is cut at 3. Ratio 4 with A = 1 is cut at 1 + 0.2.
    [(3.0, 2 + 3 - 1.2, [2.0, 0.0, 0.0], 2), (0.0, 2 + 4 - 1.2, [2.0, 4.0, 0.0], 1)],
)
def test_a_large_ratio_with_a_negative_advantage_is_bounded(section, dual_clip, value, gradient, num_clipped):
    trainer = torch.log(torch.tensor([0.8, 0.8, 0.8])).requires_grad_()
    rollout, ones = torch.log(torch.tensor([0.4, 0.2, 0.2])), torch.ones(3)
    config = section(dual_clip=dual_clip, clip_low=0.2, clip_high=0.2)
    columns = (trainer, rollout, torch.tensor([-1.0, -1.0, 1.0]), ones, ones.bool(), torch.arange(3))
    tokens = select(*columns[:4], torch.arange(3), entropy_N=ones, sequence_N=columns[5], num_sequences=3,
                    lags_N=torch.zeros(3).long())  # fmt: skip
    sums = compute_loss(tokens, config)
    sums.loss.backward()
    assert sums.loss.item() == pytest.approx(value, rel=1e-5)
    assert trainer.grad.tolist() == pytest.approx(gradient, rel=1e-5)
    assert sums.clipped.item() == num_clipped


@pytest.mark.parametrize(("dual_clip", "cosine"), [(3.0, 0.9997), (0.0, 0.066)])
def test_one_stale_token_does_not_turn_the_gradient_of_a_step(dual_clip, cosine):
    """2,560 tokens near the policy that sampled them, and one of them with log ratio 7 and A = -1."""
    rng = np.random.default_rng(0)
    advantages = torch.tensor(rng.choice([-1.0, 1.0], 2560), dtype=torch.float32)
    advantages[0] = -1.0
    rollout, ones = torch.full((2560,), -8.0), torch.ones(2560)
    gradients = []
    for log_ratio in (0.0, 7.0):
        trainer = (rollout + torch.tensor(rng.normal(size=2560) * 0.01, dtype=torch.float32)).requires_grad_()
        with torch.no_grad():
            trainer[0] = rollout[0] + log_ratio
        columns = (trainer, rollout, advantages, ones / 2560, ones.bool(), torch.arange(2560) // 400)
        compute(PpoLoss(dual_clip=dual_clip), *columns).loss.backward()
        gradients.append(trainer.grad)
    assert torch.cosine_similarity(*gradients, dim=0).item() == pytest.approx(cosine, abs=1e-3)


@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: config.kind)
def test_garbage_on_masked_tokens_reaches_neither_loss_nor_gradient(config):
    trainer = torch.tensor([math.nan, -math.inf, -0.5], requires_grad=True)
    rollout = torch.tensor([math.nan, -math.inf, -0.5])
    advantages = torch.tensor([math.nan, 3.0, 1.0])
    weights = torch.tensor([math.inf, math.nan, 1.0])
    mask, sequence = torch.tensor([False, False, True]), torch.tensor([0, 1, 1])
    sums = compute(config, trainer, rollout, advantages, weights, mask, sequence)
    sums.loss.backward()
    assert math.isfinite(sums.loss.item())
    assert (sums.ratio.item(), sums.kl.item()) == (1.0, 0.0)
    torch.testing.assert_close(trainer.grad, torch.tensor([0.0, 0.0, -1.0]))


@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: config.kind)
def test_the_loss_of_a_step_is_the_sum_over_its_packs(config):
    trainer, *rest = four_tokens()
    whole = compute(config, trainer, *rest)
    parts = [
        compute(config, trainer[part], *(tensor[part] for tensor in rest), SEQUENCES[part])
        for part in (slice(0, 2), slice(2, 4))  # a sequence is never cut
    ]
    for name in ("loss", "num_tokens", "ratio", "clipped", "kl"):
        added = sum(getattr(part, name).item() for part in parts)
        assert added == pytest.approx(getattr(whole, name).item(), rel=1e-6)


@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: config.kind)
def test_nothing_to_train_is_a_zero_with_a_gradient(config):
    trainer, rollout, advantages, weights, mask = four_tokens()
    sums = compute(config, trainer, rollout, advantages, weights, torch.zeros_like(mask))
    sums.loss.backward()
    assert (sums.loss.item(), sums.num_tokens.item()) == (0.0, 0)
    assert trainer.grad.abs().sum() == 0


@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: config.kind)
def test_ratios_that_no_float_can_hold_stay_finite(config):
    trainer = torch.tensor([-1.0, -500.0, -1.0, -2.0], requires_grad=True)
    rollout = torch.tensor([-500.0, -1.0, -1.0, -2.0])
    ones = torch.ones(4)
    sums = compute(config, trainer, rollout, ones, ones, ones.bool(), torch.arange(4))
    sums.loss.backward()
    assert math.isfinite(sums.loss.item())
    assert sums.ratio.item() == pytest.approx(math.exp(MAX_LOG_RATIO) + 2.0, rel=1e-5)
    assert torch.isfinite(trainer.grad).all()


@pytest.mark.parametrize(
    ("position", "replacement", "message"),
    [
        (4, torch.ones(4), r"trained is \(4,\) torch.float32"),
        (4, torch.ones(4, dtype=torch.bool), r"trained is \(4,\) torch.bool"),
        (1, torch.zeros(3), r"rollout_logprobs is \(3,\)"),
        (2, torch.ones(4, dtype=torch.int64), "advantages is .* torch.int64"),
        (3, torch.ones(4, 1), r"loss_weights is \(4, 1\)"),
        (0, torch.zeros(1, 4), r"trainer_logprobs is \(1, 4\)"),
        (5, torch.zeros(4), r"sequence is \(4,\) torch.float32"),
        (5, torch.zeros(3, dtype=torch.int64), r"sequence is \(3,\)"),
        (6, torch.zeros(3), r"entropy is \(3,\)"),
    ],
)
def test_wrong_shapes_and_types_are_refused(position, replacement, message):
    *tokens, mask = four_tokens()
    arguments = [*tokens, mask.nonzero()[:, 0], SEQUENCES, torch.ones(4)]
    arguments[position] = replacement
    *tensors, sequence, entropy = arguments
    with pytest.raises(ValueError, match=message):
        select(*tensors, entropy_N=entropy, sequence_N=sequence, num_sequences=2, lags_N=SEQUENCES)


@pytest.mark.parametrize("kind", LOSSES)
@pytest.mark.parametrize(("ratio_max", "is_left_out"), [(2.4, True), (2.5, False)])  # the second rollout has 2.449
def test_a_rollout_that_is_too_far_from_its_weights_is_left_out_whole(kind, ratio_max, is_left_out):
    config, *_ = BY_HAND[kind]
    limited = config.model_copy(update={"sequence_ratio_max": ratio_max})
    trainer, rollout, advantages, weights, mask = four_tokens()
    actual = compute(limited, trainer, rollout, advantages, weights, mask)
    if is_left_out:
        weights = weights * torch.tensor([1.0, 1.0, 0.0, 0.0])
    wanted = compute(config, trainer, rollout, advantages, weights, mask)
    assert actual.loss.item() == pytest.approx(wanted.loss.item(), rel=1e-6)
    assert actual.clipped.item() == (2 if is_left_out else wanted.clipped.item())
    (gradient,), (other,) = (torch.autograd.grad(sums.loss, [trainer]) for sums in (actual, wanted))
    torch.testing.assert_close(gradient, other)


@pytest.mark.parametrize("kind", LOSSES)
def test_the_divergence_from_a_reference_is_a_penalty_by_the_weight_of_each_token(kind):
    config, value, gradient, _ = BY_HAND[kind]
    config = config.model_copy(update={"kl_coefficient": 0.1})
    trainer, *rest, mask = four_tokens()
    rest.append(mask.nonzero()[:, 0])
    reference = torch.log(torch.tensor([math.nan, 0.5, 0.3, 0.4]))  # ratios 1, 1/2 and 1/2 to the trainer's
    others = {"entropy_N": torch.ones(4), "sequence_N": SEQUENCES, "num_sequences": 2, "lags_N": SEQUENCES}
    sums = compute_loss(select(trainer, *rest, ref_logprobs_N=reference, **others), config)
    half = 0.5 + math.log(2) - 1
    assert sums.kl_ref.item() == pytest.approx(2 * half, rel=1e-5)
    assert sums.loss.item() == pytest.approx(value + 0.1 * (0.25 + 0.125) * half, rel=1e-5)
    sums.loss.backward()
    # d (r - log r - 1) / d trainer logprob = 1 - r, r = reference / trainer
    wanted = torch.tensor(gradient, dtype=torch.float32) + torch.tensor([0.0, 0.0, 0.1 * 0.25 / 2, 0.1 * 0.125 / 2])
    torch.testing.assert_close(trainer.grad, wanted)
    with pytest.raises(ValueError, match="needs the log-probabilities of a reference"):
        compute_loss(select(trainer, *rest, **others), config)


@pytest.mark.parametrize("kind", LOSSES)
def test_the_entropy_of_trained_tokens_is_a_bonus_by_their_weight(kind):
    config, value, gradient, _ = BY_HAND[kind]
    config = config.model_copy(update={"entropy_bonus": 0.1})
    trainer, *rest = four_tokens()
    entropy = torch.tensor([math.nan, 2.0, 1.0, 4.0], requires_grad=True)
    sums = compute(config, trainer, *rest, entropy=entropy)
    assert sums.loss.item() == pytest.approx(value - 0.1 * (0.5 * 2 + 0.25 * 1 + 0.125 * 4), rel=1e-5)
    sums.loss.backward()
    torch.testing.assert_close(entropy.grad, torch.tensor([0.0, -0.05, -0.025, -0.0125]))
    torch.testing.assert_close(trainer.grad, torch.tensor(gradient, dtype=torch.float32))


@pytest.mark.parametrize("kind", LOSSES)
def test_every_loss_credits_each_token_with_its_own_advantage(kind):
    # On policy, one rollout of two tokens with A = (0.1, 0.9), weight 1/4: the gradient is -0.25 * A at each token.
    config = type(BY_HAND[kind][0])(advantage="value")
    logprobs, ones = torch.tensor([-1.0, -2.0]), torch.ones(2)
    for advantage in ("value", "standardized"):
        trainer = logprobs.clone().requires_grad_()
        studied = config.model_copy(update={"advantage": advantage})
        columns = (trainer, logprobs, torch.tensor([0.1, 0.9]), 0.25 * ones, ones.bool(), torch.zeros(2).long())
        compute(studied, *columns).loss.backward()
        assert trainer.grad.tolist() == pytest.approx([-0.025, -0.225])


def test_the_default_range_of_gspo_is_wider_than_the_noise_of_bfloat16():
    # Engine and trainer of equal weights differ by 0.01 to 0.03 nats per token in bfloat16 (docs/off-policy.md).
    rng, ones = np.random.default_rng(0), torch.ones(8000)
    shares = {}
    for num in (10, 100, 1000):
        rollout = torch.tensor(-rng.random(8000) * 2, dtype=torch.float32)
        trainer = rollout + torch.tensor(0.03 * rng.normal(size=8000), dtype=torch.float32)
        advantages = torch.tensor(rng.choice([-1.0, 1.0], 8000 // num), dtype=torch.float32).repeat_interleave(num)
        columns = (trainer, rollout, advantages, ones / 8000, ones.bool(), torch.arange(8000) // num)
        for name, config in {"default": GspoLoss(), "paper": GspoLoss(clip_low=3e-4, clip_high=4e-4)}.items():
            shares[name, num] = compute(config, *columns).clipped.item() / 8000
    assert max(share for (name, _), share in shares.items() if name == "default") < 0.05
    assert min(share for (name, _), share in shares.items() if name == "paper") > 0.2


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
    log_ratios = sequence_log_ratios(logs, torch.tensor([0, 2, 0, 2]), num_sequences=3)
    torch.testing.assert_close(log_ratios.exp(), torch.tensor([10.0, 1.0, 21.0], dtype=torch.float64))
