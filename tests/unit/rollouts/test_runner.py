"""Rollouts of a lease: sampled, scored, and continued from the log of a previous holder."""

import asyncio
from dataclasses import replace

import numpy as np
import pytest

from pipelinerl_core.data.checks import check_groups
from pipelinerl_core.data.codec import encode_rollouts
from pipelinerl_core.data.partials import join_rows
from pipelinerl_core.engine.embedded.engine import EmbeddedEngine
from pipelinerl_core.errors import ConfigError, RewardError
from pipelinerl_core.messages import Lease
from pipelinerl_core.models.resolve import load_config
from pipelinerl_core.rollouts.player import SingleTurns, TextCodec
from pipelinerl_core.rollouts.runner import GroupRunner
from pipelinerl_core.types import (
    FinishReason,
    Origin,
    Outcome,
    PartialRow,
    Prompt,
    RewardComponent,
    Score,
    WeightSpan,
)
from tests.models import tiny_model
from tests.rollout_rows import group_ref

PROMPT = Prompt(prompt_id="p", source="sums", env="sums", text="1+2=")
CONFIG = load_config("quickstart", ["rollouts.group_size=3", "rollouts.max_tokens=24"])


class Scorer:
    """Rewards the length; fails for the texts it is told."""

    def __init__(self, failing=()):
        self.failing = failing
        self.scored = []

    async def score(self, prompt, text, completion=None):
        self.scored.append(text)
        if len(self.scored) in self.failing:
            raise RewardError("killed")
        return float(len(text.split()))


def lease(attempt=0):
    return Lease(
        group_id=4, attempt=attempt, lease_id=f"4.{attempt}", deadline_seconds=0.0, group_size=3, prompt=PROMPT
    )


def runner(scorer):
    engine = EmbeddedEngine(tiny_model(), slots=4, max_len=40, eos_token_ids=())
    codec = TextCodec(
        encode=lambda prompt: np.array([1, 2, 3], np.int32), decode=lambda ids: " ".join(str(i) for i in ids)
    )
    return engine, GroupRunner({"": SingleTurns(engine, scorer, codec, CONFIG)}, actor="b")


def run(scorer, taken=None, attempt=0):
    async def main():
        engine, group_runner = runner(scorer)
        rollouts = await group_runner.run(lease(attempt), taken)
        rows = group_runner.growth()
        group_runner.forget([(4, attempt)])
        await engine.close()
        return rollouts, rows, group_runner.growth()

    return asyncio.run(main())


def taken_from(rollout, num_tokens, **more):
    """What a log holds of a rollout after so many tokens."""
    return PartialRow(
        group_id=4,
        rollout_index=rollout.rollout_index,
        attempt=0,
        start=0,
        token_ids=rollout.completion_token_ids[:num_tokens],
        rollout_logprobs=rollout.rollout_logprobs[:num_tokens],
        weight_spans=(WeightSpan(0, 0, num_tokens),),
        origins=(Origin("a", 1, num_tokens),),
        **more,
    )


def test_the_log_of_a_group_holds_all_of_its_rollouts_until_the_group_is_forgotten():
    rollouts, rows, after = run(Scorer())
    known = join_rows(rows)
    for rollout in rollouts:
        row = known[rollout.rollout_index]
        assert row.token_ids.tolist() == rollout.completion_token_ids.tolist()
        assert row.rollout_logprobs.tolist() == rollout.rollout_logprobs.tolist()
        assert (row.reward, row.finish_reason) == (rollout.reward, rollout.finish_reason)
    assert after == []


def test_a_continued_group_is_the_group_that_was_not_interrupted():
    whole, _, _ = run(Scorer())
    scorer = Scorer()
    taken = {
        0: taken_from(whole[0], 10),
        1: taken_from(whole[1], 24, finish_reason=FinishReason.LENGTH, reward=7.0, outcome=Outcome.SCORED),
    }
    continued, rows, _ = run(scorer, taken, attempt=1)
    for left, right in zip(whole, continued, strict=True):
        assert left.completion_token_ids.tolist() == right.completion_token_ids.tolist()
        np.testing.assert_allclose(left.rollout_logprobs, right.rollout_logprobs, atol=1e-5)
        assert left.sampler == right.sampler
    assert [rollout.origins for rollout in continued] == [(Origin("a", 1, 10),), (Origin("a", 1, 24),), ()]
    assert continued[1].reward == 7.0
    assert len(scorer.scored) == 2  # the one that had its reward kept it
    assert {row.attempt for row in rows} == {1}


