"""Episodes of several turns: tokens, masks, versions, budgets, and the log from which another actor continues."""

import asyncio
import itertools
import json
from dataclasses import replace

import numpy as np
import pytest

from pipelinerl_core.data.checks import check_groups
from pipelinerl_core.data.codec import encode_rollouts
from pipelinerl_core.data.partials import decode_partials, encode_partials, join_rows
from pipelinerl_core.engine.embedded.engine import EmbeddedEngine
from pipelinerl_core.errors import EnvironmentFailed, EnvironmentTimeout
from pipelinerl_core.interfaces import WeightUpdate
from pipelinerl_core.messages import Lease
from pipelinerl_core.models.resolve import load_config
from pipelinerl_core.rollouts.episode import Episode, EpisodePlayer
from pipelinerl_core.rollouts.error_budget import ErrorBudget
from pipelinerl_core.rollouts.progress import Progress
from pipelinerl_core.rollouts.runner import GroupRunner, rollout_seed
from pipelinerl_core.types import (
    FinishReason,
    Outcome,
    Played,
    Prompt,
    Reply,
    RewardComponent,
    Sampler,
    Score,
    Transcript,
    TurnSpan,
)
from tests.models import reference_logprobs, tiny_model, weights_of
from tests.rollout_rows import group_ref

END = 9
"""The end token of turns."""
PROMPT = Prompt(prompt_id="p", source="environment", env="Count", text="task 3", task={"index": 3})


def config(*more):
    return load_config("quickstart", ["rollouts.max_tokens=40", "rollouts.max_prompt_tokens=8", *more])


class Chat:
    """A message's content is a list of token ids; turns end with END."""

    def first(self, messages, tools=()):
        return np.array([1, *(token for message in messages for token in message["content"])], np.int32)

    def following(self, messages, tools, last_token):
        closing = [] if last_token == END else [END]
        return np.array([*closing, *(token for message in messages for token in message["content"]), 2], np.int32)

    def reply(self, token_ids, finish_reason):
        text = " ".join(map(str, token_ids))
        return Reply(text=text, content=text, finish_reason=finish_reason, num_tokens=len(token_ids))


class Environments:
    """Says the sum of the turn's tokens, modulo 8, for `turns` turns. `says` replaces what is said before turn k."""

    def __init__(self, turns=3, says=None):
        self.turns, self.says, self.replies = turns, says or {}, []

    async def play(self, task, seed, host):
        self.replies, said = [], [task.get("index", 0)]
        for turn in range(self.turns):
            reply = await host.ask([{"role": "user", "content": self.says.get(turn, said)}], [], turn - 1)
            if reply is None:
                return Played(score=Score(0.0), is_cut=True)
            self.replies.append(reply)
            if "greeting" not in host.once:
                host.record("greeting", turn)
            said = [sum(map(int, reply.text.split())) % 8]
        return Played(score=Score(float(self.turns), (RewardComponent("turns", float(self.turns)),)))

    async def close(self):
        pass


class LoggingEngine(EmbeddedEngine):
    """Sends a chunk after every token, and collects the log of one episode."""

    progress = None
    rows = ()
    swap_at = ()

    def _step(self):
        num_running = super()._step()
        self.flush()
        return num_running

    async def generate(self, request):
        async for chunk in super().generate(request):
            yield chunk
            if self.progress is not None:
                self.log()
            for version, position in self.swap_at:
                if self.stats().num_tokens >= position and self.weight_version < version:
                    await self.swap(WeightUpdate(version=version, tensors=newer(version), num_bytes=0))

    def log(self):
        if (row := self.progress.growth()) is not None:
            self.rows = (*self.rows, row)


def newer(version):
    return {name: weight * (1 + version / 50) for name, weight in weights_of(tiny_model()).items()}


