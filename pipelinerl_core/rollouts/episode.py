"""The actor's side of one episode: several turns of the model, and what the environment says in between.

    environment --messages--> chat codec --tokens--> | prompt | turn 0 | given | turn 1 | given | ... <-- engine

The completion of an episode is everything after the prompt. Given tokens come from the environment: they are in no
turn and carry no loss. Sampled tokens are never rendered again.

A history that does not continue the previous call's begins a branch, a context of its own in the same completion:

    ... | turn 4 || context | turn 5 | given | turn 6 || copy of the context up to turn 4 | given | turn 7

It begins with the rendered messages, or with the tokens of the earlier history that it continues, as given tokens.

The log holds the tokens, and notes (JSON texts):

["prompt", [ids]]            the first messages as tokens
["turn", 17]                 a turn begins at offset 17; the tokens since the end of the previous turn were given
["turn", 60, 25]             the same, where the given tokens from offset 25 on begin a branch
["end", 25, "stop"]          the turn ends before offset 25
["once", "weather", "rain", 1]  a value that the environment has recorded after 1 turn; older logs lack the number
["late", "..."]              the environment took too long: the error beside the reward
["turn_rewards", [0.5, 1]]   the parts of the reward that belong to single turns
["task", "{...}"]            the environment's task, as in Rollout.task
["transcript", "[5]", 2, false]  the result of an episode that is scored with its group: JSON, the number of turns,
                             and whether no token or turn was left; older logs lack the latter

An episode that is played again (another actor continues it, or the environment's process died) gets the logged turns
as long as its messages become the logged tokens. From the first difference on the episode is sampled again.
"""

import hashlib
import json
import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from pipelinerl_core.config import RunConfig
from pipelinerl_core.errors import EngineError, EnvironmentFailed, EnvironmentTimeout, RewardError
from pipelinerl_core.interfaces import ChatCodec, Engine, Environments
from pipelinerl_core.models.paths import resolve_model_path, within_context
from pipelinerl_core.rollouts.group_scoring import GroupScoring
from pipelinerl_core.rollouts.player import NO_PROMPT, EpisodeCounts, Sample, Sampled
from pipelinerl_core.rollouts.progress import Progress
from pipelinerl_core.rollouts.task_columns import task_text
from pipelinerl_core.types import (
    BoolArray,
    Completion,
    EngineRequest,
    FinishReason,
    Int32Array,
    Message,
    Played,
    Prompt,
    Reply,
    Sampler,
    Score,
    Transcript,
    TurnSpan,
)

logger = logging.getLogger(__name__)


