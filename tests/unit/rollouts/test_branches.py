"""Episodes whose histories do not continue: each branch is a context of its own, exact to the token."""

import json
import random
from dataclasses import replace
from unittest.mock import ANY

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pipelinerl_core.algo.shaping import overlong_penalty
from pipelinerl_core.batching.assemble import _rewards
from pipelinerl_core.batching.collate import PackBatcher, num_forward_tokens
from pipelinerl_core.data.checks import check_groups
from pipelinerl_core.data.codec import decode_batch, decode_rollouts, encode_batch, encode_rollouts
from pipelinerl_core.data.partials import decode_partials, encode_partials, join_rows
from pipelinerl_core.errors import SchemaMismatch
from pipelinerl_core.roles.trainer.rescoring import prefix
from pipelinerl_core.rollouts.task_columns import task_text
from pipelinerl_core.training.model import prepare_model
from pipelinerl_core.training.policy import Policy
from pipelinerl_core.types import Completion, Played, Score, TrainingRow
from tests.models import reference_logprobs, tiny_model
from tests.rollout_rows import group_ref
from tests.unit.rollouts.test_episode import OWN, Environments, config, play, play_group, same

SETTINGS = config(
    "environment.path=x.py:Count", "prompts.kind=environment", "environment.turn_tokens=4", "rollouts.max_tokens=64",
    "environment.max_branches=20",
)  # fmt: skip


class Branching(Environments):
    """Turn k follows turn `follows[k]`; -1: a history of its own, [7, k % 8]."""

    def __init__(self, follows):
        super().__init__()
        self.follows = follows

    async def play(self, task, seed, host):
        for turn, after in enumerate((-1, *self.follows)):
            content = [7, turn % 8] if after < 0 else [turn % 8]
            if await host.ask([{"role": "user", "content": content}], [], after) is None:
                break
        return Played(score=Score(1.0))


def random_follows(seed, num_turns):
    rng = random.Random(seed)
    return [rng.choice([turn - 1, turn - 1, rng.randrange(-1, turn)]) for turn in range(1, num_turns)]


def rollouts_of(environments, *, size=2):
    return play_group(environments, SETTINGS, size=size)[0]


def expected_logprobs(rollout):
    """Each context by itself, through a plain forward."""
    model, parts = tiny_model(), []
    for start, end in rollout.contexts:
        prompt = rollout.completion_token_ids[start : start + 1] if start else rollout.prompt_token_ids
        first = start + 1 if start else 0
        ids = rollout.completion_token_ids[first:end]
        spans = (replace_span(rollout.weight_spans[0], 0, len(ids)),)
        completion = Completion(token_ids=ids, rollout_logprobs=np.zeros(len(ids), np.float32), weight_spans=spans)
        parts += [[0.0]] * (start > 0) + [reference_logprobs({0: model}, prompt, completion)]
    return np.concatenate(parts)


def replace_span(span, start, end):
    return span._replace(start=start, end=end)


def policy():
    return Policy(prepare_model(tiny_model()), temperature=1.0)


@settings(deadline=None, max_examples=25)
@given(st.integers(0, 10_000), st.integers(2, 7))
def test_every_branch_is_exact_in_the_engine_in_the_rows_and_in_the_trainers_packs(seed, num_turns):
    follows = random_follows(seed, num_turns)
    rollouts = rollouts_of(Branching(follows))
    num_branches = sum(after != turn for turn, after in enumerate(follows))
    batch = encode_rollouts("run", rollouts)
    check_groups([group_ref(rollouts)], batch)
    for rollout, stored in zip(rollouts, decode_rollouts(batch), strict=True):
        assert stored.branch_starts == rollout.branch_starts
        assert len(rollout.branch_starts) == num_branches
        assert rollout.num_turns == num_turns
        mask = rollout.loss_mask
        np.testing.assert_allclose(rollout.rollout_logprobs[mask], expected_logprobs(rollout)[mask], atol=1e-5)
    rows = [
        TrainingRow(rollout=rollout, loss_mask=rollout.loss_mask, advantage=1.0, loss_weight=0.5)
        for rollout in rollouts
    ]
    stored_rows = decode_batch(encode_batch("run", 1, rows))
    model, num_seen = policy(), 0
    for pack in PackBatcher(10_000).rows(stored_rows):
        assert pack.num_tokens == sum(num_forward_tokens(rollout) for rollout in rollouts)
        assert pack.num_sequences == len(rollouts)
        assert len(pack.layout.lengths) <= len(rollouts) * (1 + num_branches)
        with torch.no_grad():
            logprobs_N = model(pack)[0]
        np.testing.assert_allclose(logprobs_N, pack.rollout_logprobs_N, atol=1e-4)
        num_seen += len(logprobs_N)
    assert num_seen == sum(int(rollout.loss_mask.sum()) for rollout in rollouts)  # each sampled token once