def engine(version=0, **more):
    model = tiny_model()
    if version:
        model.load_state_dict(newer(version))
    return LoggingEngine(
        model, slots=2, max_len=48, eos_token_ids=(END,), deterministic=True, weight_version=version, **more,
    )  # fmt: skip


def play(environments, settings, *, restored=None, version=0, swap_at=(), restart_at=None):
    """(episode, progress, result or error, log rows, engine, player) of one episode."""

    async def main():
        tested_engine = engine(version)
        tested_engine.swap_at = swap_at
        progress = Progress(group_id=4, rollout_index=0, attempt=1, restored=restored)
        tested_engine.progress = progress
        player = EpisodePlayer(tested_engine, environments, Chat(), settings)
        episode = player.episode(progress, request_id="e", sampler=Sampler(seed=5))
        try:
            result = await player.play(episode, PROMPT, 5, player.group(PROMPT, 1), 0)
        except EnvironmentFailed as error:
            result = error
        tested_engine.log()
        await tested_engine.close()
        return episode, progress, result, tested_engine.rows, tested_engine, player

    return asyncio.run(main())


def play_group(environments, settings, *, size=2, restored=None):
    """(rollouts, log rows, number of sampled tokens) of the episodes of a group."""
    lease = Lease(group_id=4, attempt=0, lease_id="4.0", deadline_seconds=0.0, group_size=size, prompt=PROMPT)

    async def main():
        tested_engine = engine()
        runner = GroupRunner({"": EpisodePlayer(tested_engine, environments, Chat(), settings)}, actor="a")
        rollouts = await runner.run(lease, restored)
        await tested_engine.close()
        return rollouts, runner.growth(), tested_engine.stats().num_tokens

    return asyncio.run(main())


OWN = config("environment.path=x.py:Count", "prompts.kind=environment")


def test_the_completion_is_turns_and_given_tokens_and_only_turns_carry_loss():
    environments = Environments()
    episode, progress, result, _, tested_engine, player = play(environments, OWN)
    tokens, mask = progress.completion().token_ids, episode.loss_mask
    assert isinstance(result, Played)
    assert episode.prompt_token_ids.tolist() == [1, 3]
    assert len(episode.turn_spans) == 3
    said = [" ".join(map(str, tokens[turn.start : turn.end])) for turn in episode.turn_spans]
    assert said == [reply.text for reply in environments.replies]
    given = [tokens[before.end : after.start].tolist() for before, after in pairs(episode.turn_spans)]
    for turn, reply, between in zip(episode.turn_spans, environments.replies, given, strict=False):
        closing = [] if tokens[turn.end - 1] == END else [END]
        assert between == [*closing, sum(map(int, reply.text.split())) % 8, 2]
    assert mask.sum() == sum(turn.end - turn.start for turn in episode.turn_spans) == tested_engine.stats().num_tokens
    assert player.counts.given == (~mask).sum()
    assert (progress.completion().rollout_logprobs[~mask] == 0).all()


def test_the_logprobs_are_those_of_the_concatenated_tokens():
    episode, progress, *_ = play(Environments(), OWN)
    whole = progress.completion()
    expected = reference_logprobs({0: tiny_model()}, episode.prompt_token_ids, whole)
    mask = episode.loss_mask
    np.testing.assert_allclose(whole.rollout_logprobs[mask], np.asarray(expected)[mask], atol=1e-5)


def pairs(items):
    return itertools.pairwise(items)


def same(left, right):
    """Whether two plays have the same tokens, to the last bit."""
    assert left[0].prompt_token_ids.tolist() == right[0].prompt_token_ids.tolist()
    for name in ("token_ids", "rollout_logprobs"):
        assert getattr(left[1].completion(), name).tolist() == getattr(right[1].completion(), name).tolist()
    assert left[1].completion().weight_spans == right[1].completion().weight_spans
    assert left[0].turn_spans == right[0].turn_spans
    assert left[0].finish_reason == right[0].finish_reason
    return True


