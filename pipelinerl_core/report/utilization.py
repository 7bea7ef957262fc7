"""How busy trainer and actors were, computed from the commits.

The span is the wall clock between the commits of the first and the last published version, so that it has whole
phases, without the time in which the whole run was down: from the last commit before a kill to the first commit after
the resume. The start of the processes and the first evaluation, before the span, are not part of the steady state
either.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from pipelinerl_core.messages import ActorSample
from pipelinerl_core.run.records import Commit


@dataclass(frozen=True, slots=True)
class ActorUse:
    """All actors together over the span."""

    idle_fraction: float
    """1 - mean(running) / concurrency, pauses and restarts included."""
    tokens_per_second: float
    """Completion tokens sampled."""


def stretches(commits: Sequence[Commit]) -> list[list[Commit]]:
    """The trained commits by step, split where the whole run was down."""
    parts: list[list[Commit]] = []
    for commit in commits:
        if commit.step > 0 and parts and not _was_down(parts[-1][-1], commit):
            parts[-1].append(commit)
        elif commit.step > 0:
            parts.append([commit])
    return parts


def span_seconds(commits: Sequence[Commit]) -> float | None:
    """Seconds of the span; None for fewer than two trained steps in a stretch."""
    return sum(part[-1].committed_at - part[0].committed_at for part in spans(commits)) or None


def whole_phases(commits: Sequence[Commit]) -> Sequence[Commit]:
    """From the first to the last published version of consecutive commits; all commits for fewer than two versions.

    A phase of several steps generates before its first step, and publishes the version of its last step.
    """
    published = [index for index, commit in enumerate(commits) if commit.manifest is not None]
    return commits[published[0] : published[-1] + 1] if len(published) > 1 else commits


def down_seconds(commits: Sequence[Commit]) -> float:
    """Seconds from the last commit before to the first commit after each time in which the whole run was down."""
    parts = stretches(commits)
    return sum(after[0].committed_at - before[-1].committed_at for before, after in itertools.pairwise(parts))


def _was_down(before: Commit, after: Commit) -> bool:
    """Whether trainer and all actors were started again between two commits."""
    continued = before.actors.keys() & after.actors.keys()
    return (
        before.epoch != after.epoch
        and bool(before.actors)
        and not any(after.actors[key].at > before.actors[key].at for key in continued)
    )


def spans(commits: Sequence[Commit]) -> list[Sequence[Commit]]:
    """The whole phases of each stretch, as far as time passed between their commits."""
    parts = map(whole_phases, stretches(commits))
    return [part for part in parts if part[-1].committed_at > part[0].committed_at]


def wait_seconds(commit: Commit, previous: Commit | None) -> float:
    """Time the trainer waited for the groups of a step: as measured, else the time since the previous computation."""
    measured = commit.metrics.get("time/reserve_wait_seconds")
    if measured is not None:
        return measured
    return max(0.0, commit.reserved_at - previous.computed_at) if previous else 0.0


def trainer_idle_fraction(commits: Sequence[Commit]) -> float | None:
    """Time waiting for a reservation over the span; None for fewer than two trained steps."""
    seconds = span_seconds(commits)
    if seconds is None:
        return None
    waited = sum(
        max(0.0, min(wait_seconds(commit, previous), commit.reserved_at - part[0].committed_at))
        for part in spans(commits)
        for previous, commit in itertools.pairwise(part)
    )
    return waited / seconds


def actor_use(commits: Sequence[Commit]) -> ActorUse | None:
    """Use of the actors' slots over the span; None if the span has too few samples.

    Per actor, between two samples: capacity = concurrency * time, use = growth of the running_seconds integrals of
    all its epochs (a restarted actor counts from 0 again, so that its absence counts as idle). A pair of samples that
    begins before the span counts with its share inside the span.
    """
    used = capacity = tokens = seconds = 0.0
    for part in spans(commits):
        newest = start = part[0].committed_at
        for series in _series(part).values():
            for before, after in itertools.pairwise(series):
                passed = after.at - before.at
                inside = after.at - max(before.at, start)
                if passed <= 0 or inside <= 0:
                    continue
                capacity += inside * after.concurrency
                used += (after.running_seconds - before.running_seconds) * inside / passed
                tokens += (after.num_sampled - before.num_sampled) * inside / passed
                newest = max(newest, after.at)
        seconds += newest - start
    if capacity <= 0:
        return None
    return ActorUse(idle_fraction=1 - used / capacity, tokens_per_second=tokens / seconds)


def pause_seconds(before: ActorSample, after: ActorSample) -> float:
    """Mean pause after a decode step, with which an actor kept the trainer's pace between two samples."""
    num_sampled = after.num_sampled - before.num_sampled
    if num_sampled <= 0:
        return after.counters.step_delay_seconds
    return (after.counters.paced_seconds - before.counters.paced_seconds) / num_sampled


def wait_shares(commits: Sequence[Commit]) -> dict[str, float] | None:
    """Cause -> share of the span, as measured by the hub; None without a measurement or with fewer than two steps.

    engine, window and stale_wait are shares of the trainer's time, actors is a share of the time of all engines.
    """
    seconds, parts = span_seconds(commits), spans(commits)
    if seconds is None or not parts[-1][-1].waits:
        return None
    num_actors = max(1, len({key.rpartition("/")[0] for part in parts for commit in part for key in commit.actors}))
    shares = dict.fromkeys(parts[-1][-1].waits, 0.0)
    for first, last in ((part[0].waits, part[-1].waits) for part in parts):
        for cause in shares:
            shares[cause] += max(0.0, last.get(cause, 0.0) - first.get(cause, 0.0)) / seconds
    return {**shares, "actors": shares.get("actors", 0.0) / num_actors}


@dataclass(frozen=True, slots=True)
class _Total:
    """An actor over all its epochs at one reservation."""

    at: float
    concurrency: int
    running_seconds: float
    num_sampled: int


def _series(commits: Sequence[Commit]) -> dict[str, list[_Total]]:
    """Actor -> its totals at every reservation with a sample of the actor, in order."""
    newest: dict[str, dict[int, ActorSample]] = {}
    series: dict[str, list[_Total]] = {}
    for commit in commits:
        present = set()
        for key, sample in commit.actors.items():
            actor, _, epoch = key.rpartition("/")
            newest.setdefault(actor, {})[int(epoch)] = sample
            present.add(actor)
        for actor in sorted(present):
            epochs = newest[actor]
            series.setdefault(actor, []).append(
                _Total(
                    at=max(sample.at for sample in epochs.values()),
                    concurrency=epochs[max(epochs)].concurrency,
                    running_seconds=sum(sample.running_seconds for sample in epochs.values()),
                    num_sampled=sum(sample.num_sampled for sample in epochs.values()),
                )
            )
    return series
