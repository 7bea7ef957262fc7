"""Advantages, weights and masks of recorded rows with another configuration; every expected value is by hand."""

import numpy as np
import pytest

from pipelinerl_core.batching.assemble import assemble_rows, reassemble_rows
from pipelinerl_core.config import load_config
from pipelinerl_core.data.codec import decode_batch, encode_batch, from_segment, to_segment
from pipelinerl_core.testing.rollout_rows import build_rollout

REWARDS = {7: (1.0, 0.0, 0.0, 1.0), 3: (0.5, 0.0, 0.0)}
LENGTHS = {7: (2, 4, 6, 8), 3: (5, 5, 10)}
STEP = 4


def groups():
    """Two groups, in another order than they are trained; the fourth rollout of group 3 has no reward."""
    found = []
    for group_id, rewards in REWARDS.items():
        rollouts = [
            build_rollout(
                np.random.default_rng((group_id, index)), group_id=group_id, rollout_index=index, group_size=4,
                num_tokens=LENGTHS[group_id][index], first_version=STEP - 1, reward=reward,
            )
            for index, reward in enumerate(rewards)
        ]  # fmt: skip
        found.append(rollouts)
    failed = build_rollout(
        np.random.default_rng(9), group_id=3, rollout_index=3, group_size=4, num_tokens=3, first_version=STEP - 1,
        reward=None,
    )  # fmt: skip
    found[1].append(failed)
    return found


def config(*overrides):
    return load_config("quickstart", overrides)


def recorded(settings):
    """The rows of a step as they are read back from its batch file."""
    rows = assemble_rows(STEP, groups(), settings).rows
    (batch,) = from_segment(to_segment([encode_batch("run", STEP, rows)]))
    return decode_batch(batch)


def again(*overrides):
    return reassemble_rows(STEP, recorded(config()), config(*overrides))


def advantages(rows, group_id):
    return [row.advantage for row in rows if row.rollout.group_id == group_id]


@pytest.mark.parametrize("kind", ["reinforce", "grpo", "dr_grpo", "gspo"])
def test_the_recorded_settings_give_the_recorded_rows_to_the_last_bit(kind):
    settings = config(f"loss.kind={kind}")
    rows = recorded(settings)
    found = reassemble_rows(STEP, rows, settings)
    assert [row.rollout for row in found] == [row.rollout for row in rows]
    for ours, theirs in zip(found, rows, strict=True):
        assert (ours.advantage, ours.loss_weight) == (theirs.advantage, theirs.loss_weight)
        assert np.array_equal(ours.loss_mask, theirs.loss_mask)


def test_advantages_are_computed_again_from_the_recorded_rewards():
    assert advantages(again(), 7) == pytest.approx([2 / 3, -2 / 3, -2 / 3, 2 / 3])
    assert advantages(again("loss.advantage=group_mean"), 7) == [0.5, -0.5, -0.5, 0.5]
    assert advantages(again("loss.advantage=group_mean"), 3) == pytest.approx([1 / 3, -1 / 6, -1 / 6])
    # Standard deviation of the sample: sqrt(1/3).
    assert advantages(again("loss.kind=grpo"), 7)[0] == pytest.approx(0.5 / (3**-0.5 + 1e-4))


def test_weights_are_computed_again_from_the_recorded_lengths():
    weights = {one: [row.loss_weight for row in again(f"loss.normalization={one}")] for one in ("token", "sequence")}
    assert weights["token"] == pytest.approx([1 / 40] * 7)
    assert weights["sequence"] == pytest.approx([1 / (7 * length) for length in (5, 5, 10, 2, 4, 6, 8)])