def test_an_episode_continues_from_its_log_wherever_the_log_ends():
    whole = play(Environments(), OWN)
    rows = whole[3]
    assert len(rows) > 20  # a chunk per token
    for end in range(1, len(rows) + 1):
        written = decode_partials(encode_partials(rows[:end]))
        (restored,) = join_rows(written).values()
        again = play(Environments(), OWN, restored=restored)
        assert same(whole, again)
        sampled = again[4].stats().num_tokens
        num_logged = int(whole[0].loss_mask[: len(restored.token_ids)].sum())
        assert sampled == whole[0].loss_mask.sum() - num_logged, "every logged token is used, none is sampled again"
        assert again[5].counts.replayed == num_logged
        assert again[0].once == whole[0].once


def test_a_turn_uses_the_keys_and_values_of_the_turn_before():
    whole = play(Environments(), OWN)
    num_fed = len(whole[0].prompt_token_ids) + whole[1].num_tokens - 1
    assert whole[4].stats().num_steps == num_fed, "the engine without prefill feeds every token but the last once"


def test_new_weights_end_the_use_of_kept_keys_and_values():
    class Swaps(Environments):
        async def play(self, task, seed, host):
            reply = await host.ask([{"role": "user", "content": [3]}], [], -1)
            await host._engine.swap(WeightUpdate(version=1, tensors=newer(1), num_bytes=0))
            await host.ask([{"role": "user", "content": [reply.num_tokens % 8]}], [], 0)
            return Played(score=Score(1.0))

    episode, progress, *_ = play(Swaps(), OWN)
    whole, second = progress.completion(), episode.turn_spans[1]
    assert [span.version for span in whole.weight_spans] == [0, 1]
    newest = tiny_model()
    newest.load_state_dict(newer(1))
    expected = reference_logprobs({0: newest, 1: newest}, episode.prompt_token_ids, whole)
    np.testing.assert_allclose(whole.rollout_logprobs[second.start :], expected[second.start :], atol=1e-5)


def test_the_versions_of_turns_never_decrease_when_an_older_engine_continues():
    swaps = ((1, 4), (2, 9))
    whole = play(Environments(), OWN, swap_at=swaps)
    versions = [span.version for span in whole[1].completion().weight_spans]
    assert versions == sorted(versions)
    assert max(versions) == 2

    async def main():
        (restored,) = join_rows(whole[3][:-4]).values()
        progress = Progress(group_id=4, rollout_index=0, attempt=1, restored=restored)
        tested_engine = engine(0)
        player = EpisodePlayer(tested_engine, Environments(), Chat(), OWN)
        episode = player.episode(progress, request_id="e", sampler=Sampler(seed=5))
        playing = asyncio.create_task(player.play(episode, PROMPT, 5, player.group(PROMPT, 1), 0))
        await asyncio.sleep(0.05)
        waiting = tested_engine.stats().waiting
        await tested_engine.swap(WeightUpdate(version=2, tensors=newer(2), num_bytes=0))
        await playing
        await tested_engine.close()
        return waiting, progress.completion().weight_spans

    waiting, spans = asyncio.run(main())
    assert waiting == 1, "version 0 must not continue tokens of version 2"
    assert [span.version for span in spans] == sorted(span.version for span in spans)


def test_given_tokens_have_the_version_of_the_token_before_them():
    episode, progress, *_ = play(Environments(), OWN, swap_at=((1, 4), (2, 9)))
    versions = np.zeros(progress.num_tokens, int)
    for span in progress.completion().weight_spans:
        versions[span.start : span.end] = span.version
    for before, after in pairs(episode.turn_spans):
        assert set(versions[before.end : after.start]) == {versions[before.end - 1]}


