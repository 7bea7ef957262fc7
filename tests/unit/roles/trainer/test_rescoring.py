"""Re-scoring in the trainer: the right weights for each token, and a training that does not depend on re-scoring."""

import logging
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from pipelinerl_core.errors import ParityError
from pipelinerl_core.ledger.groups import ActorKey
from pipelinerl_core.models.resolve import build_config
from pipelinerl_core.roles.trainer.rescoring import KeptVersions, Rescoring, prefix
from pipelinerl_core.types import Origin, WeightSpan
from tests.models import published_by, state_of
from tests.unit.training.learner_case import config as learner_config
from tests.unit.training.learner_case import learner_of, rows_of, tiny_model
from tests.unit.training.test_lora import adapted_learner, lora_config


def with_keys(config, **keys):
    return build_config({**config.model_dump(), "trainer": {**config.trainer.model_dump(), **keys}})


def stamped(learner, rows, version, *, actor="actor-0"):
    """The rows as if `learner` had sampled them now, and named `version`."""
    rollouts = [row.rollout for row in rows]
    scores = learner.logprobs_of(rollouts)
    return [
        replace(
            row,
            rollout=replace(
                rollout,
                rollout_logprobs=score,
                weight_spans=(WeightSpan(version, 0, rollout.num_tokens),),
                actor=actor,
            ),
        )
        for row, rollout, score in zip(rows, rollouts, scores, strict=True)
    ]


def trained(learner, config, *, steps=3):
    """Train with re-scoring; the state after the steps, and what was found."""
    rescoring, results = Rescoring(learner.rescorer, config), []
    rescoring.published(0, published_by(learner))
    sampled = stamped(learner, rows_of(config, 1), 0)
    for step in range(1, steps + 1):
        rows = [
            replace(row, rollout=sampled_row.rollout)
            for row, sampled_row in zip(rows_of(config, 1), sampled, strict=True)
        ]
        results.append(rescoring.rescore(learner.version, rows, {}, {}))
        learner.step(rows)
        rescoring.published(step, published_by(learner))
    return state_of(learner)[0], results


FAST = learner_config(lr=1e-2, warmup_steps=0)
LEARNERS = {
    "all weights": lambda: (learner_of(tiny_model(), FAST), FAST),
    "adapters": lambda: (adapted_learner(lora_config()), lora_config()),
    "bfloat16 adapters": lambda: (adapted_learner(lora_config(), dtype=torch.bfloat16), lora_config()),
}


@pytest.mark.parametrize("kind", LEARNERS)
def test_training_has_the_same_bits_with_and_without_rescoring(kind):
    states = []
    for share in (0.0, 1.0):
        learner, config = LEARNERS[kind]()
        torch.manual_seed(0)
        state, results = trained(learner, with_keys(config, rescore_share=share))
        states.append(state)
        assert [bool(result.actors) for result in results] == [share > 0] * 3
    assert states[0].keys() == states[1].keys()
    for name, tensor in states[0].items():
        assert torch.equal(tensor, states[1][name]), name


@pytest.mark.parametrize("kind", ["all weights", "adapters"])
def test_old_tokens_agree_with_their_own_version_and_not_with_the_current_version(kind):
    learner, config = LEARNERS[kind]()
    _, results = trained(learner, with_keys(config, rescore_share=1.0))
    for number, result in enumerate(results):
        (actor,) = result.actors.values()
        assert actor.tokens > 32
        assert actor.mismatch < 1e-5
        assert (actor.staleness or 0.0) > (1e-4 if number else -1)
        assert actor.alarm == ""
        assert result.metrics["rescored/gone_tokens"] == 0


def test_tokens_of_a_gone_version_are_counted():
    learner, config = LEARNERS["all weights"]()
    _, results = trained(learner, with_keys(config, rescore_share=1.0, rescore_bytes=1))
    assert results[0].metrics["rescored/gone_tokens"] == 0
    assert results[1].metrics["rescored/gone_tokens"] > 0
    assert results[1].metrics["rescored/tokens"] == 0