def turn_seed(seed: int, turn: int) -> int:
    """Seed of the noise of one turn: each turn is a request of its own, whose positions count from 0."""
    if turn == 0:
        return seed
    digest = hashlib.blake2b(f"{seed}/turn/{turn}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


@dataclass(slots=True)
class _Turn:
    start: int
    context: int
    """Offset where the turn's context begins; 0: with the prompt."""
    end: int | None = None
    """None while the turn is sampled."""
    finish_reason: FinishReason | None = None


class Episode:
    """One episode; implements `interfaces.EpisodeHost`."""

    def __init__(
        self,
        engine: Engine,
        chat: ChatCodec,
        config: RunConfig,
        progress: Progress,
        *,
        request_id: str,
        sampler: Sampler,
        counts: EpisodeCounts,
        max_len: int,
    ) -> None:
        """progress: the episode so far, from its log, if the episode is played again. max_len: tokens that the engine
        allows in a context."""
        self._engine = engine
        self._chat = chat
        self._config = config
        self._progress = progress
        self._request_id = request_id
        self._sampler = sampler
        self._counts = counts
        self._max_len = max_len
        self._prompt: Int32Array | None = None
        self._turns: list[_Turn] = []
        self._asked = 0
        self._is_spent = False
        self._is_asking = False
        self._turn_rewards: tuple[float, ...] = ()
        self.transcript: Transcript | None = None
        """Of an episode that has ended and is scored with its group."""
        self.late = ""
        """The error beside the reward of an episode whose environment took too long."""
        self.once: dict[str, Any] = {}
        self.task = ""
        """What the environment says of its task; empty: nothing, the row of the prompt is the task."""
        for note in progress.notes:
            self._read(note)

    async def ask(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]], after: int) -> Reply | None:
        if self._is_asking:
            raise EnvironmentFailed("ask was called before the previous ask had its reply")
        self._is_asking = True
        try:
            return await self._ask(messages, tools, after)
        finally:
            self._is_asking = False

    def record(self, key: str, value: Any) -> None:
        self.once[key] = value
        self._progress.note(json.dumps(["once", key, value, self._asked]))

    def describe(self, task: Any) -> None:
        if not self.task:
            self.task = task_text(task)
            self._progress.note(json.dumps(["task", self.task]))

    def restart(self) -> None:
        self._asked = 0
        self._is_spent = False

    async def _ask(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]], after: int) -> Reply | None:
        index = self._asked
        if not -1 <= after < max(1, index):
            raise EnvironmentFailed(f"turn {index} cannot follow turn {after}")
        is_branch = after != index - 1
        given = self._given(index, messages, tools, after)
        if index < len(self._turns) and not self._is_logged(index, given, is_branch=is_branch):
            self._drop_from(index)
        if index == len(self._turns) and not self._begin(index, given, is_branch=is_branch):
            self._is_spent = True
            return None
        turn = self._turns[index]
        self._counts.replayed += (self._progress.num_tokens if turn.end is None else turn.end) - turn.start
        if turn.end is None:
            await self._sample(index, turn)
        assert turn.end is not None
        assert turn.finish_reason is not None
        self._asked += 1
        reply = self._chat.reply(self._progress.completion().token_ids[turn.start : turn.end], turn.finish_reason)
        num_before = turn.start - turn.context if turn.context else len(self.prompt_token_ids) + turn.start
        return replace(reply, num_tokens_before=num_before, tokens_left=self._room(turn.context, turn.end))

    def _given(
        self, index: int, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]], after: int
    ) -> Int32Array:
        """The tokens that the new messages become; of a branch, its whole context."""
        if index == 0:
            return first_tokens(self._chat, messages, tools, self._config.rollouts.max_prompt_tokens)
        if after < 0:
            return self._chat.first(messages, tools)
        earlier = self._turns[after]
        context = self._context(earlier.context, earlier.end)
        following = self._chat.following(messages, tools, int(context[-1]))
        return following if after == index - 1 else np.concatenate([context, following])

    def _context(self, start: int, end: int | None) -> Int32Array:
        """The tokens of the context that begins at offset `start` of the completion, up to offset `end`."""
        tokens = self._progress.completion().token_ids[start:end]
        return tokens if start else np.concatenate([self.prompt_token_ids, tokens])

    def _is_logged(self, index: int, given: Int32Array, *, is_branch: bool) -> bool:
        """Whether the log has the same tokens before turn `index`."""
        if index == 0:
            return np.array_equal(given, self._prompt if self._prompt is not None else NO_PROMPT)
        before, turn = self._turns[index - 1].end, self._turns[index]
        was_branch = turn.context != self._turns[index - 1].context
        return was_branch == is_branch and np.array_equal(
            given, self._progress.completion().token_ids[before : turn.start]
        )

    def _drop_from(self, index: int) -> None:
        """Drop turn `index`, all after it and what was recorded after it: the environment has acted differently than
        in the log."""
        num_kept = self._turns[index - 1].end if index else 0
        assert num_kept is not None
        num_dropped = self._progress.num_tokens - num_kept
        logger.warning(
            "%s: the environment acts differently than in the log from turn %d on, or ends before it; %d tokens are "
            "dropped", self._request_id, index, num_dropped,
        )  # fmt: skip
        self._counts.dropped += num_dropped
        notes, num_turns, self.once = [], 0, {}
        for note in self._progress.notes:
            kind, *values = json.loads(note)
            num_turns += kind == "turn"
            # A repeated play records values while the log has later turns already.
            before = values[2] if kind == "once" and len(values) > 2 else num_turns
            if kind == "task" or (before <= index and (index or kind == "once")):
                notes.append(note)
                if kind == "once":
                    self.once[values[0]] = values[1]
        self._progress.truncate(num_kept, tuple(notes))
        del self._turns[index:]

    def _begin(self, index: int, given: Int32Array, *, is_branch: bool) -> bool:
        """Begin turn `index` after the given tokens; False if no token, turn or branch is left."""
        environment, context = self._config.environment, 0
        if index >= environment.max_turns or (is_branch and len(self.branch_starts) >= environment.max_branches):
            return False
        if index == 0:
            self._prompt = given
            self._progress.note(json.dumps(["prompt", given.tolist()]))
        else:
            context = self._progress.num_tokens if is_branch else self._turns[-1].context
            if self._room(context, self._progress.num_tokens + len(given), opening=len(given) * is_branch) <= 0:
                return False
            self._progress.add_given(given)
            self._counts.given += len(given)
        self._turns.append(_Turn(self._progress.num_tokens, context))
        self._progress.note(json.dumps(["turn", self._progress.num_tokens, *([context] if is_branch else [])]))
        return True

    def _room(self, context: int, end: int, *, opening: int = 0) -> int:
        """Tokens that a context which begins at offset `context` may still have at offset `end`.

        All contexts share rollouts.max_tokens, without the tokens with which branches begin: those already there,
        and `opening` further ones. The engine limits each context. The log may have later branches.
        """
        limits, starts = self._config.rollouts, [start for start in self.branch_starts if start < end]
        openings = sum(next(turn.start for turn in self._turns if turn.context == start) - start for start in starts)
        length = end - context if context else len(self.prompt_token_ids) + end
        return min(limits.max_tokens - (end - openings - opening), self._max_len - length)

    async def _sample(self, index: int, turn: _Turn) -> None:
        """Sample a turn, or the rest of a turn whose first tokens are in the log."""
        whole = self._progress.completion()
        assert self._prompt is not None
        # At least 1, so that the engine refuses first messages that fill the context.
        room, limit = max(1, self._room(turn.context, turn.start)), self._config.environment.turn_tokens
        request = EngineRequest(
            request_id=f"{self._request_id}.t{index}",
            prompt_token_ids=self._context(turn.context, turn.start),
            max_tokens=min(room, limit) if limit else room,
            sampler=replace(self._sampler, seed=turn_seed(self._sampler.seed, index)),
            prior=_part(whole, turn.start),
            is_turn=True,
            min_version=_newest(whole, turn.start),
        )
        async for chunk in self._engine.generate(request):
            self._progress.add(chunk, turn.start)
            if chunk.completion is not None:
                turn.end, turn.finish_reason = self._progress.num_tokens, chunk.completion.finish_reason
                self._progress.note(json.dumps(["end", turn.end, str(turn.finish_reason)]))
                return
        raise EngineError(f"request {request.request_id} ended without a completion")

    @property
    def prompt_token_ids(self) -> Int32Array:
        """[P] tokens of the first messages; one token 0 if the episode failed before its first turn."""
        return self._prompt if self._prompt is not None else NO_PROMPT

    @property
    def finish_reason(self) -> FinishReason:
        """LENGTH if the last turn was cut off, or if no token or turn was left; else STOP."""
        is_cut = self._is_spent or any(turn.finish_reason is FinishReason.LENGTH for turn in self._turns[-1:])
        return FinishReason.LENGTH if is_cut else FinishReason.STOP

    @property
    def turn_spans(self) -> tuple[TurnSpan, ...]:
        """The turns with at least one token; empty if the whole completion is one turn."""
        num_tokens = self._progress.num_tokens
        spans = [TurnSpan(turn.start, num_tokens if turn.end is None else turn.end) for turn in self._turns]
        spans = [span for span in spans if span.end > span.start]
        return () if spans == [TurnSpan(0, num_tokens)] else tuple(spans)

    @property
    def branch_starts(self) -> tuple[int, ...]:
        """Offsets in the completion where branches begin (Rollout.branch_starts)."""
        return tuple(sorted({turn.context for turn in self._turns} - {0}))

    @property
    def turn_rewards(self) -> tuple[float, ...]:
        """Parts of the reward by turn; empty without such parts."""
        return self._turn_rewards

    @property
    def has_turn(self) -> bool:
        """Whether the environment has had a turn of the model since it began to play."""
        return self._asked > 0

    def end(self, played: Played, late: str = "") -> None:
        """Store the result. Raises EnvironmentFailed if it does not belong to these turns.

        late: see `self.late`.
        """
        if self.transcript is None:
            self._drop_unplayed()
        if not self.loss_mask.any():
            raise EnvironmentFailed("the episode ended without a turn of the model: play has not called ask")
        if played.turn_rewards and len(played.turn_rewards) != len(self._turns):
            raise EnvironmentFailed(f"{len(played.turn_rewards)} rewards of turns for {len(self._turns)} turns")
        self._turn_rewards = played.turn_rewards
        if played.turn_rewards:
            self._progress.note(json.dumps(["turn_rewards", played.turn_rewards]))
        if late:
            self._progress.note(json.dumps(["late", late]))
        self._progress.finish(self.finish_reason)
        self._progress.score(played.score)

    def ended(self, transcript: Transcript) -> None:
        """Store the transcript; the reward follows when all episodes of the group have ended."""
        self._drop_unplayed()
        self.transcript = transcript
        self._progress.note(json.dumps(["transcript", *transcript, self._is_spent]))

    def _drop_unplayed(self) -> None:
        """Drop the turns of the log that the environment has not asked for: it has ended earlier."""
        if self._asked < len(self._turns):
            self._drop_from(self._asked)

    @property
    def loss_mask(self) -> BoolArray:
        """[C] True on sampled tokens."""
        mask_C = np.zeros(self._progress.num_tokens, np.bool_)
        for turn in self._turns:
            mask_C[turn.start : turn.end] = True
        return mask_C

    def _read(self, note: str) -> None:
        """Restore the state that a note describes."""
        kind, *values = json.loads(note)
        if kind == "prompt":
            self._prompt = np.array(values[0], np.int32)
        elif kind == "turn":
            context = self._turns[-1].context if self._turns else 0
            self._turns.append(_Turn(values[0], *values[1:] or [context]))
        elif kind == "end":
            self._turns[-1].end, self._turns[-1].finish_reason = values[0], FinishReason(values[1])
        elif kind == "once":
            self.once[values[0]] = values[1]
        elif kind == "task":
            self.task = values[0]
        elif kind == "late":
            self.late = values[0]
        elif kind == "turn_rewards":
            self._turn_rewards = tuple(values[0])
        elif kind == "transcript":
            self.transcript, self._is_spent = Transcript(*values[:2]), any(values[2:])