def test_an_environment_that_acts_differently_is_sampled_again_from_there_on(caplog):
    whole = play(Environments(), OWN)
    (restored,) = join_rows(whole[3]).values()
    other = Environments(says={2: [7, 7, 7]})
    again = play(other, OWN, restored=restored)
    kept = whole[0].turn_spans[1].end
    assert again[1].completion().token_ids[:kept].tolist() == whole[1].completion().token_ids[:kept].tolist()
    third = again[0].turn_spans[2]
    assert again[1].completion().token_ids[third.start - 4 : third.start - 1].tolist() == [7, 7, 7]
    assert again[5].counts.dropped == whole[1].num_tokens - kept
    assert "acts differently" in caplog.text
    (logged,) = join_rows(again[3]).values()
    assert logged.token_ids.tolist() == again[1].completion().token_ids.tolist()
    assert [json.loads(note)[0] for note in logged.notes].count("turn") == 3
    fresh = play(Environments(says={0: [5]}), OWN, restored=restored)
    assert fresh[0].prompt_token_ids.tolist() == [1, 5]
    assert fresh[5].counts.dropped == whole[1].num_tokens


class Noting(Environments):
    """Records a value before the first turn, and a verdict on each turn."""

    async def play(self, task, seed, host):
        self.replies, said = [], [task["index"]]
        if "order" not in host.once:
            host.record("order", 7)
        for turn in range(self.turns):
            reply = await host.ask([{"role": "user", "content": self.says.get(turn, said)}], [], turn - 1)
            self.replies.append(reply.text)
            if f"verdict {turn}" not in host.once:
                host.record(f"verdict {turn}", reply.text)
            said = [sum(map(int, reply.text.split())) % 8]
        return Played(score=Score(1.0))


@pytest.mark.parametrize("has_numbers", [True, False])
def test_what_was_recorded_after_a_turn_that_is_sampled_again_is_forgotten(has_numbers):
    first, other = Noting(turns=2), Noting(turns=2, says={1: [7, 7, 7]})
    (restored,) = join_rows(play(first, OWN)[3]).values()
    if not has_numbers:  # the log of an older version
        notes = [json.loads(note) for note in restored.notes]
        notes = [json.dumps(note[:3] if note[0] == "once" else note) for note in notes]
        restored = replace(restored, notes=tuple(notes))
    episode, *_ = play(other, OWN, restored=restored)
    assert first.replies[0] == other.replies[0]
    assert first.replies[1] != other.replies[1]
    assert episode.once == {"order": 7, **{f"verdict {turn}": text for turn, text in enumerate(other.replies)}}


def test_what_a_repeated_play_records_before_a_difference_is_kept():
    (restored,) = join_rows(play(Environments(), OWN)[3]).values()
    episode, *_ = play(Noting(says={2: [7, 7, 7]}), OWN, restored=restored)
    assert episode.once.keys() == {"greeting", "order", "verdict 0", "verdict 1", "verdict 2"}


@pytest.mark.parametrize("is_compared", [False, True])
def test_turns_that_a_repeated_play_does_not_reach_are_dropped(is_compared):
    class Ends(Environments):
        async def play(self, task, seed, host):
            result = await super().play(task, seed, host)
            return Transcript("[]", self.turns) if is_compared else result

        async def score_group(self, task, transcripts):
            return [Played(score=Score(2.0)) for _ in transcripts]

    whole = play(Environments(), OWN)
    rows = [replace(row, outcome=None, reward=None, reward_components=()) for row in whole[3]]
    (restored,) = join_rows(rows).values()
    again = play(Ends(turns=2), OWN, restored=restored)
    kept = whole[0].turn_spans[1].end
    assert again[1].reward == 2.0
    assert again[1].completion().token_ids.tolist() == whole[1].completion().token_ids[:kept].tolist()
    assert again[0].turn_spans == whole[0].turn_spans[:2]
    assert again[5].counts.dropped == whole[1].num_tokens - kept
    if is_compared:  # an episode whose transcript is in the log is not played again, and keeps its turns
        (logged,) = join_rows(again[3]).values()
        scored = play(Ends(turns=1), OWN, restored=replace(logged, outcome=None, reward=None))
        assert same(again, scored)


