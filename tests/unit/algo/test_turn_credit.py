"""loss.advantage=turn: from rows of a segment over the batch file to the gradient, with numbers by hand."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from pipelinerl_core.algo.losses import LOSSES
from pipelinerl_core.algo.losses.surrogate import surrogate
from pipelinerl_core.batching.assemble import assemble_rows
from pipelinerl_core.batching.collate import PackBatcher, collate
from pipelinerl_core.config.losses import ReinforceLoss
from pipelinerl_core.data.checks import split_groups
from pipelinerl_core.data.codec import (
    decode_batch,
    decode_rollouts,
    encode_batch,
    encode_rollouts,
    from_segment,
    to_segment,
)
from pipelinerl_core.errors import ConfigError
from pipelinerl_core.models.resolve import load_config
from pipelinerl_core.roles.hub.recovery import summarize
from pipelinerl_core.training.policy import PolicyOutput, pack_loss
from pipelinerl_core.types import TurnSpan
from tests.builders import group_named
from tests.models import published_by
from tests.rollout_rows import build_rollout
from tests.unit.training.learner_case import config, learner_of, tiny_model

TURN = ReinforceLoss(advantage="turn")
# Completions of 3, 5 and 7 tokens of 1, 2 and 3 turns; tokens 2 and 3 of the second one and 1 and 4 of the third came
# from the environment.
TURNS = [(), ((0, 2), (4, 5)), ((0, 1), (2, 4), (5, 7))]
REWARDS = [1.0, 0.0, 1.0]
SAMPLED = [[0, 1, 2], [0, 1, 4], [0, 2, 3, 5, 6]]
# Turn 0: all three, baselines 1/2, 1 and 1/2. Turn 1: the second and the third alone. Turn 2: nobody to compare with.
ADVANTAGES = [(0.5,), (-1.0, -1.0), (0.5, 1.0, 0.0)]
BY_TOKEN = [0.5, 0.5, 0.5, -1.0, -1.0, -1.0, 0.5, 1.0, 1.0, 0.0, 0.0]


def turned(index, spans, reward, num_tokens, **values):
    """A rollout with a prompt of one token and these turns."""
    made = build_rollout(
        np.random.default_rng(index), rollout_index=index, num_tokens=num_tokens, prompt_tokens=1, reward=reward,
        **values,
    )  # fmt: skip
    mask = np.ones(num_tokens, np.bool_)
    if spans:
        mask = np.isin(np.arange(num_tokens), [token for span in spans for token in range(*span)])
    logprobs = np.where(mask, made.rollout_logprobs, 0).astype(np.float32)
    turns = tuple(TurnSpan(*span) for span in spans)
    return replace(made, loss_mask=mask, rollout_logprobs=logprobs, turn_spans=turns)


def group():
    """The three rollouts as they come out of a segment."""
    made = [turned(*columns) for columns in zip(range(3), TURNS, REWARDS, (3, 5, 7), strict=True)]
    (rows,) = from_segment(to_segment([encode_rollouts("run", made)]))
    split_groups(rows)
    return decode_rollouts(rows)


def rows_of(run_config, rollouts=None):
    return assemble_rows(1, [group() if rollouts is None else rollouts], run_config).rows


def recorded(rows):
    """The rows as a trainer and a replay read them from the batch file."""
    (batch,) = from_segment(to_segment([encode_batch("run", 1, rows)]))
    return decode_batch(batch)


def test_each_token_has_the_advantage_of_its_turn():
    rows = rows_of(config(loss=TURN))
    assert [row.turn_advantages for row in rows] == [(), *ADVANTAGES[1:]]
    assert [row.advantage for row in rows] == [0.5, -1.0, 0.5]
    assert [np.flatnonzero(row.loss_mask).tolist() for row in rows] == SAMPLED
    batch = collate(recorded(rows), [0, 1, 2])
    assert batch.advantages_N.tolist() == BY_TOKEN
    assert batch.source_N.tolist() == [0, 1, 2, 3, 4, 7, 8, 10, 11, 13, 14]
    assert batch.sequence_N.tolist() == [0, 0, 0, 1, 1, 1, 2, 2, 2, 2, 2]
    assert batch.trained_M.tolist() == list(range(11))
    assert batch.loss_weights_N.tolist() == pytest.approx([1 / 11] * 11)


def test_rewards_of_turns_reach_the_advantages_through_segment_and_batch_file():
    made = [turned(*columns) for columns in zip(range(3), TURNS, [1.0, 0.0, 2.0], (3, 5, 7), strict=True)]
    made[1] = replace(made[1], turn_rewards=(1.0, -1.0))
    made[2] = replace(made[2], turn_rewards=(0.5, 0.5, 0.0))
    (stored,) = from_segment(to_segment([encode_rollouts("run", made)]))
    split_groups(stored)
    ref = group_named(made[0].group_id, num_rollouts=3, num_tokens=15)
    assert summarize([ref], stored)[0].has_turn_rewards
    assert not summarize([ref], encode_rollouts("run", group()))[0].has_turn_rewards
    rollouts = decode_rollouts(stored)
    assert [rollout.turn_rewards for rollout in rollouts] == [(), (1.0, -1.0), (0.5, 0.5, 0.0)]
    rows = rows_of(config(loss=TURN), rollouts)
    # returns 1; 0, -1; 2, 1.5, 1. Turn 0: 1 - 1, 0 - 3/2, 2 - 1/2; turn 1: -1 - 1.5 and 1.5 + 1; turn 2: alone
    assert [row.turn_advantages for row in rows] == [(), (-1.5, -2.5), (1.5, 2.5, 0.0)]
    assert [row.advantage for row in rows] == [0.0, -1.5, 1.5]
    assert [row.rollout.turn_rewards for row in recorded(rows)] == [rollout.turn_rewards for rollout in rollouts]
    whole = rows_of(config(), rollouts)
    assert [row.advantage for row in whole] == [0.0, -1.5, 1.5]
    assert not any(row.turn_advantages for row in whole)


def test_an_old_turn_keeps_its_advantage_and_is_not_trained():
    rollouts = group()
    old = turned(2, TURNS[2], 1.0, 7, num_versions=7)  # a version per token
    assert [span.version for span in old.weight_spans] == list(range(7))
    step = assemble_rows(8, [[*rollouts[:2], old]], load_config("quickstart", ["loss.advantage=turn"]))
    max_lag = load_config("quickstart", []).schedule.max_lag
    live = [token for token in SAMPLED[2] if 7 - token <= max_lag]
    assert step.rows[2].turn_advantages == (0.5, 1.0, 0.0)
    assert np.flatnonzero(step.rows[2].loss_mask).tolist() == live
    assert 0 < len(live) < 5


def test_an_unscored_rollout_counts_in_no_baseline():
    *two, third = group()
    extra = replace(turned(3, TURNS[2], None, 7), rollout_index=3)
    wanted = [row.turn_advantages for row in rows_of(config(loss=TURN))]
    assert [row.turn_advantages for row in rows_of(config(loss=TURN), [*two, third, extra])] == wanted


@pytest.mark.parametrize("pack_tokens", [2048, 16])
def test_recorded_rows_give_the_same_packs_and_losses_to_the_last_bit(pack_tokens):
    run_config = config(pack_tokens, loss=TURN)
    rewards = [0.1, 0.7, 0.3]  # baselines that float32 rounds
    made = [replace(rollout, reward=reward) for rollout, reward in zip(group(), rewards, strict=True)]
    rows = assemble_rows(1, [made, [replace(rollout, group_id=1) for rollout in made]], run_config).rows
    packs, again = (list(PackBatcher(pack_tokens).rows(step_rows)) for step_rows in (rows, recorded(rows)))
    assert len(packs) == (1 if pack_tokens == 2048 else 2)
    for left, right in zip(packs, again, strict=True):
        for name in left.__dataclass_fields__:
            if name not in ("layout", "needs_backward"):
                assert torch.equal(getattr(left, name), getattr(right, name)), name
    learners = [learner_of(tiny_model(), run_config) for _ in range(2)]
    for _ in range(3):
        stats = [learner.step(step_rows) for learner, step_rows in zip(learners, (rows, recorded(rows)), strict=True)]
        assert stats[0] == {**stats[1], "time/compute_seconds": stats[0]["time/compute_seconds"]}
    for name, weight in published_by(learners[0]).items():
        assert torch.equal(weight, published_by(learners[1])[name]), name


def test_tokens_between_turns_have_no_gradient():
    """Of the default loss, at the last hidden states of the tokens that would predict them."""
    run_config = config(loss=TURN)
    learner = learner_of(tiny_model(), run_config)
    batch = collate(recorded(rows_of(run_config)), [0, 1, 2])
    kept = []
    hook = learner._model.base_model.norm.register_forward_hook(lambda _module, _inputs, output: kept.append(output))
    output = learner._policy(batch)
    hook.remove()
    (hidden,) = kept
    hidden.retain_grad()
    pack_loss(batch, output, TURN, version=0).loss.backward()
    sizes_T = hidden.grad[0].abs().amax(-1).tolist()
    # Sequences begin at 0, 3 and 8: tokens 2 and 3 of the second, 1 and 4 of the third; its last turn has A = 0.
    assert [place for place, size in enumerate(sizes_T) if size == 0.0] == [5, 6, 9, 12, 13, 14]


def gradients(batch, loss, **columns):
    """[N] of the log-probabilities, on policy or at those given."""
    trainer_logprobs_N = columns.get("trainer_logprobs_N", batch.rollout_logprobs_N).clone().requires_grad_()
    output = PolicyOutput(trainer_logprobs_N, torch.zeros_like(trainer_logprobs_N), None)
    sums = pack_loss(batch, output, loss, version=0)
    sums.loss.backward()
    return sums, trainer_logprobs_N.grad


@pytest.mark.parametrize("kind", LOSSES)
def test_every_loss_credits_each_turn_with_its_own_advantage(kind):
    loss = load_config("quickstart", [f"loss.kind={kind}", "loss.advantage=turn"]).loss
    batch = collate(recorded(rows_of(config(loss=loss))), [0, 1, 2])
    _, gradient = gradients(batch, loss)  # on policy every ratio is 1
    wanted = [-weight * value for weight, value in zip(batch.loss_weights_N.tolist(), BY_TOKEN, strict=True)]
    assert gradient.tolist() == pytest.approx(wanted, abs=1e-7)


def test_the_ratio_of_gspo_stays_that_of_the_rollout():
    loss = load_config("quickstart", ["loss.kind=gspo", "loss.advantage=turn", "loss.clip_high=0.5"]).loss
    batch = collate(recorded(rows_of(config(loss=loss))), [0, 1, 2])
    moved = torch.zeros(11)
    moved[6:] = torch.tensor([0.1, 0.2, 0.3, 0.4, 0.5])  # the third rollout, mean 0.3
    sums, gradient = gradients(batch, loss, trainer_logprobs_N=batch.rollout_logprobs_N + moved)
    s = math.exp(0.3)
    ratios = [1.0] * 6 + [s] * 5
    columns = zip(batch.loss_weights_N.tolist(), ratios, BY_TOKEN, strict=True)
    wanted = [-weight * ratio * value for weight, ratio, value in columns]
    assert gradient.tolist() == pytest.approx(wanted, abs=1e-6)
    assert sums.loss.item() == pytest.approx(sum(wanted), abs=1e-6)
    assert sums.clipped.item() == 0


def of_the_mean(tokens, config):
    """GSPO with the gradient of the mean log ratio (arXiv:2507.18071, equation 5)."""
    values_M, is_clipped_M = surrogate(tokens.sequence_means(tokens.log_ratio_M).exp(), tokens.advantages_M, config)
    return tokens.sums(-values_M, is_clipped_M)


def test_with_equal_advantages_in_a_rollout_the_gradient_of_gspo_is_that_of_the_mean(monkeypatch):
    rng = np.random.default_rng(3)
    rollouts = [turned(index, (), float(rng.random()), int(rng.integers(2, 9))) for index in range(6)]
    all_gradients = []
    loss = load_config("quickstart", ("loss.kind=gspo", "loss.clip_low=1e-3", "loss.clip_high=0.1")).loss
    for kind in (of_the_mean, LOSSES["gspo"]):
        monkeypatch.setattr("pipelinerl_core.algo.losses.LOSSES", {**LOSSES, "gspo": kind})
        batch = collate(recorded(rows_of(config(loss=loss), rollouts)), range(6))
        noise = torch.linspace(-0.3, 0.35, len(batch.target_ids_N))
        all_gradients.append(gradients(batch, loss, trainer_logprobs_N=batch.rollout_logprobs_N + noise))
    (whole, wanted), (by_token, gradient) = all_gradients
    assert by_token.loss.item() == whole.loss.item()
    assert by_token.clipped.item() == whole.clipped.item() > 0
    torch.testing.assert_close(gradient, wanted, rtol=1e-5, atol=1e-7)


def test_a_rollout_that_is_too_far_is_left_out_with_all_its_turns():
    loss = ReinforceLoss(advantage="turn", sequence_ratio_max=1.5)
    batch = collate(recorded(rows_of(config(loss=loss))), [0, 1, 2])
    moved = torch.zeros(11)
    moved[3] = 3.0  # the mean over the three sampled tokens of the second rollout is 1 > log 1.5
    _, gradient = gradients(batch, loss, trainer_logprobs_N=batch.rollout_logprobs_N + moved)
    wanted = [-value / 11 for value in BY_TOKEN]
    assert gradient.tolist() == pytest.approx([*wanted[:3], 0, 0, 0, *wanted[6:]], abs=1e-7)


def test_rollouts_of_one_turn_are_assembled_as_with_leave_one_out():
    rng = np.random.default_rng(0)
    rollouts = [turned(index, ((0, 4),) if index % 2 else (), float(rng.random()), 4) for index in range(5)]
    actual, wanted = (
        rows_of(config(loss=ReinforceLoss(advantage=kind)), rollouts) for kind in ("turn", "leave_one_out")
    )
    assert [row.advantage for row in actual] == [row.advantage for row in wanted]
    assert [row.turn_advantages for row in actual] == [()] * 5
    left, right = (collate(recorded(rows), range(5)).advantages_N for rows in (actual, wanted))
    assert torch.equal(left, right)


def test_other_baselines_have_one_advantage_for_any_number_of_turns():
    rows = rows_of(config(loss=ReinforceLoss(advantage="leave_one_out")))
    assert [row.turn_advantages for row in rows] == [()] * 3
    assert collate(rows, [1, 2]).advantages_N.tolist() == [-1.0] * 3 + [0.5] * 5


def test_other_than_one_advantage_per_turn_is_refused():
    row = rows_of(config(loss=TURN))[2]
    with pytest.raises(ValueError, match="zip"):
        collate([replace(row, turn_advantages=(0.5, 1.0))], [0])


def test_options_that_advantages_of_turns_do_not_read_are_refused():
    with pytest.raises(ConfigError, match=r"loss.value_coefficient=0.5 is not used with loss.advantage=turn"):
        load_config("quickstart", ["loss.advantage=turn", "loss.value_coefficient=0.5"])
    with pytest.raises(ConfigError, match=r"loss.advantage"):
        load_config("quickstart", ["loss.advantage=turns"])
