"""How busy trainer and actors were, computed from the commits.

The span is the wall clock between the commits of the first and the last trained step. The start of the processes,
before the span, is not part of the steady state.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from pipelinerl_core.run.records import ActorSample, Commit


@dataclass(frozen=True, slots=True)
class ActorUse:
    """All actors together over the span."""

    idle_fraction: float
    """1 - mean(running) / concurrency, pauses and restarts included."""
    tokens_per_second: float
    """Completion tokens sampled."""


def span(commits: Sequence[Commit]) -> tuple[float, float] | None:
    """(start, end) in Unix seconds of the trained steps, by step; None for fewer than two."""
    trained = [commit for commit in commits if commit.step > 0]
    if len(trained) < 2 or trained[-1].committed_at <= trained[0].committed_at:
        return None
    return trained[0].committed_at, trained[-1].committed_at


def wait_seconds(commit: Commit, previous: Commit | None) -> float:
    """Time the trainer waited for the groups of a step: as measured, else the time since the previous computation."""
    measured = commit.metrics.get("time/reserve_wait_seconds")
    if measured is not None:
        return measured
    return max(0.0, commit.reserved_at - previous.computed_at) if previous else 0.0


def trainer_idle_fraction(commits: Sequence[Commit]) -> float | None:
    """Time waiting for a reservation over the span; None for fewer than two trained steps."""
    bounds = span(commits)
    if bounds is None:
        return None
    start, end = bounds
    trained = [commit for commit in commits if commit.step > 0]
    waited = sum(
        max(0.0, min(wait_seconds(commit, previous), commit.reserved_at - start))
        for previous, commit in itertools.pairwise(trained)
    )
    return waited / (end - start)


def actor_use(commits: Sequence[Commit]) -> ActorUse | None:
    """Use of the actors' slots over the span; None if the span has too few samples.

    Per actor, between two samples: capacity = concurrency * time, use = growth of the running_seconds integrals of
    all its epochs (a restarted actor counts from 0 again, so that its absence counts as idle). A pair of samples that
    begins before the span counts with its share inside the span.
    """
    bounds = span(commits)
    if bounds is None:
        return None
    start, used, capacity, tokens, newest = bounds[0], 0.0, 0.0, 0.0, bounds[0]
    for series in _series(commits).values():
        for before, after in itertools.pairwise(series):
            seconds = after.at - before.at
            inside = after.at - max(before.at, start)
            if seconds <= 0 or inside <= 0:
                continue
            capacity += inside * after.concurrency
            used += (after.running_seconds - before.running_seconds) * inside / seconds
            tokens += (after.num_tokens - before.num_tokens) * inside / seconds
            newest = max(newest, after.at)
    if capacity <= 0:
        return None
    return ActorUse(idle_fraction=1 - used / capacity, tokens_per_second=tokens / (newest - start))


def wait_shares(commits: Sequence[Commit]) -> dict[str, float] | None:
    """Cause -> share of the span, as measured by the hub; None without a measurement or with fewer than two steps.

    engine, window and stale_wait are shares of the trainer's time, actors is a share of the time of all engines.
    """
    bounds = span(commits)
    trained = [commit for commit in commits if commit.step > 0]
    if bounds is None or not trained[-1].waits:
        return None
    first, last, seconds = trained[0].waits, trained[-1].waits, bounds[1] - bounds[0]
    num_actors = max(1, len({key.rpartition("/")[0] for commit in trained for key in commit.actors}))
    shares = {cause: max(0.0, total - first.get(cause, 0.0)) / seconds for cause, total in last.items()}
    return {**shares, "actors": shares.get("actors", 0.0) / num_actors}


@dataclass(frozen=True, slots=True)
class _Total:
    """An actor over all its epochs at one reservation."""

    at: float
    concurrency: int
    running_seconds: float
    num_tokens: int


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
                    num_tokens=sum(sample.num_tokens for sample in epochs.values()),
                )
            )
    return series
