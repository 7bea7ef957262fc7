"""The learning rate scaled by the effective sample size: the factor, its reference, restarts and replays."""

import math

import numpy as np
import pytest
import torch

from pipelinerl_core.models.resolve import build_config
from pipelinerl_core.training.learning_rate import LearningRate
from tests.models import published_by, state_of
from tests.unit.training.learner_case import config, learner_of, rows_of, tiny_model


def rate_of(**learner):
    return LearningRate(build_config({"learner": {"lr": 0.01, "warmup_steps": 0, **learner}}))


def figures(ess_sequence, num_tokens=10.0):
    return {"importance/ess_sequence": ess_sequence, "importance/sequence_tokens": num_tokens}


def test_the_factor_is_the_root_of_ess_over_the_reference_and_never_above_1():
    rate = rate_of(ess_scaling=True)
    # Step 1 measures 0.8; then sqrt(0.2 / 0.8) = 1/2, and 0.9 / 0.8 is cut at 1.
    assert [rate.at(step, figures(ess)) for step, ess in enumerate((0.8, 0.2, 0.9), 1)] == [
        {"train/learning_rate": pytest.approx(0.01 * factor), "control/lr_factor": pytest.approx(factor)}
        for factor in (1.0, 0.5, 1.0)
    ]
    given = rate_of(ess_scaling=True, ess_reference=0.32)
    assert given.at(1, figures(0.08))["control/lr_factor"] == pytest.approx(0.5)
    assert rate_of().at(2, figures(0.1)) == {"train/learning_rate": 0.01}


def test_the_reference_is_part_of_a_checkpoint_also_without_the_control():
    first = rate_of()
    assert first.state() == {}
    first.at(1, figures(0.64))
    later = rate_of(ess_scaling=True)
    later.load_state({"version": 1, **first.state()})
    assert later.at(2, figures(0.16))["control/lr_factor"] == pytest.approx(0.5)


def test_the_reference_grows_with_the_length_of_the_rollouts():
    rate = rate_of(ess_scaling=True)
    rate.at(1, figures(0.9, 100.0))
    # 0.9 per 100 tokens is 0.9 ** 3 = 0.729 at 300: half of it lowers the rate, the noise alone does not.
    assert rate.at(2, figures(0.729, 300.0))["control/lr_factor"] == pytest.approx(1.0)
    assert rate.at(3, figures(0.729 / 4, 300.0))["control/lr_factor"] == pytest.approx(0.5)
    given = rate_of(ess_scaling=True, ess_reference=0.8)
    given.at(1, figures(0.9, 100.0))
    assert given.at(2, figures(0.2, 300.0))["control/lr_factor"] == pytest.approx(0.5)


def test_noise_of_bfloat16_on_long_rollouts_does_not_lower_the_rate():
    # Lognormal lengths, and step 1 has the groups that ended first, a third as long.
    generator = np.random.default_rng(0)

    def on_policy(mean_tokens):
        lengths = mean_tokens * generator.lognormal(-0.18, 0.6, 512)
        weights = np.exp(generator.normal(-lengths * 0.02**2 / 2, np.sqrt(lengths) * 0.02))
        return figures(weights.sum() ** 2 / (512 * (weights**2).sum()), lengths.mean())

    rate = rate_of(ess_scaling=True)
    rate.at(1, on_policy(300.0))
    assert np.mean([rate.at(step, on_policy(880.0))["control/lr_factor"] for step in range(2, 40)]) > 0.96


def started(**learner):
    return learner_of(tiny_model(), config(lr=1e-2, warmup_steps=0, **learner))


def test_a_step_moves_the_weights_by_the_scaled_rate():
    run_config = config(lr=1e-2, warmup_steps=0, ess_scaling=True, ess_reference=1.0)
    rows = rows_of(run_config)
    scaled, free = learner_of(tiny_model(), run_config), started()
    before = published_by(free)
    metrics, plain = scaled.step(rows), free.step(rows)
    factor = math.sqrt(metrics["importance/ess_sequence"])
    assert 0 < factor < 0.9
    assert metrics["control/lr_factor"] == pytest.approx(factor)
    assert metrics["train/learning_rate"] == pytest.approx(factor * plain["train/learning_rate"])
    assert "control/lr_factor" not in plain
    for name, tensor in before.items():
        moved, wanted = published_by(scaled)[name] - tensor, factor * (published_by(free)[name] - tensor)
        torch.testing.assert_close(moved, wanted, rtol=1e-4, atol=1e-7)


def test_steps_after_a_checkpoint_have_the_same_bits():
    first = started(ess_scaling=True)
    data = [rows_of(config(), seed=seed) for seed in (4, 5, 6, 2)]  # the first has the largest ess
    all_metrics = [first.step(rows) for rows in data[:2]]
    state = state_of(first)
    names = {"ess_reference": "importance/ess_sequence", "ess_tokens": "importance/sequence_tokens"}
    assert state[1] == {"version": 2, **{key: all_metrics[0][name] for key, name in names.items()}}
    all_metrics += [first.step(rows) for rows in data[2:]]
    factors = [metrics["control/lr_factor"] for metrics in all_metrics]
    assert factors[0] == 1.0
    assert min(factors) < 0.95
    again = started(ess_scaling=True)
    again.load_state([state[0]], state[1])
    repeated = [again.step(rows) for rows in data[2:]]
    for first_metrics, other in zip(all_metrics[2:], repeated, strict=True):
        for name in ("train/loss", "train/learning_rate", "control/lr_factor"):
            assert first_metrics[name] == other[name]
    for name, tensor in published_by(first).items():
        assert torch.equal(tensor, published_by(again)[name])


def test_a_reference_of_1_on_data_on_policy_changes_no_bit():
    free = started()
    rows = rows_of(config())
    logprobs = free.logprobs_of([row.rollout for row in rows])
    for row, own in zip(rows, logprobs, strict=True):
        row.rollout.rollout_logprobs[:] = own
    measured = started(ess_scaling=True)
    assert measured.step(rows)["control/lr_factor"] == 1.0
    free.step(rows)
    for name, tensor in published_by(free).items():
        assert torch.equal(tensor, published_by(measured)[name])
