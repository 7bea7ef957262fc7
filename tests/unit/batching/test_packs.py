"""Assembling a step, cutting it into packs, and laying a pack out in tensors."""

from dataclasses import asdict, replace

import numpy as np
import pytest

from pipelinerl_core.batching.assemble import assemble_rows
from pipelinerl_core.batching.collate import PackBatcher, collate
from pipelinerl_core.batching.pack import pack
from pipelinerl_core.config.losses import ReinforceLoss
from pipelinerl_core.config.run import RunConfig
from pipelinerl_core.config.schedules import PipelineSchedule
from pipelinerl_core.data.codec import decode_batch, decode_rollouts, encode_batch, encode_rollouts
from pipelinerl_core.models.resolve import build_config
from pipelinerl_core.types import TrainingRow, TurnSpan, WeightSpan
from tests.rollout_rows import build_rollout


def rollout(group_id, index, *, reward=0.0, num_tokens=4, spans=None, **changes):
    rng = np.random.default_rng((group_id, index))
    built = build_rollout(rng, group_id=group_id, rollout_index=index, reward=reward, num_tokens=num_tokens)
    return replace(built, **({"weight_spans": spans} if spans else {}), **changes)


def config(max_lag=4, normalization="token"):
    return RunConfig(schedule=PipelineSchedule(max_lag=max_lag), loss=ReinforceLoss(normalization=normalization))


def identity(rows):
    return [(row.rollout.group_id, row.rollout.rollout_index, row.advantage, row.loss_weight) for row in rows]


def test_error_rollouts_are_no_row_no_baseline_and_no_denominator():
    rewards = [1.0, 0.0, 0.0, None]
    group = [rollout(0, index, reward=reward) for index, reward in enumerate(rewards)]
    step = assemble_rows(1, [group], config())
    assert [row.rollout.rollout_index for row in step.rows] == [0, 1, 2]
    assert [row.advantage for row in step.rows] == pytest.approx([1.0, -0.5, -0.5])
    assert [row.loss_weight for row in step.rows] == pytest.approx([1 / 12] * 3)
    assert (step.num_errors, step.num_error_tokens, step.num_sampled, step.num_trained) == (1, 4, 12, 12)


def test_rows_do_not_depend_on_the_order_of_groups_and_rollouts():
    groups = [[rollout(g, i, reward=float(i == g), num_tokens=3 + g + i) for i in range(3)] for g in range(3)]
    wanted = identity(assemble_rows(1, groups, config()).rows)
    shuffled = [list(reversed(group)) for group in (groups[2], groups[0], groups[1])]
    assert identity(assemble_rows(1, shuffled, config()).rows) == wanted
    assert [row[:2] for row in wanted] == [(g, i) for g in range(3) for i in range(3)]


@pytest.mark.parametrize("advantage", ["leave_one_out", "turn"])
def test_the_rows_of_a_step_are_the_rows_of_its_batch_file(advantage):
    """The trainer writes the batch file beside the step: what it trains must be what a replay reads."""
    turns = (TurnSpan(0, 1), TurnSpan(2, 4))
    spans = (WeightSpan(0, 0, 3), WeightSpan(2, 3, 4))
    rewards = [0.1, 0.7, None, 0.3]  # their mean and the weights are rounded in float32
    made = [rollout(0, index, reward=reward, spans=spans, turn_spans=turns) for index, reward in enumerate(rewards)]
    group = decode_rollouts(encode_rollouts("run", made))
    run_config = build_config({"loss": {"advantage": advantage}, "schedule": {"max_lag": 1}})
    rows = assemble_rows(3, [group], run_config).rows
    decoded = decode_batch(encode_batch("run", 3, rows))
    assert [row.loss_mask.tolist() for row in rows] == [[False, False, False, True]] * 3
    assert bool(rows[0].turn_advantages) == (advantage == "turn")
    np.testing.assert_equal([asdict(row) for row in decoded], [asdict(row) for row in rows])


