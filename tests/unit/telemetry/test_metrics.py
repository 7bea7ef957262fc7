"""Step metrics against numbers worked out by hand, and their declarations."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from infra.reference import metrics_page
from pipelinerl_core.errors import StoreError
from pipelinerl_core.report.live_view import run_status
from pipelinerl_core.run.follow import Forwarder, RunFollower
from pipelinerl_core.run.records import commit_key
from pipelinerl_core.telemetry import measures
from pipelinerl_core.telemetry.metrics import METRICS, Metric, short_key, step_metrics
from pipelinerl_core.telemetry.role_metrics import runs_exposition
from pipelinerl_core.types import NO_STEP, RewardComponent, TurnSpan, WeightSpan
from tests.synthetic_run import (
    Shape,
    make_commit,
    make_rollout,
    put_record,
    training_row,
    write_run,
)

LEARNED = {
    "importance/ess": 0.9,
    "train/grad_norm": 0.5,
    "train/trained_tokens": 13.0,
}


def metrics_of(rows, learned=LEARNED):
    return step_metrics(
        learned, rows, step=5, masked_stale=3, num_errors=1, reserve_wait_seconds=0.2,
        samples=30, tokens=900, seconds=12.5,
    )  # fmt: skip


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


def test_rewards_lengths_and_versions_are_over_rollouts():
    metrics = metrics_of(three_rows())
    assert metrics["reward/mean"] == pytest.approx(0.5)
    assert metrics["reward/std"] == pytest.approx((0.5 / 3) ** 0.5)
    assert metrics["rollout/length_mean"] == pytest.approx(16 / 3)
    assert metrics["rollout/length_p995"] == pytest.approx(5 + 0.99)  # between 5 and 6, at 0.995 * 2 = 1.99
    assert metrics["rollouts/multi_version_fraction"] == pytest.approx(2 / 3)
    assert metrics["rollouts/max_versions"] == 3
    assert metrics["rollouts/error_fraction"] == pytest.approx(1 / 4)


def test_each_component_of_the_reward_has_its_mean_over_the_rollouts_with_that_component():
    parts = [(RewardComponent("right", 1.0), RewardComponent("short", 0.5)), (RewardComponent("right", 0.0),), ()]
    rows = [replace(row, rollout=replace(row.rollout, reward_components=part))
            for row, part in zip(three_rows(), parts, strict=True)]  # fmt: skip
    metrics = metrics_of(rows)
    assert (metrics["reward/right"], metrics["reward/short"]) == (0.5, 0.5)
    assert metrics.keys() - metrics_of(three_rows()).keys() == {"reward/right", "reward/short"}


def test_turns_and_given_tokens_of_episodes():
    first, *others = three_rows()
    mask = np.array([True, True, False, False, False, True])
    episode = replace(first.rollout, turn_spans=(TurnSpan(0, 2), TurnSpan(5, 6)), loss_mask=mask)
    metrics = metrics_of([replace(first, rollout=episode), *others])
    assert metrics["environment/turns"] == pytest.approx((2 + 1 + 1) / 3)
    assert metrics["environment/given_fraction"] == pytest.approx(3 / 16)
    assert "environment/turns" not in metrics_of(three_rows())


def test_every_metric_of_a_step_is_declared():
    metrics = metrics_of(three_rows())
    assert set(metrics) <= {metric.name for metric in METRICS.values() if metric.group == "trainer"}
    assert LEARNED.items() <= metrics.items()


def test_values_that_are_not_numbers_are_left_out():
    assert "train/grad_norm" not in metrics_of(three_rows(), LEARNED | {"train/grad_norm": float("nan")})


def test_names_for_prometheus_end_with_the_unit_and_short_keys_leave_out_well_known_groups():
    names = ("importance/ess", "lag/mean", "train/tokens", "wait/engine_seconds")
    assert [METRICS[name].prometheus for name in names] == [
        "pipelinerl_importance_ess", "pipelinerl_lag_mean_steps", "pipelinerl_train_tokens", "",
    ]  # fmt: skip
    assert [short_key(name) for name in ("importance/ess", "reward/mean")] == ["ess", "reward_mean"]


def test_a_metric_that_is_declared_and_computed_is_in_mlflow_prometheus_and_the_docs(store, monkeypatch):
    name = "policy/temperature"
    monkeypatch.setitem(METRICS, name, Metric(name, "nats", "mean over sampled tokens", "An example."))
    write_run(store, Shape(steps=2))
    commit = make_commit(3).model_copy(update={"metrics": metrics_of([], {name: 0.75})})
    put_record(store, commit_key(3, commit.epoch), commit)
    logged = {}
    tracker = SimpleNamespace(log=lambda step, metrics, **known: logged.update(metrics), logged=NO_STEP, room=10)
    Forwarder(RunFollower(store), tracker).refresh()
    assert logged[name] == 0.75
    status = run_status(store)
    assert status["metrics"][name] == 0.75
    assert (
        f'pipelinerl_policy_temperature_nats{{run="{status["run_id"]}"}} 0.75' in runs_exposition([status]).decode()
    )
    assert "| `policy/temperature` | nats | mean over" in metrics_page()


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