@pytest.mark.parametrize("follows", [[0, -1, 2, 1, -1], [-1, -1], [0, 0, 0]])
def test_an_episode_with_branches_continues_from_its_log_wherever_the_log_ends(follows):
    whole = play(Branching(follows), SETTINGS)
    rows = whole[3]
    for end in range(1, len(rows) + 1):
        (restored,) = join_rows(decode_partials(encode_partials(rows[:end]))).values()
        again = play(Branching(follows), SETTINGS, restored=restored)
        assert same(whole, again)
        assert whole[0].branch_starts == again[0].branch_starts
        num_logged = int(whole[0].loss_mask[: len(restored.token_ids)].sum())
        assert again[4].stats().num_tokens == whole[0].loss_mask.sum() - num_logged


def test_a_branch_that_continues_an_earlier_turn_begins_with_a_copy_of_its_tokens():
    episode, progress, *_ = play(Branching([0, -1, 1]), SETTINGS)
    ids, turns = progress.completion().token_ids, episode.turn_spans
    first, second = episode.branch_starts
    assert ids[first:][:3].tolist() == [1, 7, 2]  # as the first messages
    copied = [*episode.prompt_token_ids, *ids[: turns[1].end]]
    assert ids[second : second + len(copied)].tolist() == copied
    assert not episode.loss_mask[second : turns[3].start].any()


def test_another_history_at_the_place_of_a_branch_is_sampled_again():
    (restored,) = join_rows(play(Branching([0, -1, 2]), SETTINGS)[3]).values()
    again = play(Branching([0, 1, 2]), SETTINGS, restored=restored)
    assert again[0].branch_starts == ()
    assert again[5].counts.dropped > 0


def test_all_branches_share_the_tokens_of_the_rollout_and_no_context_is_longer_than_the_engine_allows():
    environment = Branching([-1] * 30)
    settings_of = [
        config("environment.path=x.py:Count", "prompts.kind=environment", "environment.turn_tokens=4", *more)
        for more in (("environment.max_branches=3",), ("environment.max_branches=30",))
    ]
    few, many = (play(environment, each) for each in settings_of)
    assert len(few[0].branch_starts) == 3
    assert few[0].finish_reason == "length"
    assert many[0].loss_mask.sum() == settings_of[1].rollouts.max_tokens
    long = play(Branching([0, 1, 2, -1, 3, 0, 1, 2]), SETTINGS)[0]
    assert max(end - start for start, end in rollouts_of(Branching([0, 1, 2, -1, 3]), size=1)[0].contexts) <= 72
    assert long.branch_starts


@pytest.mark.parametrize(
    ("starts", "says"),
    [
        ((0,), "has 0 after 0"),
        ((3, 3), "has 3 after 3"),
        ((99,), "has 99 after 0"),
        ((1,), "has 1, where loss_mask is true"),
    ],
)
def test_branches_at_wrong_places_are_refused(starts, says):
    rollouts = rollouts_of(Branching([0, -1]), size=1)
    with pytest.raises(SchemaMismatch, match=f"row 0: branch_starts {says}"):
        check_groups([group_ref(rollouts)], encode_rollouts("run", [replace(rollouts[0], branch_starts=starts)]))


