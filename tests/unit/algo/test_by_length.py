"""Lag and refused tokens by length: numbers by hand, packs that add up, and a step with a narrow bound."""

import math

import pytest
import torch

from pipelinerl_core.algo.by_length import NUM_SUMS, length_metrics, length_sums
from pipelinerl_core.config.losses import GspoLoss
from tests.unit.training.learner_case import config, learner_of, rows_of, tiny_model

# Three rollouts of 2, 4 and 8 tokens with lags 0, 1 and 3; the lag rule masks two tokens of the last.
SEQUENCES = torch.tensor([0] * 2 + [1] * 4 + [2] * 8)
LAGS = torch.tensor([0] * 2 + [1] * 4 + [3] * 8)
TRAINED = torch.arange(12)
CLIPPED = torch.tensor([False] * 5 + [True] * 2 + [False] * 5)
"""Token 5 is of the second rollout, token 6 of the third."""


def test_the_halves_have_the_lags_and_the_refused_tokens_of_their_rollouts():
    sums = length_sums(LAGS, SEQUENCES, TRAINED, CLIPPED, num_sequences=3)
    assert length_metrics(sums.tolist()) == {
        "lag/short_mean": pytest.approx(0.0),
        "train/short_refused_fraction": pytest.approx(0.0),
        # The middle rollout is in the longer half: 12 tokens, of which 2 masked and 2 clipped.
        "lag/long_mean": pytest.approx((4 * 1 + 8 * 3) / 12),
        "train/long_refused_fraction": pytest.approx(4 / 12),
    }


def test_packs_add_up_to_the_step():
    whole = length_sums(LAGS, SEQUENCES, TRAINED, CLIPPED, num_sequences=3)
    first = length_sums(LAGS[:6], SEQUENCES[:6], TRAINED[:6], CLIPPED[:6], num_sequences=2)
    second = length_sums(LAGS[6:], SEQUENCES[6:] - 2, TRAINED[:6], CLIPPED[6:], num_sequences=1)
    assert torch.equal(first + second, whole)


def test_rollouts_of_one_length_have_no_halves():
    assert length_metrics([0.0] * NUM_SUMS) == {}
    sums = length_sums(LAGS[:4], torch.tensor([0, 0, 1, 1]), TRAINED[:4], CLIPPED[:4], num_sequences=2)
    assert length_metrics(sums.tolist()) == {}


def test_a_length_beyond_the_classes_is_in_the_last():
    num = 1 << 21
    zeros = torch.zeros(num, dtype=torch.int64)
    sums = length_sums(zeros, zeros, zeros[:0], CLIPPED[:0], num_sequences=1)
    assert sums[-4:].tolist() == [1.0, num, 0.0, num]


def test_a_step_counts_the_tokens_that_its_loss_refuses():
    run_config = config(loss=GspoLoss(clip_low=1e-9, clip_high=1e-9), pack_tokens=40)
    rows = rows_of(run_config)
    metrics = learner_of(tiny_model(), run_config).step(rows)
    lengths = sorted(int(row.rollout.loss_mask.sum()) for row in rows)
    assert lengths[0] < lengths[-1]
    shares = [metrics[f"train/{half}_refused_fraction"] for half in ("short", "long")]
    trained, sampled = sum(int(row.loss_mask.sum()) for row in rows), sum(lengths)
    refused = sampled - trained + trained * metrics["importance/ratio_clipped_fraction"]
    assert min(shares) <= refused / sampled <= max(shares)
    assert all(math.isfinite(metrics[f"lag/{half}_mean"]) for half in ("short", "long"))