class EpisodePlayer:
    """Plays episodes on one engine."""

    def __init__(
        self,
        engine: Engine,
        environments: Environments,
        chat: ChatCodec,
        config: RunConfig,
    ) -> None:
        self._engine = engine
        self._environments = environments
        self._chat = chat
        self.config = config
        self.counts = EpisodeCounts()
        longest = config.rollouts.max_prompt_tokens + config.rollouts.max_tokens
        directory = resolve_model_path(config.model.path)
        self._max_len = within_context(directory, longest) if directory else longest  # as the engines do

    def begin(self, prompt: Prompt, size: int) -> Sample:
        """See `Player.begin`. Nothing is played if the log has the reward.

        An episode whose environment takes too long has the reward environment.timeout_reward, and its error.
        """
        group = self.group(prompt, size)
        late = Played(score=Score(self.config.environment.timeout_reward))

        async def sample(index: int, request_id: str, sampler: Sampler, progress: Progress) -> Sampled:
            episode = self.episode(progress, request_id=request_id, sampler=sampler)
            error, is_late, logged = None, False, None
            try:
                if progress.outcome is None or episode.transcript is not None:
                    await self.play(episode, prompt, sampler.seed, group, index)
                else:
                    logged = episode.late or None
                    await group.ended()
            except EngineError as failure:
                error = f"engine: {failure}"
            except RewardError as failure:
                error = f"environment: {failure}"
                is_late = isinstance(failure, EnvironmentTimeout) and episode.has_turn
            if is_late:
                episode.end(late, error or "")
            elif error is not None and not getattr(self._engine, "failure", ""):  # else another actor plays on
                progress.finish(FinishReason.ABORT)
                progress.score(None)
            return Sampled(
                prompt_token_ids=episode.prompt_token_ids,
                completion=progress.completion(),
                loss_mask=episode.loss_mask,
                turn_spans=episode.turn_spans,
                turn_rewards=episode.turn_rewards,
                branch_starts=episode.branch_starts,
                task=episode.task,
                finished_at=time.time(),
                error=error or logged,
            )

        return sample

    def episode(self, progress: Progress, *, request_id: str, sampler: Sampler) -> Episode:
        return Episode(
            self._engine, self._chat, self.config, progress, request_id=request_id, sampler=sampler,
            counts=self.counts, max_len=self._max_len,
        )  # fmt: skip

    def group(self, prompt: Prompt, size: int) -> GroupScoring:
        task = task_of(self.config, prompt)
        return GroupScoring(size, lambda transcripts: self._environments.score_group(task, transcripts))

    async def play(self, episode: Episode, prompt: Prompt, seed: int, group: GroupScoring, index: int) -> Played:
        """Play and score an episode. Raises EnvironmentFailed, EngineError.

        index: position of the episode in its group. An episode whose transcript is in the log is only scored.
        """
        transcript = episode.transcript
        try:
            if transcript is None:
                result = await self._environments.play(task_of(self.config, prompt), seed, episode)
                if isinstance(result, Transcript):
                    transcript = result
                    episode.ended(transcript)
                else:
                    played = result
        except (EngineError, RewardError):
            await group.ended()
            raise
        if transcript is None:
            await group.ended()
        else:
            played = await group.scored(index, transcript)
        episode.end(played)
        return played


