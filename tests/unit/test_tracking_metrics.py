"""Step metrics against numbers worked out by hand, and their declarations."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from pipelinerl_core.errors import StoreError
from pipelinerl_core.testing.synthetic_run import make_rollout, training_row
from pipelinerl_core.tracking import measures
from pipelinerl_core.tracking.metrics import METRICS, as_markdown, step_metrics
from pipelinerl_core.types import StepStats, WeightSpan

STATS = StepStats(
    step=5,
    loss=-0.25,
    grad_norm=0.5,
    learning_rate=1e-4,
    ess=0.9,
    ess_sequence=0.8,
    ratio_mean=1.01,
    ratio_clipped_fraction=0.02,
    kl=0.003,
    entropy=0.7,
    num_tokens=40,
    num_trained_tokens=13,
    num_packs=2,
    pack_fill=0.75,
    compute_seconds=0.4,
)


def metrics_of(rows, stats=STATS, **changes):
    values = dict(
        masked_stale=3, num_errors=1, reserve_wait_seconds=0.2, samples=30, tokens=900, seconds=12.5, **changes
    )
    return step_metrics(stats, rows, **values)


def three_rows():
    """Step 5: versions 1 to 4 are at lags 3 to 0. Version 1 is masked: 3 tokens of the third row, which trains one
    token at lag 2 and one at lag 0."""
    return [
        training_row(make_rollout(spans=[(4, 0, 6)], reward=1.0), oldest_version=2),  # 6 at lag 0
        training_row(make_rollout(spans=[(2, 0, 2), (3, 2, 5)], reward=0.0), oldest_version=2),  # 2 at 2, 3 at 1
        training_row(make_rollout(spans=[(1, 0, 3), (2, 3, 4), (4, 4, 5)], reward=0.5), oldest_version=2),
    ]


def test_lag_counts_trained_tokens_only():
    metrics = metrics_of(three_rows())
    # 7 tokens at lag 0, 3 at lag 1, 3 at lag 2; the masked ones at lag 3 do not count.
    assert metrics["lag/mean"] == pytest.approx((7 * 0 + 3 * 1 + 3 * 2) / 13)
    assert metrics["lag/p99"] == 2
    assert metrics["lag/max"] == 2
    assert metrics["train/trained_tokens"] == 13


def test_rewards_lengths_and_versions_are_over_rollouts():
    metrics = metrics_of(three_rows())
    assert metrics["reward/mean"] == pytest.approx(0.5)
    assert metrics["reward/std"] == pytest.approx((0.5 / 3) ** 0.5)
    assert metrics["rollout/length_mean"] == pytest.approx(16 / 3)
    assert metrics["rollout/length_p995"] == pytest.approx(5 + 0.99)  # between 5 and 6, at 0.995 * 2 = 1.99
    assert metrics["rollouts/multi_version_fraction"] == pytest.approx(2 / 3)
    assert metrics["rollouts/max_versions"] == 3
    assert metrics["rollouts/error_fraction"] == pytest.approx(1 / 4)


def test_every_metric_of_a_step_is_declared():
    assert set(metrics_of(three_rows())) <= set(METRICS)
    missing = {spec.key for spec in METRICS.values() if spec.writer == "trainer"} - set(metrics_of(three_rows()))
    # Known at the commit, and to the process; the others only where there are such tokens, and a reference.
    differences = {f"{cause}/{how}" for cause in ("mismatch", "stale_kv", "staleness") for how in ("abs", "kl")}
    assert missing - differences == {
        "time/commit_seconds",
        "time/cpu_seconds",
        "weights/published_seconds",
        "weights/bytes",
        "policy/kl_ref",
        "policy/value_error",
    }
    assert metrics_of(three_rows(), stats=replace(STATS, kl_ref=0.5))["policy/kl_ref"] == 0.5
    values = {key.replace("/", "_"): index + 0.5 for index, key in enumerate(sorted(differences))}
    found = metrics_of(three_rows(), stats=replace(STATS, **values))
    assert {key.replace("/", "_"): found[key] for key in differences} == values


def test_what_is_not_a_number_is_left_out():
    rows = three_rows()
    assert "train/grad_norm" not in step_metrics(
        replace(STATS, grad_norm=float("nan")),
        rows,
        masked_stale=0,
        num_errors=0,
        reserve_wait_seconds=0.0,
        samples=1,
        tokens=1,
        seconds=1.0,
    )


def test_two_spans_of_one_version_are_one_version():
    spans = [WeightSpan(3, 0, 2), WeightSpan(3, 2, 4)]
    assert measures.num_versions(spans) == 1
    assert measures.tokens_by_version(spans, np.array([True, False, True, True])) == {3: 3}


def test_a_token_from_the_future_is_refused():
    with pytest.raises(StoreError, match="step 3 holds tokens of weight version 3"):
        measures.lag_counts(3, [{3: 1}])


def test_quantile_of_counts_is_the_smallest_value_that_covers_the_share():
    counts_L = np.array([99, 0, 1])
    assert measures.quantile_of_counts(counts_L, 0.99) == 0
    assert measures.quantile_of_counts(counts_L, 0.991) == 2
    assert measures.quantile_of_counts(np.array([], dtype=np.int64), 0.5) == 0


def test_docs_list_the_declared_metrics():
    assert Path("docs/metrics.md").read_text(encoding="utf-8") == as_markdown(), (
        "run python -m pipelinerl_core.tracking.metrics > docs/metrics.md"
    )