def test_the_trainers_scores_have_a_place_for_every_token():
    (rollout,) = rollouts_of(Branching([0, -1, 0]), size=1)
    (pack,) = PackBatcher(10_000).rollouts([rollout])
    assert len(pack.target_ids_N) == rollout.num_tokens
    with torch.no_grad():
        logprobs_N = policy()(pack)[0].numpy()
    np.testing.assert_allclose(logprobs_N[rollout.loss_mask], rollout.rollout_logprobs[rollout.loss_mask], atol=1e-4)


def test_the_scores_of_a_prefix_are_those_of_the_whole_rollout():
    (rollout,) = rollouts_of(Branching([0, -1, 0]), size=1)
    with torch.no_grad():
        for num in range(1, rollout.num_tokens + 1):
            (pack,) = PackBatcher(10_000).rollouts([prefix(rollout, num)])
            mask = rollout.loss_mask[:num]
            logprobs_N = policy()(pack)[0].numpy()
            np.testing.assert_allclose(logprobs_N[mask], rollout.rollout_logprobs[:num][mask], atol=1e-4)


def test_the_tokens_with_which_branches_begin_do_not_count_as_length():
    (rollout,) = rollouts_of(Branching([0, -1, 0]), size=1)
    first, second = rollout.branch_starts
    starts = [turn.start for turn in rollout.turn_spans]
    assert rollout.num_opening_tokens == (starts[2] - first) + (starts[3] - second)
    limits = {"rollouts": SETTINGS.rollouts.model_copy(update={"max_tokens": 40}),
              "reward": SETTINGS.reward.model_copy(update={"overlong_tokens": 10})}  # fmt: skip
    alone = rollouts_of(Branching([0, 1, 2]), size=1)[0]
    both = [replace(rollout, rollout_index=0), replace(alone, rollout_index=1)]
    penalties = _rewards(both, SETTINGS.model_copy(update=limits))
    lengths = [each.num_tokens - each.num_opening_tokens for each in both]
    assert penalties == [1 + overlong_penalty(num, max_tokens=40, overlong_tokens=10) for num in lengths]


@pytest.mark.parametrize("task", ["not json", "[1]", "1", "{" * 2000, f'{{"a": "{"x" * 2**20}"}}'])
def test_a_task_that_is_no_object_is_refused(task):
    rollouts = rollouts_of(Branching([0]), size=1)
    with pytest.raises(SchemaMismatch, match="row 0: task is no JSON object"):
        check_groups([group_ref(rollouts)], encode_rollouts("run", [replace(rollouts[0], task=task)]))


@pytest.mark.parametrize(
    ("task", "columns"),
    [
        ({"a": 1, "b": "x" * 5000, "c": list(range(900))}, {"a": 1, "b": ANY, "c": ANY}),
        ([1, 2], {"task": [1, 2]}),
        ({("a", 1): {("b",): 2}}, {"('a', 1)": "dict that is no JSON"}),
        ({"k" * 500: float("nan"), "s": "\ud800"}, {"k" * 100: ANY, "s": "?"}),
        ({str(number): number for number in range(300)}, ANY),
    ],
)
def test_any_task_becomes_bounded_json(task, columns):
    text = task_text(task)
    assert json.loads(text) == columns
    assert len(text) < 150_000
    assert len(json.loads(text)) <= 100


def test_without_branches_nothing_changes():
    assert play(Environments(), OWN)[0].branch_starts == ()


def test_a_repeated_play_is_told_the_tokens_left_of_its_turn_whatever_branches_the_log_has_after_it():
    class Noting(Branching):
        async def play(self, task, seed, host):
            self.left = []
            for turn, after in enumerate((-1, *self.follows)):
                content = [7, turn % 8] if after < 0 else [turn % 8]
                reply = await host.ask([{"role": "user", "content": content}], [], after)
                self.left.append(reply.tokens_left)
            return Played(score=Score(1.0))

    first, again = Noting([0, -1, 0, 2, -1]), Noting([0, -1, 0, 2, -1])
    rows = play(first, SETTINGS)[3]
    (restored,) = join_rows([replace(row, outcome=None, reward=None, reward_components=()) for row in rows]).values()
    assert play(again, SETTINGS, restored=restored)[5].counts.dropped == 0
    assert again.left == first.left
