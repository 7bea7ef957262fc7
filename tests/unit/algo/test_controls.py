"""Controls of the objective by what is measured: values and gradients worked out by hand."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from pipelinerl_core.algo.losses import LOSSES, compute_loss, select
from pipelinerl_core.batching.assemble import assemble_rows
from pipelinerl_core.batching.collate import PackBatcher
from pipelinerl_core.config.losses import ReinforceLoss
from pipelinerl_core.errors import ConfigError
from pipelinerl_core.models.resolve import build_config
from pipelinerl_core.telemetry.metrics import step_metrics
from pipelinerl_core.types import FinishReason
from tests.rollout_rows import build_rollout

# Three rollouts of two tokens each. Ratios (1/4, 1), (1/4, 1) and (4, 1): mean log ratios -log 2, -log 2 and log 2.
TRAINER = [0.1, 0.5, 0.1, 0.5, 0.8, 0.5]
ROLLOUT = [0.4, 0.5, 0.4, 0.5, 0.2, 0.5]
ADVANTAGES = [-1.0, -1.0, 2.0, 2.0, -1.0, -1.0]
WEIGHTS = [0.5, 0.5, 0.25, 0.25, 0.125, 0.125]
SEQUENCES = [0, 0, 1, 1, 2, 2]


def compute(config, advantages=ADVANTAGES, ref=None):
    trainer = torch.log(torch.tensor(TRAINER)).requires_grad_()
    columns = (torch.log(torch.tensor(ROLLOUT)), torch.tensor(advantages), torch.tensor(WEIGHTS), torch.arange(6))
    tokens = select(
        trainer, *columns, entropy_N=torch.ones(6), sequence_N=torch.tensor(SEQUENCES), num_sequences=3,
        lags_N=torch.ones(6, dtype=torch.int64), ref_logprobs_N=None if ref is None else torch.log(torch.tensor(ref)),
    )  # fmt: skip
    sums = compute_loss(tokens, config)
    sums.loss.backward()
    return sums, trainer.grad.tolist()


# d loss / d logprob = -weight * ratio * A
FREE = [0.5 * 0.25, 0.5, -0.25 * 0.25 * 2, -0.25 * 2, 0.125 * 4, 0.125]


@pytest.mark.parametrize(("bound", "is_masked"), [(0.69, True), (0.70, False), (0.0, False)])  # log 2 = 0.693
def test_a_negative_rollout_that_the_policy_has_left_is_masked(bound, is_masked):
    sums, gradient = compute(ReinforceLoss(negative_kl_max=bound))
    # The second rollout is as far, with a positive advantage; the probability of the third has risen.
    assert gradient == pytest.approx([0.0, 0.0, *FREE[2:]] if is_masked else FREE)
    first = 0.5 * (0.25 * math.log(0.1) + math.log(0.5))
    others = -0.25 * 2 * (0.25 * math.log(0.1) + math.log(0.5)) + 0.125 * (4 * math.log(0.8) + math.log(0.5))
    assert sums.loss.item() == pytest.approx(others if is_masked else first + others, rel=1e-5)
    assert sums.clipped.item() == (2 if is_masked else 0)
    assert sums.num_tokens.item() == 6
    assert (sums.negative_masked is None) == (bound == 0)
    if bound:
        assert sums.negative_masked.item() == (2 if is_masked else 0)


@pytest.mark.parametrize("kind", LOSSES)
def test_every_loss_masks_only_tokens_of_negative_advantage(kind):
    advantages = [-1.0, 1.0, *ADVANTAGES[2:]]  # of two turns
    values = {"kind": kind, "advantage": "turn", "entropy_bonus": 0.1}
    free, _ = compute(build_config({"loss": values}).loss, advantages)
    masked, gradient = compute(build_config({"loss": {**values, "negative_kl_max": 0.5}}).loss, advantages)
    assert masked.negative_masked.item() == 1
    assert gradient[0] == 0.0
    own, _ = compute(
        build_config({"loss": {**values, "entropy_bonus": 0.0, "negative_kl_max": 0.5}}).loss, advantages
    )
    # The entropy bonus keeps all weights: the mask is of the policy's term alone.
    assert masked.loss.item() == pytest.approx(own.loss.item() - 0.1 * sum(WEIGHTS), rel=1e-5)
    assert free.num_tokens.item() == masked.num_tokens.item()


def test_the_mask_and_the_limit_of_a_rollouts_ratio_are_counted_once():
    sums, gradient = compute(ReinforceLoss(negative_kl_max=0.5, sequence_ratio_max=1.5))
    assert gradient == pytest.approx([0.0] * 6)  # the ratios of all rollouts are 2 or 1/2
    assert (sums.clipped.item(), sums.negative_masked.item()) == (6, 0)


def test_the_weighted_divergence_has_the_gradient_of_the_divergence():
    ref = [0.2, 0.5, 0.1, 0.25, 0.4, 0.5]
    config = ReinforceLoss(kl_coefficient=0.1, kl_weighted=True)
    sums, gradient = compute(config, [0.0] * 6, ref)
    # x = ref / trainer is 2, 1, 1, 1/2, 1/2, 1, the ratios 1/4, 1, 1/4, 1, 4, 1
    double, half = 2 - math.log(2) - 1, 0.5 + math.log(2) - 1
    terms = [0.25 * double, 0.0, 0.0, half, 4 * half, 0.0]
    assert sums.kl_ref.item() == pytest.approx(sum(terms), rel=1e-5)
    assert sums.loss.item() == pytest.approx(
        0.1 * sum(w * term for w, term in zip(WEIGHTS, terms, strict=True)), rel=1e-5
    )
    # 0.1 * weight * ratio * log(trainer / ref)
    slopes = [-0.25 * math.log(2), 0.0, 0.0, math.log(2), 4 * math.log(2), 0.0]
    assert gradient == pytest.approx([0.1 * w * slope for w, slope in zip(WEIGHTS, slopes, strict=True)], abs=1e-7)
    assert sums.kl_corrected.item() == 3
    assert compute(config.model_copy(update={"kl_weighted": False}), ref=ref)[0].kl_corrected is None


def test_the_weighted_divergence_is_unbiased_on_data_of_another_policy():
    """The mean of its gradient over all tokens, weighted by the sampling policy, is the exact gradient of KL."""
    logits = torch.tensor([0.3, -0.4, 1.1, 0.0], dtype=torch.float64, requires_grad=True)
    sampling = torch.softmax(torch.tensor([1.0, 0.2, -0.5, 0.4]), 0)
    ref = torch.log_softmax(torch.tensor([-0.3, 0.8, 0.1, 0.5]), 0)
    own = torch.log_softmax(logits, 0)
    (exact,) = torch.autograd.grad((own.exp() * (own - ref.double())).sum(), [logits], retain_graph=True)
    gradients = []
    for is_weighted in (True, False):
        logprobs = torch.log_softmax(logits.float(), 0)
        numbers = torch.arange(4)
        tokens = select(
            logprobs, sampling.log(), torch.zeros(4), sampling, numbers, entropy_N=torch.zeros(4),
            sequence_N=numbers, num_sequences=4, lags_N=numbers, ref_logprobs_N=ref,
        )  # fmt: skip
        loss = compute_loss(tokens, ReinforceLoss(kl_coefficient=1.0, kl_weighted=is_weighted)).loss
        gradients += torch.autograd.grad(loss, [logits], retain_graph=True)
    torch.testing.assert_close(gradients[0], exact, rtol=1e-5, atol=1e-6)
    assert (gradients[1] - exact).norm() > 0.3 * exact.norm()


def truncated_group():
    rng = np.random.default_rng(0)
    group = [build_rollout(rng, rollout_index=i, num_tokens=2 + i, reward=float(i == 1)) for i in range(3)]
    group[2] = replace(group[2], finish_reason=FinishReason.LENGTH)
    return group


def test_a_truncated_completion_has_no_loss_and_counts_in_the_baseline():
    config = build_config({"loss": {"overlong_filtering": True}})
    step = assemble_rows(1, [truncated_group()], config)
    # 2 + 3 + 4 sampled tokens; rewards 0, 1, 0 with the mean of the other two as the baseline
    assert [row.loss_weight for row in step.rows] == pytest.approx([1 / 9, 1 / 9, 0.0])
    assert [row.advantage for row in step.rows] == pytest.approx([-0.5, 1.0, -0.5])
    assert (step.num_trained, step.overlong_fraction) == (9, pytest.approx(4 / 9))
    free = assemble_rows(1, [truncated_group()], build_config({}))
    assert [row.loss_weight for row in free.rows] == pytest.approx([1 / 9] * 3)
    assert free.overlong_fraction is None
    figures = {"step": 1, "masked_stale": 0, "num_errors": 0, "reserve_wait_seconds": 0.0}
    totals = {"samples": 3, "tokens": 9, "seconds": 1.0}
    metrics = step_metrics({}, step.rows, **figures, **totals, overlong_fraction=step.overlong_fraction)
    assert metrics["control/overlong_fraction"] == pytest.approx(4 / 9)
    assert "control/overlong_fraction" not in step_metrics({}, free.rows, **figures, **totals)


def test_a_truncated_completion_needs_no_backward_pass():
    rows = assemble_rows(1, [truncated_group()], build_config({"loss": {"overlong_filtering": True}})).rows
    packs = list(PackBatcher(1000, skips_backward=True).rows(rows))
    assert [(pack.row_S.tolist(), pack.needs_backward) for pack in packs] == [([1, 0], True), ([2], False)]


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"loss": {"kl_weighted": True}}, "loss.kl_weighted=true is not used with loss.kl_coefficient=0. Set"),
        ({"learner": {"ess_reference": 0.9}}, "learner.ess_reference=0.9 is not used with learner.ess_scaling=false"),
        ({"loss": {"negative_kl_max": -1}}, "loss.negative_kl_max=-1: input should be greater than or equal to 0"),
    ],
)
def test_a_control_that_would_do_nothing_is_refused(values, message):
    with pytest.raises(ConfigError, match="^" + message.replace(".", r"\.")):
        build_config(values)