def test_the_lag_rule_masks_tokens_and_changes_no_weight():
    spans = (WeightSpan(0, 0, 1), WeightSpan(2, 1, 4))
    groups = [[rollout(0, 0, reward=1.0, spans=spans), rollout(0, 1, spans=(WeightSpan(2, 0, 4),))]]
    step = assemble_rows(4, groups, config(max_lag=2))  # trains version 3: lags 3, 1 and 1
    assert step.rows[0].loss_mask.tolist() == [False, True, True, True]
    assert step.rows[1].loss_mask.all()
    assert (step.num_masked_stale, step.num_trained) == (1, 7)
    assert [row.loss_weight for row in step.rows] == pytest.approx([1 / 8, 1 / 8])
    assert assemble_rows(4, groups, config(max_lag=3)).num_masked_stale == 0


def test_tokens_that_were_not_sampled_are_neither_trained_nor_counted():
    mask = np.array([True, False, False, True])
    step = assemble_rows(1, [[rollout(0, 0, reward=1.0, loss_mask=mask), rollout(0, 1)]], config())
    assert step.rows[0].loss_mask.tolist() == mask.tolist()
    assert step.num_sampled == 6
    assert step.rows[0].loss_weight == pytest.approx(1 / 6)


def test_normalization_comes_from_the_configuration():
    groups = [[rollout(0, 0, num_tokens=2), rollout(0, 1, num_tokens=6)]]
    weights = [row.loss_weight for row in assemble_rows(1, groups, config(normalization="sequence")).rows]
    assert weights == pytest.approx([1 / 4, 1 / 12])
    weights = [row.loss_weight for row in assemble_rows(1, groups, config(normalization="constant")).rows]
    assert weights == pytest.approx([1 / 128] * 2)  # 2 rollouts, rollouts.max_tokens = 64


def test_advantage_and_length_penalty_come_from_the_configuration():
    group = [rollout(0, 0, reward=1.0, num_tokens=2), rollout(0, 1, reward=1.0, num_tokens=6), rollout(0, 2)]
    for kind, wanted in (("group_mean", [0.5, 0.0, -0.5]), ("leave_one_out", [0.75, 0.0, -0.75])):
        values = {"rollouts": {"max_tokens": 8}, "reward": {"overlong_tokens": 4}, "loss": {"advantage": kind}}
        rows = assemble_rows(1, [group], build_config(values)).rows  # rewards 1, 1 - 2/4 and 0
        assert [row.advantage for row in rows] == pytest.approx(wanted)


def test_packs_go_from_long_to_short_within_the_budget():
    assert pack([3, 9, 4, 4], 8) == [[1], [2, 3], [0]]
    assert pack([2, 2, 2], 4) == [[0, 1], [2]]
    assert pack([], 8) == []
    assert pack([4, 2, 4, 4, 2], 8) == [[0, 2], [3, 1, 4]]


def test_filled_packs_take_the_longest_that_still_fit():
    assert pack([7, 6, 3, 2], 10) == [[0], [1, 2], [3]]
    assert pack([7, 6, 3, 2], 10, "filled") == [[0, 2], [1, 3]]
    assert pack([6, 6, 2, 2], 10, "filled") == [[0, 2, 3], [1]]  # ties by position
    assert pack([90, 20, 10], 100, "filled") == [[0], [1, 2]]  # nine tenths are enough


@pytest.mark.parametrize("multiple", [4, 8, 16])
def test_packs_of_a_long_tail_are_full(multiple):
    """Eight rollouts of 64 prompts whose lengths spread as those of reasoning do; the budget is some mean lengths."""
    lengths = np.random.default_rng(multiple).lognormal(np.log(200), 0.75, 512).astype(int).clip(1, 4000).tolist()
    pack_tokens = multiple * sum(lengths) // len(lengths)
    packs = pack(lengths, pack_tokens, "filled")
    assert sum(lengths) / sum(max(pack_tokens, sum(lengths[i] for i in members)) for members in packs) >= 0.95


@pytest.mark.parametrize("packing", ["sorted", "filled"])
def test_every_sequence_is_packed_once_and_only_a_lone_sequence_may_exceed_the_budget(packing):
    rng = np.random.default_rng(0)
    lengths = rng.integers(1, 70, 200).tolist()
    packs = pack(lengths, 64, packing)
    assert sorted(index for members in packs for index in members) == list(range(200))
    assert all(len(members) == 1 or sum(lengths[index] for index in members) <= 64 for members in packs)


