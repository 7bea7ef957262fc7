"""Differences of log-probabilities by cause: numbers by hand, a second count, packs that add up, refusals."""

import math

import numpy as np
import pytest
import torch

from pipelinerl_core.algo.mismatch import CAUSES, NUM_DIFFERENCE_SUMS, difference_metrics, difference_sums

# rollout:                     0     0    1     1    1    2
LAGS = torch.tensor([0, 0, 2, 1, 0, 3])
SEQUENCES = torch.tensor([0, 0, 1, 1, 1, 2])
LOG_RATIOS = torch.tensor([0.1, -0.3, 0.5, -0.7, 0.2, -1.0])
ALL = torch.ones(6, dtype=torch.bool)


def differences(log_ratios=LOG_RATIOS, lags=LAGS, sequence=SEQUENCES, mask=ALL):
    return difference_sums(log_ratios, lags, sequence, mask.nonzero()[:, 0], num_sequences=int(sequence.max()) + 1)


def test_each_token_counts_for_one_cause():
    assert difference_metrics(differences().tolist()) == {
        "mismatch/abs": pytest.approx((0.1 + 0.3) / 2),
        "mismatch/kl": pytest.approx((-0.1 + 0.3) / 2),
        "stale_kv/abs": pytest.approx(0.2),
        "stale_kv/kl": pytest.approx(-0.2),
        "staleness/abs": pytest.approx((0.5 + 0.7 + 1.0) / 3),
        "staleness/kl": pytest.approx((-0.5 + 0.7 + 1.0) / 3),
    }


def test_a_cause_without_tokens_has_no_value():
    stats = difference_metrics(differences(LOG_RATIOS[:2], LAGS[:2], SEQUENCES[:2], ALL[:2]).tolist())
    assert list(stats) == ["mismatch/abs", "mismatch/kl"]
    assert difference_metrics([0.0] * NUM_DIFFERENCE_SUMS) == {}


def test_a_masked_token_is_in_no_sum_but_was_there_before_the_others():
    # Without its tokens of lag 2 and 1 the second rollout still has keys and values of older weights.
    mask = torch.tensor([True, True, False, False, True, False])
    garbage = torch.tensor([0.1, -0.3, math.nan, -math.inf, 0.2, math.nan])
    stats = difference_metrics(differences(garbage, mask=mask).tolist())
    assert stats["stale_kv/abs"] == pytest.approx(0.2)
    assert stats["mismatch/abs"] == pytest.approx(0.2)
    assert "staleness/abs" not in stats


def random_columns(num=400, seed=5):
    rng = np.random.default_rng(seed)
    sequence = np.sort(rng.integers(0, 40, num))
    lags = rng.integers(0, 4, num) * (sequence % 3 != 0)
    return rng.normal(size=num).astype(np.float32), lags, sequence, rng.random(num) < 0.8


def test_an_independent_count_in_float64_agrees():
    log_ratios, lags, sequence, mask = random_columns()
    kinds = {name: [] for name in CAUSES}
    for index in np.flatnonzero(mask):
        is_late = any(lags[other] > 0 for other in np.flatnonzero(sequence == sequence[index]))
        name = "staleness" if lags[index] > 0 else "stale_kv" if is_late else "mismatch"
        kinds[name].append(float(log_ratios[index]))
    columns = (torch.from_numpy(column) for column in (log_ratios, lags, sequence, mask))
    stats = difference_metrics(differences(*columns).tolist())
    for name, values in kinds.items():
        assert len(values) > 20
        assert stats[f"{name}/abs"] == pytest.approx(sum(map(abs, values)) / len(values), rel=1e-12)
        assert stats[f"{name}/kl"] == pytest.approx(-sum(values) / len(values), rel=1e-12)


def test_packs_and_ranks_add_up():
    columns = [torch.from_numpy(column) for column in random_columns()]
    whole = differences(*columns).tolist()
    packs = []
    parts = [columns[2] < 15, columns[2] >= 15]  # a sequence is in one pack
    for part in parts:
        *kept, mask = (column[part] for column in columns)
        packs.append(difference_sums(*kept, mask.nonzero()[:, 0], num_sequences=40))
    assert sum(packs).tolist() == pytest.approx(whole)
    ranks = [differences(*(column[part] for column in columns)).tolist() for part in parts]
    assert [sum(column) for column in zip(*ranks, strict=True)] == pytest.approx(whole)
    # All kinds together are every trained token.
    assert sum(whole[2::3]) == columns[3].sum().item()
    assert sum(whole[1::3]) == pytest.approx(-columns[0][columns[3]].double().sum().item())


def test_no_graph_is_kept_for_the_backward_pass():
    assert not differences(LOG_RATIOS.clone().requires_grad_()).requires_grad
