"""Samples and scores the rollouts of a leased group, one asyncio task per rollout.

lease --> group_size x Player.begin(prompt) --> Rollout --> group
"""

import asyncio
import hashlib
import time
from collections.abc import Iterable, Mapping

from pipelinerl_core.messages import Lease
from pipelinerl_core.rollouts.player import Player, Sample
from pipelinerl_core.rollouts.progress import Progress
from pipelinerl_core.rollouts.task_columns import task_text
from pipelinerl_core.types import FinishReason, Outcome, PartialRow, Rollout, Sampler


def rollout_seed(seed: int, group_id: int, rollout_index: int) -> int:
    """Seed of one rollout's noise: a function of the run's seed, the group and the rollout's index only."""
    digest = hashlib.blake2b(f"{seed}/{group_id}/{rollout_index}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


class GroupRunner:
    """Turns leases into finished groups on one engine."""

    def __init__(self, players: Mapping[str, Player], *, actor: str) -> None:
        """players: by part of the mixture, which `lease.prompt.source` names; without a mixture, {"": player}."""
        self._players = players
        self._actor = actor
        self._open: dict[tuple[int, int], list[Progress]] = {}

    async def run(self, lease: Lease, restored: Mapping[int, PartialRow] | None = None) -> list[Rollout]:
        """All rollouts of a lease, by rollout_index. Cancelling the call aborts the sequences.

        restored: rollout_index -> the logged part, from previous holders; the rest is sampled and scored.
        """
        known = restored or {}
        progress = [
            Progress(group_id=lease.group_id, rollout_index=index, attempt=lease.attempt, restored=known.get(index))
            for index in range(lease.group_size)
        ]
        self._open[lease.group_id, lease.attempt] = progress
        player = self._players["" if "" in self._players else lease.prompt.source]
        sample = player.begin(lease.prompt, lease.group_size)
        task = task_text(lease.prompt.task)
        try:
            async with asyncio.TaskGroup() as tasks:
                rollouts = [
                    tasks.create_task(self._rollout(lease, task, index, progress[index], player, sample))
                    for index in range(lease.group_size)
                ]
        except BaseException:
            self.forget([(lease.group_id, lease.attempt)])
            raise
        return [task.result() for task in rollouts]

    def growth(self) -> list[PartialRow]:
        """The parts of all open groups that are new since the last call, for the write-ahead log."""
        rows = (progress.growth() for group in self._open.values() for progress in group)
        return [row for row in rows if row is not None]

    def forget(self, keys: Iterable[tuple[int, int]]) -> None:
        """Drop groups, (group_id, attempt), that are in a segment or no longer leased to this actor."""
        for key in keys:
            self._open.pop(key, None)

    async def _rollout(
        self, lease: Lease, task: str, index: int, progress: Progress, player: Player, sample: Sample
    ) -> Rollout:
        limits = player.config.rollouts
        sampler = Sampler(
            temperature=limits.temperature,
            top_p=limits.top_p,
            seed=rollout_seed(player.config.seed, lease.group_id, index),
        )
        started_at = time.time()
        sampled = await sample(index, f"{lease.lease_id}.{index}", sampler, progress)
        reward = progress.reward
        completion = sampled.completion
        return Rollout(
            group_id=lease.group_id,
            rollout_index=index,
            attempt=lease.attempt,
            lease_id=lease.lease_id,
            prompt_id=lease.prompt.prompt_id,
            source=lease.prompt.source,
            env=lease.prompt.env,
            task=sampled.task or task,
            actor=self._actor,
            group_size=lease.group_size,
            prompt_token_ids=sampled.prompt_token_ids,
            completion_token_ids=completion.token_ids,
            rollout_logprobs=completion.rollout_logprobs,
            weight_spans=completion.weight_spans,
            loss_mask=sampled.loss_mask,
            turn_spans=sampled.turn_spans,
            branch_starts=sampled.branch_starts,
            turn_rewards=sampled.turn_rewards if reward is not None else (),
            reward=reward,
            outcome=Outcome.SCORED if reward is not None else Outcome.ERROR,
            finish_reason=completion.finish_reason or FinishReason.ABORT,
            error=sampled.error,
            sampler=sampler,
            max_tokens=limits.max_tokens,
            started_at=started_at,
            finished_at=sampled.finished_at,
            scored_at=time.time(),
            origins=progress.origins if len(completion.token_ids) else (),
            reward_components=progress.reward_components if reward is not None else (),
        )