def row(prompt, completion, mask=None, **values):
    num_tokens = len(completion)
    built = rollout(0, 0, num_tokens=num_tokens)
    mask = np.ones(num_tokens, bool) if mask is None else np.array(mask)
    filled = replace(
        built,
        prompt_token_ids=np.array(prompt, np.int32),
        completion_token_ids=np.array(completion, np.int32),
        rollout_logprobs=np.array(completion, np.float32) / -10,
        loss_mask=mask,
    )
    return TrainingRow(rollout=filled, **{"loss_mask": mask, "advantage": 1.0, "loss_weight": 0.5, **values})


def test_a_pack_lines_up_every_sampled_token_with_its_preceding_token():
    batch = collate([row([9], [3, 4, 5], advantage=2.0), row([7, 8], [1, 2])], [1, 0])
    assert batch.input_ids_T.tolist() == [7, 8, 1, 9, 3, 4]
    assert batch.position_ids_T.tolist() == [0, 1, 2, 0, 1, 2]
    assert batch.layout.bands[0].slots.tolist() == [0, 1, 2, 3, 4, 5]
    assert batch.source_N.tolist() == [1, 2, 3, 4, 5]
    assert batch.target_ids_N.tolist() == [1, 2, 3, 4, 5]
    assert batch.sequence_N.tolist() == [0, 0, 1, 1, 1]
    assert batch.row_S.tolist() == [1, 0]
    assert batch.advantages_N.tolist() == [1.0, 1.0, 2.0, 2.0, 2.0]
    np.testing.assert_allclose(batch.rollout_logprobs_N, [-0.1, -0.2, -0.3, -0.4, -0.5])


def with_spans(made, *spans):
    return replace(made, rollout=replace(made.rollout, weight_spans=tuple(WeightSpan(*span) for span in spans)))


def test_a_pack_holds_the_version_that_sampled_each_token():
    mixed = with_spans(row([6], [1, 2, 3, 4], mask=[True, False, True, True]), (3, 0, 3), (7, 3, 4))
    batch = collate([row([5], [9]), mixed], [1, 0])
    assert batch.versions_N.tolist() == [3, 3, 7, 0]
    with pytest.raises(ValueError, match="must cover"):
        collate([with_spans(row([6], [1, 2]), (3, 0, 1))], [0])


def test_a_pack_keeps_unsampled_tokens_as_input_only():
    sampled, live = [True, False, True, True], np.array([False, False, True, True])
    batch = collate([row([6, 6, 6], [1, 2, 3, 4], mask=sampled, loss_mask=live), row([5], [9])], [0, 1])
    assert batch.input_ids_T.tolist() == [6, 6, 6, 1, 2, 3, 5]
    assert batch.layout.bands[0].slots.tolist() == [0, 1, 2, 3, 4, 5, 6]
    assert batch.layout.lengths == (6, 1)
    assert batch.source_N.tolist() == [2, 4, 5, 6]
    assert batch.target_ids_N.tolist() == [1, 3, 4, 9]
    assert batch.trained_M.tolist() == [1, 2, 3]
    assert batch.sequence_N.tolist() == [0, 0, 0, 1]


def test_rows_without_a_sampled_token_are_not_computed():
    rows = [row([5], [9]), row([5, 5], [1, 2], mask=[False, False])]
    batches = PackBatcher(64).rows(rows)
    assert [batch.row_S.tolist() for batch in batches] == [[0]]


def test_scoring_takes_every_completion_token_and_trains_none():
    chosen = row([5, 5], [1, 2], mask=[False, True]).rollout
    (batch,) = PackBatcher(64).rollouts([chosen])
    assert batch.target_ids_N.tolist() == [1, 2]
    assert batch.loss_weights_N.tolist() == [0.0, 0.0]


def test_a_row_without_a_prompt_is_refused():
    with pytest.raises(ValueError, match="rollout 0 of group 0 has no prompt tokens"):
        collate([row([], [1, 2])], [0])