def test_a_context_of_the_model_that_is_shorter_limits_the_turns(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"max_position_embeddings": 48}))
    keys = ["environment.path=x.py:Count", "prompts.kind=environment", f"model.path={tmp_path}"]
    long = config(*keys, "rollouts.max_tokens=100", "environment.turn_tokens=10")
    episode, progress, result, *_ = play(Environments(turns=9), long)
    assert isinstance(result, Played)
    assert result.is_cut
    assert episode.finish_reason is FinishReason.LENGTH
    assert 40 < len(episode.prompt_token_ids) + progress.num_tokens <= 48


def test_an_episode_whose_engine_has_ended_has_no_result():
    class Breaking(Environments):
        async def play(self, task, seed, host):
            await host.ask([{"role": "user", "content": [3]}], [], -1)
            host._engine._fail("the device is lost")
            return await host.ask([{"role": "user", "content": [4]}], [], 0)

    async def main():
        tested_engine = engine()
        player = EpisodePlayer(tested_engine, Breaking(), Chat(), OWN)
        progress = Progress(group_id=4, rollout_index=0, attempt=1)
        sampled = await player.begin(PROMPT, 1)(0, "e", Sampler(seed=5), progress)
        await tested_engine.close()
        return sampled, progress

    sampled, progress = asyncio.run(main())
    assert sampled.error == "engine: the device is lost"
    assert (progress.outcome, progress.finish_reason) == (None, None)


@pytest.mark.parametrize(
    ("keys", "num_turns", "reason"),
    [
        (["environment.max_turns=2"], 2, FinishReason.LENGTH),
        (["rollouts.max_tokens=16"], None, FinishReason.LENGTH),
        (["environment.turn_tokens=3"], 3, FinishReason.LENGTH),
    ],
)
def test_budgets(keys, num_turns, reason):
    settings = config("environment.path=x.py:Count", "prompts.kind=environment", *keys)
    episode, progress, _, _, _, _ = play(Environments(turns=3), settings)
    limits = settings.rollouts, settings.environment
    assert progress.num_tokens <= limits[0].max_tokens
    if num_turns is not None:
        assert len(episode.turn_spans) == num_turns
    if limits[1].turn_tokens:
        assert max(turn.end - turn.start for turn in episode.turn_spans) == limits[1].turn_tokens
    assert episode.finish_reason is reason


def test_a_play_that_begins_again_in_the_same_actor_gets_its_earlier_turns():
    class Twice(Environments):
        async def play(self, task, seed, host):
            self.turns = 2
            await super().play(task, seed, host)
            host.restart()
            self.turns = 3
            return await super().play(task, seed, host)

    once, twice = play(Environments(), OWN), play(Twice(), OWN)
    assert same(once, twice)
    assert twice[4].stats().num_tokens == once[4].stats().num_tokens


@pytest.mark.parametrize(
    ("environments", "text"),
    [
        (Environments(turns=0), "without a turn"),
        (Environments(says={0: [3] * 20}), "the first messages have 21 tokens"),
    ],
)
def test_an_episode_without_tokens_is_an_error_row(environments, text):
    rollouts, *_ = play_group(environments, OWN)
    for rollout in rollouts:
        assert rollout.outcome is Outcome.ERROR
        assert text in rollout.error
        assert (rollout.num_tokens, len(rollout.prompt_token_ids)) == (0, 1)