def stale_run(keys, actors, *, steps=5, healed_at=99):
    """Actors named True sample from version 0 under every stamp, until the step `healed_at`."""
    learner, config = LEARNERS["all weights"]()
    config = with_keys(config, rescore_share=1.0, **keys)
    first, _ = LEARNERS["all weights"]()
    rescoring = Rescoring(learner.rescorer, config)
    rescoring.published(0, published_by(learner))
    samples = {f"{name}/0": SimpleNamespace(at=1.0) for name in actors}
    results = []
    for step in range(1, steps + 1):
        rows = rows_of(config, 1)
        parts = np.array_split(np.arange(len(rows)), len(actors))
        sampled = [
            row
            for (name, is_stale), part in zip(actors.items(), parts, strict=True)
            for row in stamped(
                first if is_stale and step < healed_at else learner,
                [rows[i] for i in part],
                learner.version,
                actor=name,
            )
        ]
        results.append(rescoring.rescore(learner.version, sampled, {}, samples))
        learner.step(sampled)
        rescoring.published(step, published_by(learner))
    return rescoring, results


def test_a_stale_actor_is_named_and_expelled(caplog):
    rescoring, results = stale_run({"rescore_alarm": "expel"}, {"actor-0": False, "actor-1": True})
    assert results[-1].alarms.keys() == {"actor-1/0"}
    assert rescoring.expelled == {ActorKey("actor-1", 0)}
    lines = [record.getMessage() for record in caplog.records if record.levelno == logging.ERROR]
    assert len(lines) == 1
    assert lines[0].startswith("actor-1/0 does not sample from the versions that its tokens name: ")


def test_all_stale_actors_are_named_and_by_default_only_told():
    rescoring, results = stale_run({}, {"actor-0": True, "actor-1": True})
    assert results[-1].alarms.keys() == {"actor-0/0", "actor-1/0"}
    assert results[-1].metrics["rescored/alarms"] == 2
    assert rescoring.expelled == set()


def test_one_skipped_swap_is_told_and_expels_no_actor():
    """Tokens of version 1 came from version 0; those of the later versions are right."""
    rescoring, results = stale_run({"rescore_alarm": "expel"}, {"actor-0": True}, steps=7, healed_at=3)
    told = [bool(result.alarms) for result in results]
    assert told[:2] == [False, True]
    assert not any(told[-2:])
    assert rescoring.expelled == set()


def test_the_healthy_mean_is_a_metric_and_survives_a_restart():
    learner, config = LEARNERS["all weights"]()
    config = with_keys(config, rescore_share=1.0)
    rows = stamped(learner, rows_of(config, 1, num_groups=60), 0)
    restarted = []
    for metrics in ({}, {"rescored/healthy": 2e-5}):
        rescoring = Rescoring(learner.rescorer, config)
        rescoring.adopt(metrics)
        rescoring.published(0, published_by(learner))
        restarted.append(rescoring.rescore(0, rows, {}, {}).metrics["rescored/healthy"])
    assert 0 <= restarted[0] < 1e-6
    assert restarted[1] == pytest.approx(2e-5, rel=0.02)


def test_a_mean_that_rounding_does_not_explain_is_told(caplog):
    learner, config = LEARNERS["all weights"]()
    rollouts = [row.rollout for row in stamped(learner, rows_of(config, 1, num_groups=60), 0)]
    scores = [rollout.rollout_logprobs + np.float32(8e-5) for rollout in rollouts]
    rescoring = Rescoring(learner.rescorer, config)
    rescoring.measure(rollouts, [rollout.rollout_logprobs for rollout in rollouts[:2]] + scores[2:])
    assert [record.levelno for record in caplog.records] == [logging.WARNING]
    assert "more than the rounding of model.dtype=float32" in caplog.text


def test_the_last_actor_is_not_expelled_but_ends_the_run():
    with pytest.raises(ParityError, match=r"every actor is expelled.*actor-0/0"):
        stale_run({"rescore_alarm": "expel"}, {"actor-0": True})