def task_of(config: RunConfig, prompt: Prompt) -> Mapping[str, Any]:
    """What an environment gets: the position of a task of its own, or the row of a prompt with the prompt's text,
    and the conversation of a prompt as `messages` and `prompt_messages`: a row may have its own column `messages`."""
    if config.prompts.from_environment:
        return prompt.task
    if not prompt.messages:
        return {**prompt.task, "prompt": prompt.text}
    messages = list(prompt.messages)
    return {"messages": messages, **prompt.task, "prompt": prompt.text, "prompt_messages": messages}


def first_tokens(
    chat: ChatCodec, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]], limit: int
) -> Int32Array:
    """[P] tokens of the first messages of an episode; raises EnvironmentFailed if there are more than `limit`."""
    prompt = chat.first(messages, tools)
    if not 0 < len(prompt) <= limit:
        raise EnvironmentFailed(
            f"the first messages have {len(prompt)} tokens; from 1 to rollouts.max_prompt_tokens={limit}"
        )
    return prompt


def _part(whole: Completion, start: int) -> Completion | None:
    """The tokens from offset `start` on, as the prior of a request; None without such tokens."""
    if len(whole.token_ids) == start:
        return None
    spans = [span._replace(start=max(span.start, start) - start, end=span.end - start)
             for span in whole.weight_spans if span.end > start]  # fmt: skip
    return Completion(
        token_ids=whole.token_ids[start:],
        rollout_logprobs=whole.rollout_logprobs[start:],
        weight_spans=tuple(spans),
        finish_reason=FinishReason.ABORT,
    )


def _newest(whole: Completion, end: int) -> int:
    """Version of the token before offset `end`; -1 without such a token."""
    return max((span.version for span in whole.weight_spans if span.start < end), default=-1)