def test_the_rows_of_a_group_of_episodes_pass_the_hubs_checks_and_restart_with_their_rewards():
    settings = config("environment.path=x.py:Count", "prompts.kind=environment", "environment.turn_tokens=8")
    rollouts, rows, _ = play_group(Environments(), settings)
    check_groups([group_ref(rollouts)], encode_rollouts("run", rollouts))
    assert [rollout.reward for rollout in rollouts] == [3.0, 3.0]
    assert rollouts[0].completion_token_ids.tolist() != rollouts[1].completion_token_ids.tolist()
    assert rollouts[0].reward_components == (RewardComponent("turns", 3.0),)
    again, _, num_sampled = play_group(Environments(), settings, restored=join_rows(rows))
    assert num_sampled == 0
    for left, right in zip(rollouts, again, strict=True):
        assert left.completion_token_ids.tolist() == right.completion_token_ids.tolist()
        assert (left.turn_spans, left.loss_mask.tolist()) == (right.turn_spans, right.loss_mask.tolist())
        assert (left.reward, left.finish_reason) == (right.reward, right.finish_reason)


class Compared(Environments):
    """Scores an episode by the share of the group's transcripts that are smaller. Episodes of `failing` fail."""

    groups = ()

    def __init__(self, *failing):
        super().__init__()
        self.failing = [rollout_seed(OWN.seed, 4, index) for index in failing]

    async def play(self, task, seed, host):
        replies = []
        for turn in range(2):
            replies.append(await host.ask([{"role": "user", "content": [turn]}], [], turn - 1))
        if seed in self.failing:
            raise EnvironmentFailed("no result (x.py:1)")
        return Transcript(json.dumps(replies[-1].text), len(replies))

    async def score_group(self, task, transcripts):
        self.groups = [*self.groups, transcripts]
        texts = [json.loads(transcript.text) for transcript in transcripts]
        scores = [sum(other < text for other in texts) / len(texts) for text in texts]
        return [Played(score=Score(rank, (RewardComponent("rank", rank),))) for rank in scores]


@pytest.mark.parametrize("failing", [(), (1,)])
def test_a_group_is_scored_together_when_its_last_episode_has_ended(failing):
    environments = Compared(*failing)
    rollouts, rows, num_sampled = play_group(environments, OWN, size=4)
    (transcripts,) = environments.groups
    scored = [rollout for rollout in rollouts if rollout.outcome is Outcome.SCORED]
    assert len(transcripts) == len(scored) == 4 - len(failing)
    assert len({transcript.text for transcript in transcripts}) > 1
    ranks = [
        sum(other.text < transcript.text for other in transcripts) / len(transcripts) for transcript in transcripts
    ]
    assert [rollout.reward for rollout in scored] == ranks  # in the order of the rollouts
    assert num_sampled > 0

    without_scores = [replace(row, outcome=None, reward=None, reward_components=()) for row in rows[:2]]
    restored = join_rows([*without_scores, *rows[2:]])
    again, _, num_again = play_group(environments, OWN, size=4, restored=restored)
    assert num_again == 0  # no episode with a transcript is played again
    assert [rollout.reward for rollout in again] == [rollout.reward for rollout in rollouts]
    assert environments.groups == [transcripts, transcripts]