def test_tokens_after_a_swap_are_not_in_the_mismatch():
    learner, config = LEARNERS["all weights"]()
    rescoring = Rescoring(learner.rescorer, with_keys(config, rescore_share=1.0))
    rescoring.published(0, published_by(learner))
    rows = stamped(learner, rows_of(config, 1), 0)
    rescoring.rescore(0, rows, {}, {})
    learner.step(rows)
    rescoring.published(1, published_by(learner))
    mixed = [
        replace(
            row,
            rollout=replace(
                row.rollout,
                rollout_logprobs=row.rollout.rollout_logprobs - np.where(np.arange(row.rollout.num_tokens) < 2, 0, 9),
                weight_spans=(WeightSpan(0, 0, 2), WeightSpan(1, 2, row.rollout.num_tokens)),
                origins=(Origin("actor-9", 4, 1),),
            ),
        )
        for row in rows
        if row.rollout.num_tokens > 2
    ]
    result = rescoring.rescore(1, mixed, {(row.rollout.group_id, row.rollout.attempt): 7 for row in mixed}, {})
    assert result.actors.keys() == {"actor-0/7", "actor-9/4"}
    assert result.actors["actor-0/7"].mismatch < 1e-5
    assert result.actors["actor-0/7"].stale_kv > 5
    assert result.actors["actor-9/4"].stale_kv_tokens == 0
    assert not result.alarms


def test_a_share_of_two_rollouts_compares_four_in_every_second_step():
    learner, config = LEARNERS["all weights"]()
    share = 2.05 / len(rows_of(config, 1))
    _, results = trained(learner, with_keys(config, rescore_share=share), steps=6)
    assert [bool(result.metrics["rescored/tokens"]) for result in results] == [False, True] * 3


def test_a_sharded_learner_says_so_in_one_line(caplog):
    rescoring = Rescoring(None, learner_config())
    assert rescoring.rescore(0, rows_of(learner_config()), {}, {}).metrics == {}
    assert len(caplog.records) == 1
    assert "no rollout is scored again" in caplog.records[0].getMessage()


def test_versions_are_kept_within_bytes_until_rollouts_have_moved_on():
    weights = {"w": torch.zeros(10)}
    kept = KeptVersions(100)
    for version in range(4):
        kept.add(version, weights)
        kept.keep(0)
    assert [version in kept for version in range(4)] == [True, True, False, False]
    assert kept.num_bytes == 80
    kept.keep(1)
    assert [version in kept for version in range(4)] == [False, True, False, True]


def test_a_prefix_has_the_first_tokens():
    row = next(row.rollout for row in rows_of(learner_config()) if row.rollout.num_tokens > 1)
    rollout = replace(row, weight_spans=(WeightSpan(0, 0, 1), WeightSpan(1, 1, row.num_tokens)))
    short = prefix(rollout, 1)
    assert (short.num_tokens, short.weight_spans) == (1, (WeightSpan(0, 0, 1),))
    assert prefix(rollout, rollout.num_tokens) is rollout


@pytest.mark.parametrize("kind", ["all weights", "adapters"])
def test_the_divergence_from_the_start_is_that_of_the_published_weights_and_changes_no_bit(kind):
    learner, config = LEARNERS[kind]()
    rescoring, first = Rescoring(learner.rescorer, with_keys(config, rescore_share=1.0)), published_by(learner)
    rows = rows_of(config, 1)
    rollouts = [row.rollout for row in rows if row.rollout.loss_mask.any()]
    rescoring.published(0, first)
    before = learner.logprobs_of(rollouts)
    assert rescoring.divergence(lambda: first, rows) == {"policy/kl_start": 0.0}
    for step in (1, 2):
        learner.step(rows)
        rescoring.published(step, published_by(learner))
    state, after = state_of(learner)[0], learner.logprobs_of(rollouts)
    gaps = [
        (then - now).astype(float)[rollout.loss_mask]
        for then, now, rollout in zip(before, after, rollouts, strict=True)
    ]
    gaps = np.concatenate(gaps)
    divergence = rescoring.divergence(lambda: first, rows)["policy/kl_start"]
    assert divergence == pytest.approx((np.exp(gaps) - gaps - 1).mean(), rel=1e-4)
    assert divergence > 1e-6
    for name, tensor in state_of(learner)[0].items():
        assert torch.equal(tensor, state[name]), name
    for logprobs, other in zip(after, learner.logprobs_of(rollouts), strict=True):
        assert np.array_equal(logprobs, other)


def test_without_a_rescorer_or_a_token_there_is_no_divergence():
    assert Rescoring(None, FAST).divergence(dict, rows_of(FAST, 1)) == {}
    learner, config = LEARNERS["all weights"]()
    assert Rescoring(learner.rescorer, with_keys(config, rescore_share=1.0)).divergence(dict, []) == {}
