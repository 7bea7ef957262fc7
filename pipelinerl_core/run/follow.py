"""Incremental reading of a run's objects while the run grows: counting commits, evaluations, derived metrics."""

import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from pipelinerl_core.errors import ConfigError
from pipelinerl_core.interfaces import ObjectStore, Tracker
from pipelinerl_core.messages import ActorSample, Counters
from pipelinerl_core.models.resolve import build_config, resume_config
from pipelinerl_core.run.commits import Commits
from pipelinerl_core.run.compacted import list_commits
from pipelinerl_core.run.context import resume_overrides
from pipelinerl_core.run.history import counting
from pipelinerl_core.run.reading import find_record, list_keys, read_record
from pipelinerl_core.run.records import EVALS_PREFIX, RUN_KEY, Commit, EpochRecord, EvalRecord, RunRecord
from pipelinerl_core.telemetry.length_bias import length_metrics
from pipelinerl_core.telemetry.metrics import finite
from pipelinerl_core.types import LoggedStep

_REREAD, _REREAD_SECONDS = 8, 60.0
"""So many of the newest evaluations are read again so often: `pipelinerl evaluate` replaces them."""
PROGRESS = ("progress/samples", "progress/tokens", "progress/seconds")
"""Metrics that serve as x axes."""


@dataclass(frozen=True, slots=True)
class News:
    """New records of one refresh."""

    steps: Sequence[int]
    """Steps of the commits that count and were not delivered before, ascending."""
    evals: tuple[EvalRecord, ...]
    """New evaluations, by version."""


class RunFollower:
    """Reads the objects of a run while the run grows. Call `refresh` repeatedly. Not thread-safe."""

    def __init__(self, store: ObjectStore) -> None:
        """`store`: the store of the run (the root's child named by the run_id)."""
        self.store = store
        self.commits = Commits(store)
        """Step -> the commit that counts, by step."""
        self.evals: dict[int, EvalRecord] = {}
        """Version -> evaluation on the run's own held-out prompts, by version."""
        self.set_evals: dict[str, dict[int, EvalRecord]] = {}
        """The same by name of a set of eval.sets."""
        self._run: RunRecord | None = None
        self._overrides: tuple[str, ...] = ()
        self._epochs: dict[str, EpochRecord] = {}
        self._eval_keys: set[str] = set()
        self._evals_read_at = time.monotonic()
        self._delivered: set[str] = set()

    @property
    def run(self) -> RunRecord:
        """run.json, with the configuration as resumes have changed it; raises MissingObject without such a run."""
        if self._run is None:
            record, self._overrides = read_record(self.store, RUN_KEY, RunRecord), resume_overrides(self.store)
            self._run = _resumed(record, self._overrides)
        return self._run

    @property
    def last(self) -> Commit | None:
        """The newest commit that counts."""
        return next(iter(self.commits.newest(1)), None)

    def before(self, commit: Commit) -> Commit | None:
        steps = range(commit.step - 1, -1, -1)
        return next((self.commits[step] for step in steps if step in self.commits), None)

    def refresh(self) -> News:
        """Read and return the new records."""
        if self._run is not None and resume_overrides(self.store) != self._overrides:
            self._run = None
        listing = list_commits(self.store)  # before the epochs (see `counting`)
        self._read_epochs()
        self.commits.select(counting(listing.keys(), self._epochs.values()), listing)
        chosen, originals = self.commits.keys_by_step, set(listing.originals)
        fresh = [step for step, key in chosen.items() if key not in self._delivered]
        for step in fresh:
            if chosen[step] in originals:
                self.commits[step]  # raises StoreError here, and not where the commit is used
        evals = self._read_evals()  # before commits count as delivered, so that a StoreError here loses none of them
        self._delivered.update(chosen.values())
        return News(steps=fresh, evals=evals)

    def _read_epochs(self) -> None:
        for key in list_keys(self.store, "epochs"):
            if key not in self._epochs or self._epochs[key].is_claim:
                self._epochs[key] = read_record(self.store, key, EpochRecord)

    def _read_evals(self) -> tuple[EvalRecord, ...]:
        keys = sorted(list_keys(self.store, EVALS_PREFIX))
        again: set[str] = set()
        if time.monotonic() - self._evals_read_at >= _REREAD_SECONDS:
            again, self._evals_read_at = set(keys[-_REREAD:]), time.monotonic()
        unread = [key for key in keys if key not in self._eval_keys or key in again]
        read = [find_record(self.store, key, EvalRecord) for key in unread]
        self._eval_keys.update(keys)
        # None: `accept-loss` has removed the evaluation of a lost step since the listing.
        fresh = [record for record in read if record is not None and not self._is_known(record)]
        for record in fresh:
            known = self.set_evals.setdefault(record.set, {}) if record.set else self.evals
            known[record.version] = record
        self.evals = dict(sorted(self.evals.items()))
        self.set_evals = {name: dict(sorted(known.items())) for name, known in sorted(self.set_evals.items())}
        return tuple(fresh)

    def _is_known(self, record: EvalRecord) -> bool:
        own = self.set_evals.get(record.set, {}) if record.set else self.evals
        return own.get(record.version) == record