@pytest.mark.parametrize("is_repeated", [False, True])
@pytest.mark.parametrize(("turns", "reward"), [(2, -1.0), (0, None)])
def test_an_episode_whose_environment_hangs_has_the_reward_for_that_and_counts_as_failed(turns, reward, is_repeated):
    overrides = ["environment.path=x.py:Count", "prompts.kind=environment", "environment.timeout_reward=-1"]
    settings = config(*overrides, "environment.turn_tokens=8")

    class Hanging(Environments):
        async def play(self, task, seed, host):
            await super().play(task, seed, host)
            raise EnvironmentTimeout("too long")

    restored = None
    if is_repeated:  # the log has three turns of each episode
        rows = play_group(Environments(), settings)[1]
        restored = join_rows([replace(row, outcome=None, reward=None, reward_components=()) for row in rows])
    rollouts, rows, _ = play_group(Hanging(turns), settings, restored=restored)
    assert [(rollout.reward, rollout.error) for rollout in rollouts] == [(reward, "environment: too long")] * 2
    assert {rollout.outcome for rollout in rollouts} == {Outcome.ERROR if reward is None else Outcome.SCORED}
    num_kept = turns or 3 * is_repeated  # an error is not trained
    assert [len(rollout.turn_spans) for rollout in rollouts] == [num_kept] * 2
    check_groups([group_ref(rollouts)], encode_rollouts("run", rollouts))
    budget = ErrorBudget()
    for _ in range(ErrorBudget.WINDOW // 2):
        budget.add(rollouts)
    assert budget.is_spent
    assert budget.first_error == "environment: too long"
    if reward is not None:  # the next holder of the group reads reward and error from the log
        again, *_ = play_group(Environments(), settings, restored=join_rows(rows))
        assert [(rollout.reward, rollout.error) for rollout in again] == [(reward, "environment: too long")] * 2


class Rewarding(Environments):
    parts = (1.0,)

    async def play(self, task, seed, host):
        result = await super().play(task, seed, host)
        return replace(result, turn_rewards=self.parts)


def test_rewards_of_turns_are_in_the_row_and_in_the_log():
    rewarding = Rewarding()
    rewarding.parts = (1.0, 0.5, 1.5)
    episode, _, _, rows, *_ = play(rewarding, OWN)
    assert episode.turn_rewards == (1.0, 0.5, 1.5)
    (restored,) = join_rows(rows).values()
    again = Progress(group_id=4, rollout_index=0, attempt=1, restored=restored)
    player = EpisodePlayer(None, rewarding, Chat(), OWN)
    assert player.episode(again, request_id="e", sampler=Sampler()).turn_rewards == (1.0, 0.5, 1.5)
    rewarding.parts = (1.0, 0.5)
    assert "2 rewards of turns for 3 turns" in str(play(rewarding, OWN)[2])


def test_the_reward_of_a_single_turn_is_in_the_row():
    episode, *_ = play(Rewarding(turns=1), OWN)
    assert (episode.turn_spans, episode.turn_rewards) == ((), (1.0,))


def test_each_turn_has_noise_of_its_own_and_needs_the_version_of_the_tokens_before(monkeypatch):
    requests, generate = [], LoggingEngine.generate

    def recorded(self, request):
        requests.append(request)
        return generate(self, request)

    monkeypatch.setattr(LoggingEngine, "generate", recorded)
    episode, progress, *_ = play(Environments(), OWN, swap_at=((1, 4), (2, 9)))
    assert len({request.sampler.seed for request in requests}) == len(requests) == 3
    newest = [-1]
    for turn in episode.turn_spans[:-1]:
        newest.append(max(span.version for span in progress.completion().weight_spans if span.start < turn.end))
    assert [request.min_version for request in requests] == newest
    assert newest[-1] > 0


def test_one_turn_alone_has_no_turn_spans():
    episode, progress, *_ = play(Environments(turns=1), OWN)
    assert episode.turn_spans == ()
    assert episode.loss_mask.all()
    assert isinstance(episode, Episode)
    assert TurnSpan(0, progress.num_tokens) not in episode.turn_spans


def test_an_episode_that_is_only_scored_again_was_still_cut_off():
    class Spends(Compared):
        async def play(self, task, seed, host):
            while await host.ask([{"role": "user", "content": [1]}], [], len(self.replies) - 1):
                self.replies.append(None)
            return Transcript("1", len(self.replies))

    settings = config("environment.path=x.py:Count", "prompts.kind=environment", "environment.max_turns=2")
    whole = play(Spends(), settings)
    assert whole[0].finish_reason is FinishReason.LENGTH
    rows = [replace(row, outcome=None, reward=None, finish_reason=None, reward_components=()) for row in whole[3]]
    (restored,) = join_rows(decode_partials(encode_partials(rows))).values()
    assert same(whole, play(Spends(), settings, restored=restored))