def test_an_ended_rollout_without_a_reward_is_scored_and_not_sampled():
    whole, _, _ = run(Scorer())
    ended = taken_from(whole[0], 5, finish_reason=FinishReason.STOP)
    scorer = Scorer()
    continued, _, _ = run(scorer, {0: ended}, attempt=1)
    assert continued[0].completion_token_ids.tolist() == whole[0].completion_token_ids[:5].tolist()
    assert (continued[0].reward, continued[0].finish_reason) == (5.0, FinishReason.STOP)


@pytest.mark.parametrize(
    ("prompt_ids", "message"),
    [(None, "cannot encode"), (list(range(1, 31)), "30 prompt tokens"), ([], "no tokens")],
)
def test_a_prompt_that_cannot_be_used_is_an_error_of_its_rollouts(prompt_ids, message):
    def encode(prompt):
        if prompt_ids is None:
            raise ConfigError("cannot encode")
        return np.array(prompt_ids, np.int32)

    async def main():
        engine = EmbeddedEngine(tiny_model(), slots=4, max_len=40, eos_token_ids=())
        player = SingleTurns(engine, Scorer(), TextCodec(encode=encode, decode=str), CONFIG)
        rollouts = await GroupRunner({"": player}, actor="b").run(lease())
        await engine.close()
        return rollouts

    rollouts = asyncio.run(main())
    for rollout in rollouts:
        assert rollout.outcome is Outcome.ERROR
        assert rollout.error.startswith("prompt: ")
        assert message in rollout.error
    check_groups([group_ref(rollouts)], encode_rollouts("run", rollouts))  # a segment takes the rows


def test_components_of_a_reward_are_in_the_rollout_and_in_the_log():
    parts = (RewardComponent("right", 1.0), RewardComponent("short", 2.0))

    class ComponentScorer(Scorer):
        async def score(self, prompt, text, completion=None):
            return Score(len(completion.token_ids), parts)

    rollouts, rows, _ = run(ComponentScorer())
    assert [(rollout.reward, rollout.reward_components) for rollout in rollouts] == [(24.0, parts)] * 3
    assert {row.reward_components for row in join_rows(rows).values()} == {parts}
    ended = taken_from(rollouts[0], 24, finish_reason=FinishReason.LENGTH, reward=7.0, outcome=Outcome.SCORED)
    continued, _, _ = run(Scorer(), {0: replace(ended, reward_components=parts)}, attempt=1)
    assert [rollout.reward_components for rollout in continued] == [parts, (), ()]


def test_an_error_of_the_reward_is_logged_as_an_error():
    rollouts, rows, _ = run(Scorer(failing=[1]))
    failed = [rollout.rollout_index for rollout in rollouts if rollout.outcome is Outcome.ERROR]
    assert len(failed) == 1
    known = join_rows(rows)
    assert [index for index, row in known.items() if row.outcome is Outcome.ERROR] == failed
    assert known[failed[0]].reward is None


async def test_a_cancelled_group_leaves_no_log():
    engine, group_runner = runner(Scorer())
    task = asyncio.create_task(group_runner.run(lease()))
    for _ in range(12):
        await asyncio.sleep(0)
    engine.flush()
    for _ in range(3):
        await asyncio.sleep(0)
    rows = group_runner.growth()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await engine.close()
    after = group_runner.growth()
    assert sum(len(row.token_ids) for row in rows) >= 6  # a flush brings what no chunk has carried yet
    assert {row.finish_reason for row in rows} == {None}
    assert after == []


def test_a_group_of_a_mixture_is_played_by_the_player_of_its_part():
    class Player:
        counts, config = None, CONFIG

        def __init__(self, name):
            self.name = name

        def begin(self, prompt, size):
            raise RuntimeError(f"{self.name} plays {prompt.source}")

    mixture = GroupRunner({name: Player(name) for name in ("math", "guess")}, actor="b")
    with pytest.raises(RuntimeError, match="guess plays guess"):
        asyncio.run(mixture.run(lease().model_copy(update={"prompt": replace(PROMPT, source="guess")})))
    assert mixture.growth() == []


def test_a_longer_prompt_is_an_error_also_if_the_engine_has_room_for_it():
    """With eval.on=actors the engine has room for a completion of an evaluation."""
    settings = load_config("quickstart", ["rollouts.max_prompt_tokens=2", "rollouts.max_tokens=24"])

    async def main():
        engine, _ = runner(Scorer())
        codec = TextCodec(encode=lambda prompt: np.array([1, 2, 3], np.int32), decode=str)
        rollouts = await GroupRunner({"": SingleTurns(engine, Scorer(), codec, settings)}, actor="b").run(lease())
        await engine.close()
        return rollouts

    errors = {rollout.error for rollout in asyncio.run(main())}
    assert errors == {"prompt: its 3 tokens exceed rollouts.max_prompt_tokens=2"}