class Forwarder:
    """Logs the commits and evaluations of a run to a tracker, in order and as far as the tracker has room."""

    def __init__(self, follower: RunFollower, tracker: Tracker) -> None:
        self._follower = follower
        self._tracker = tracker
        self._next: int | None = None
        self._evals: deque[EvalRecord] = deque()

    def refresh(self) -> None:
        """Read the new records of the run and log them."""
        self._evals.extend(self._follower.refresh().evals)
        self.push()

    def push(self) -> bool:
        """Log the records that the follower has read; returns whether all are logged.

        Reads the store for compacted commits only. Raises StoreError; the next call continues.
        """
        last, logged = self._follower.last, self._tracker.logged
        if last is None:
            return not self._evals
        if logged is None:
            return False
        if self._next is None:
            if not self._has(logged):  # one wrong listing must not end the tracker's timeline
                self._evals.extend(self._follower.refresh().evals)
            if not self._has(logged):
                self._tracker.start_over(last.step)
                return False
            self._next = logged.step + 1
        while self._next <= last.step and self._tracker.room > 0:
            commit = self._follower.commits.get(self._next)
            if commit is not None:
                self._tracker.log(
                    commit.step,
                    commit_metrics(commit, self._follower.before(commit)),
                    at=commit.committed_at,
                    weights_digest=commit.weights_digest,
                )
            self._next += 1
        while self._evals and self._tracker.room > 0:
            record = self._evals.popleft()
            self._tracker.log(record.version, eval_metrics(record), at=record.finished_at or None)
        return self._next > last.step and not self._evals

    def _has(self, logged: LoggedStep) -> bool:
        """Whether the tracker's newest step is a step of this run: False after a restore of an older copy."""
        if logged.step < 0:
            return True
        commit = self._follower.commits.get(logged.step)
        return commit is not None and commit.weights_digest == logged.weights_digest


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
    sums: dict[str, float] = {}
    for name, sample in now.items():
        earlier = before[name].counters if name in before else Counters()
        for kind in ("replayed", "dropped"):
            counter, key = f"environment_{kind}_tokens", f"environment/{kind}_tokens"
            if (total := getattr(sample.counters, counter)) is not None:
                sums[key] = sums.get(key, 0.0) + total - (getattr(earlier, counter) or 0)
    return sums


def _resumed(record: RunRecord, overrides: Sequence[str]) -> RunRecord:
    if not overrides:
        return record
    try:
        config = resume_config(build_config(record.config), overrides)
    except ConfigError:  # of another release
        return record
    return record.model_copy(update={"config": config.model_dump(mode="json")})


def actor_speed(before: Mapping[str, ActorSample], now: Mapping[str, ActorSample]) -> dict[str, float]:
    """Mean running sequences and tokens per second between two reservations, summed over actor epochs in both."""
    running, speed, is_known = 0.0, 0.0, False
    for name, sample in now.items():
        earlier = before.get(name)
        if earlier is not None and sample.at > earlier.at:
            seconds = sample.at - earlier.at
            running += (sample.running_seconds - earlier.running_seconds) / seconds
            speed += (sample.num_sampled - earlier.num_sampled) / seconds
            is_known = True
    return {"actor/running_mean": running, "actor/tokens_per_second": speed} if is_known else {}
