"""Incremental reading of a run's objects while the run grows: counting commits, evaluations, derived metrics."""

from collections.abc import Mapping
from dataclasses import dataclass

from pipelinerl_core.interfaces import ObjectStore, Tracker
from pipelinerl_core.run.history import counting
from pipelinerl_core.run.reading import read_record
from pipelinerl_core.run.records import EVALS_PREFIX, RUN_KEY, ActorSample, Commit, EpochRecord, EvalRecord, RunRecord
from pipelinerl_core.telemetry.length_bias import length_metrics
from pipelinerl_core.telemetry.metrics import finite

PROGRESS = ("progress/samples", "progress/tokens", "progress/seconds")
"""Metrics that serve as x axes."""


@dataclass(frozen=True, slots=True)
class News:
    """New records of one refresh."""

    commits: tuple[Commit, ...]
    """Commits that count and were not delivered before, by step."""
    evals: tuple[EvalRecord, ...]
    """New evaluations, by version."""


class RunFollower:
    """Reads each object of a run once. Call `refresh` repeatedly. Not thread-safe."""

    def __init__(self, store: ObjectStore) -> None:
        """`store`: the store of the run (the root's child named by the run_id)."""
        self.store = store
        self.commits: dict[int, Commit] = {}
        """Step -> the commit that counts, by step."""
        self.evals: dict[int, EvalRecord] = {}
        """Version -> evaluation on the run's own held-out prompts, by version."""
        self.set_evals: dict[str, dict[int, EvalRecord]] = {}
        """The same by name of a set of eval.sets."""
        self._run: RunRecord | None = None
        self._epochs: dict[str, EpochRecord] = {}
        self._eval_keys: set[str] = set()
        self._cache: dict[str, Commit] = {}
        self._delivered: set[str] = set()

    @property
    def run(self) -> RunRecord:
        """run.json; raises MissingObject if there is no such run."""
        if self._run is None:
            self._run = read_record(self.store, RUN_KEY, RunRecord)
        return self._run

    @property
    def last(self) -> Commit | None:
        """The newest commit that counts."""
        return next(reversed(self.commits.values()), None)

    def before(self, commit: Commit) -> Commit | None:
        """The counting commit before this one."""
        steps = range(commit.step - 1, -1, -1)
        return next((self.commits[step] for step in steps if step in self.commits), None)

    def refresh(self) -> News:
        """Read and return the new records."""
        # Commits are listed before epochs, so that the listed epochs include every epoch that fences a listed commit.
        commit_keys = self.store.list("commits")
        self._read_epochs()
        chosen = counting(commit_keys, self._epochs.values())
        for key in chosen.values():
            if key not in self._cache:
                self._cache[key] = read_record(self.store, key, Commit)
        self.commits = {step: self._cache[key] for step, key in chosen.items()}
        evals = self._read_evals()  # before commits count as delivered, so that a StoreError here loses none of them
        fresh = tuple(self._cache[key] for key in chosen.values() if key not in self._delivered)
        self._delivered.update(chosen.values())
        return News(commits=fresh, evals=evals)

    def _read_epochs(self) -> None:
        for key in self.store.list("epochs"):
            if key not in self._epochs:
                self._epochs[key] = read_record(self.store, key, EpochRecord)

    def _read_evals(self) -> tuple[EvalRecord, ...]:
        new_keys = [key for key in self.store.list(EVALS_PREFIX) if key not in self._eval_keys]
        fresh = [read_record(self.store, key, EvalRecord) for key in new_keys]
        self._eval_keys.update(new_keys)
        for record in fresh:
            known = self.set_evals.setdefault(record.set, {}) if record.set else self.evals
            known[record.version] = record
        self.evals = dict(sorted(self.evals.items()))
        self.set_evals = {name: dict(sorted(known.items())) for name, known in sorted(self.set_evals.items())}
        return tuple(fresh)


def forward(follower: RunFollower, tracker: Tracker) -> int:
    """Refresh, log the new records to the tracker; returns the number of commits and evaluations."""
    news = follower.refresh()
    for commit in news.commits:
        tracker.log(commit.step, commit_metrics(commit, follower.before(commit)))
    for record in news.evals:
        tracker.log(record.version, eval_metrics(record))
    return len(news.commits) + len(news.evals)


def commit_metrics(commit: Commit, previous: Commit | None) -> dict[str, float]:
    """All metrics of a step: the commit's own, and the metrics derived from it and the previous commit."""
    versions = [sample.engine_version for sample in commit.actors.values()]
    manifest = commit.manifest
    derived = {
        "swap/pause_seconds_max": max((swap.pause_seconds for swap in commit.swaps), default=None),
        "weights/live_min": min(versions, default=None),
        "weights/live_max": max(versions, default=None),
        "weights/bytes": manifest.num_bytes if manifest else None,
        "weights/published_seconds": max(0.0, manifest.published_at - commit.computed_at) if manifest else None,
    }
    tokens = {f"tokens/{name}": count for name, count in commit.tokens.items()}
    # The origin of the x axes, where the accuracy of version 0 is plotted.
    origin = dict.fromkeys(PROGRESS, 0.0) if commit.step == 0 else {}
    speed = actor_speed(previous.actors, commit.actors) if previous else {}
    lengths = length_metrics(commit.lengths, previous.lengths if previous else {})
    waits = wait_metrics(commit.waits, previous.waits if previous else {})
    replays = replay_metrics(previous.actors if previous else {}, commit.actors)
    return finite({**derived, **origin, **tokens, **lengths, **waits, **speed, **replays, **commit.metrics})


def eval_metrics(record: EvalRecord) -> dict[str, float]:
    """The metrics of an evaluation."""
    values = {
        "accuracy": record.known_accuracy,
        "accuracy_low": record.low,
        "accuracy_high": record.high,
        "best": record.best,
        "greedy": record.greedy,
        "mean_tokens": record.mean_tokens,
        "lag": record.lag,
        **{f"component/{name}": value for name, value in record.components.items()},
    }
    return finite({f"eval/{f'{record.set}/' if record.set else ''}{name}": value for name, value in values.items()})


def wait_metrics(now: Mapping[str, float], before: Mapping[str, float]) -> dict[str, float]:
    """Seconds waited between two reservations, by cause."""
    return {f"wait/{cause}_seconds": max(0.0, total - before.get(cause, 0.0)) for cause, total in now.items()}


def replay_metrics(before: Mapping[str, ActorSample], now: Mapping[str, ActorSample]) -> dict[str, float]:
    """Tokens of earlier plays of episodes that were used again or dropped between two reservations, all actors."""
    found: dict[str, float] = {}
    for name, sample in now.items():
        for kind in ("replayed", "dropped"):
            counter = f"environment_{kind}_tokens"
            if counter in sample.counters:
                earlier = before[name].counters.get(counter, 0.0) if name in before else 0.0
                key = f"environment/{kind}_tokens"
                found[key] = found.get(key, 0.0) + sample.counters[counter] - earlier
    return found


def actor_speed(before: Mapping[str, ActorSample], now: Mapping[str, ActorSample]) -> dict[str, float]:
    """Mean running sequences and tokens per second between two reservations, summed over actor epochs in both."""
    running, speed, is_known = 0.0, 0.0, False
    for name, sample in now.items():
        earlier = before.get(name)
        if earlier is not None and sample.at > earlier.at:
            seconds = sample.at - earlier.at
            running += (sample.running_seconds - earlier.running_seconds) / seconds
            speed += (sample.num_tokens - earlier.num_tokens) / seconds
            is_known = True
    return {"actor/running_mean": running, "actor/tokens_per_second": speed} if is_known else {}
