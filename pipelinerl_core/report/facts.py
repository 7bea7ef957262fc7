"""Reads the stored objects of a run once for the report: valid commits, evaluations and trained batches.

Shapes: C = completion tokens, N = rollouts of a step, G = its groups, L = largest lag + 1.
"""

import itertools
import logging
from collections.abc import Callable, Mapping, Sequence, Set
from contextlib import suppress
from dataclasses import dataclass, field, fields, replace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from pipelinerl_core.data.codec import decode_batch, flat_list, rows_of, spans_of
from pipelinerl_core.data.compaction import CompactedRollouts, list_rollouts
from pipelinerl_core.data.trained import TrainedRows
from pipelinerl_core.errors import BrokenRecord, ChecksumMismatch, MissingObject, SchemaMismatch
from pipelinerl_core.interfaces import ObjectStore
from pipelinerl_core.run.follow import RunFollower
from pipelinerl_core.run.reading import list_keys
from pipelinerl_core.run.records import (
    BATCHES_PREFIX,
    Commit,
    EvalRecord,
    RunRecord,
    commit_key,
    parse_step_key,
)
from pipelinerl_core.telemetry import measures
from pipelinerl_core.telemetry.measures import Int64Array
from pipelinerl_core.types import BoolArray, Rollout

logger = logging.getLogger(__name__)

_FIGURE_COLUMNS = (
    "group_id", "actor", "reward", "weight_spans", "loss_mask", "loss_mask_trained", "finished_at", "scored_at",
)  # fmt: skip
"""Columns of StepFacts: without token ids, which are most of the bytes of a run."""
NEWEST_STEPS = 8
"""Trained steps whose rollouts RunFacts has."""
_NEWEST_ROWS = 256
# Fields of a commit that no report shows; they take more memory than the other fields.
_UNUSED: dict[str, Any] = {"fates": (), "low_water": {}, "open_groups": ()}


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TrainedRollout(Rollout):
    """A rollout with what its step made of it."""

    step: int
    loss_mask_trained: BoolArray
    """[C] mask after the lag rule."""
    advantage: float

    @property
    def name(self) -> str:
        """Example: 12.3, the fourth rollout of group 12."""
        return f"{self.group_id}.{self.rollout_index}"

    @property
    def components(self) -> dict[str, float]:
        """Components of the reward by name, before their weights."""
        return dict(self.reward_components)


@dataclass(frozen=True, slots=True, eq=False)
class StepFacts:
    """Figures of one trained batch."""

    step: int
    rewards: NDArray[np.float64]
    """[N]"""
    lengths: Int64Array
    """[N] completion tokens, group by group."""
    sizes: Int64Array
    """[G] rollouts of each group, in the order of `lengths`."""
    scoring_seconds: float
    """Mean time from the last token to the reward."""
    versions: Int64Array
    """[N] weight versions in each rollout."""
    lags: Int64Array
    """[L] trained tokens per lag."""
    num_masked: int
    """Sampled tokens that the lag rule masked."""
    trained: dict[tuple[int, str], int]
    """(version, actor) -> trained tokens."""

    @property
    def groups(self) -> list[Int64Array]:
        """[G] lengths of the completions of each group."""
        return np.split(self.lengths, np.cumsum(self.sizes)[:-1]) if len(self.sizes) else []

    @property
    def spreads(self) -> NDArray[np.float64]:
        """[G] longest over mean completion length of each group; a group is complete with its longest completion."""
        return np.array([group.max() / group.mean() for group in self.groups if group.any()])


@dataclass(frozen=True, slots=True, eq=False)
class RunFacts:
    """Record, commits, evaluations and trained batches of a run."""

    run: RunRecord
    commits: Mapping[int, Commit]
    """Step -> valid commit."""
    evals: dict[int, EvalRecord]
    """Version -> evaluation on the run's own held-out prompts."""
    set_evals: dict[str, dict[int, EvalRecord]]
    """The same by name of a set of eval.sets."""
    steps: tuple[StepFacts, ...]
    """Trained steps, in order; step 0 has no batch."""
    newest_rows: tuple[TrainedRollout, ...] = ()
    """Rollouts of the newest NEWEST_STEPS steps, by step; of a large step the first 256."""

    @property
    def trained_commits(self) -> list[Commit]:
        """Commits of optimizer steps: all but the initial weights."""
        return [commit for step, commit in self.commits.items() if step > 0]

    def metric(self, name: str) -> list[tuple[float, float]]:
        """(step, value) of a metric, at the steps that have it."""
        return [(float(each.step), each.metrics[name]) for each in self.trained_commits if name in each.metrics]

    def means(self, name: str, of_rows: Callable[[StepFacts], Any]) -> dict[int, float]:
        """Step -> mean of an array of its rows; of a step whose rows are removed, the metric `name` of its commit."""
        known = {int(step): value for step, value in self.metric(name)}
        rows = {step.step: float(values.mean()) for step in self.steps if len(values := of_rows(step))}
        return dict(sorted((known | rows).items()))

    def mean_rewards(self) -> dict[int, float]:
        """Step -> mean reward."""
        return self.means("reward/mean", lambda step: step.rewards)


@dataclass(slots=True, eq=False)
class RunCache:
    """The objects of a run that were already read; both by key of the commit."""

    commits: dict[str, Commit] = field(default_factory=dict)
    steps: dict[str, StepFacts] = field(default_factory=dict)
    newest_rows: dict[str, list[TrainedRollout]] = field(default_factory=dict)

    def add(self, key: str, step: int, batches: Sequence[pa.RecordBatch], *, is_newest: bool) -> None:
        """Add the figures of a step, and its rows if it is among the newest steps."""
        if is_newest:
            self.newest_rows[key] = [own_copy(row) for row in _rows(step, batches)[:_NEWEST_ROWS]]
        self.steps[key] = step_facts(step, pa.Table.from_batches(batches))


def own_copy(row: TrainedRollout) -> TrainedRollout:
    """The row without the memory of its batch, in which its arrays are."""
    values = {each.name: getattr(row, each.name) for each in fields(row)}
    arrays: dict[str, Any] = {name: part.copy() for name, part in values.items() if isinstance(part, np.ndarray)}
    return replace(row, **arrays)


def collect(store: ObjectStore, cache: RunCache | None = None) -> RunFacts:
    """Read the run, apart from what is in `cache`. Raises MissingObject for a missing run or batch."""
    follower = RunFollower(store)
    run = follower.run
    follower.refresh()
    keys = follower.commits.keys_by_step
    cache = RunCache() if cache is None else cache
    newest = set(list(keys.values())[-NEWEST_STEPS:])
    cache.newest_rows = {key: rows for key, rows in cache.newest_rows.items() if key in newest}
    with_batch = {parse_step_key(key) for key in list_keys(store, BATCHES_PREFIX)}  # before the compacted rows
    _add_compacted(store, keys, newest, cache)
    trained, missing = TrainedRows(store), []
    for step, key in keys.items():
        if key not in cache.commits:
            cache.commits[key] = follower.commits[step].model_copy(update=_UNUSED)
        commit = cache.commits[key]
        if key in cache.steps or not commit.batches:
            continue
        if (step, commit.epoch) in with_batch:
            try:
                cache.add(key, step, trained.batches(commit), is_newest=key in newest)
            except (
                BrokenRecord,
                ChecksumMismatch,
                MissingObject,
            ) as error:  # the figures of one step are no reason to write no report
                logger.warning("the report has no figures of the rollouts of step %d: %s", step, error)
        else:
            missing.append(step)
    if missing and not run.config.get("store", {}).get("keep_rows"):
        logger.warning("no figures of the rollouts of %d steps from %d on: their rows are missing",
                       len(missing), missing[0])  # fmt: skip
    return RunFacts(
        run=run,
        commits={step: cache.commits[key] for step, key in keys.items()},
        evals=follower.evals,
        set_evals=follower.set_evals,
        steps=tuple(cache.steps[key] for key in keys.values() if key in cache.steps),
        newest_rows=tuple(row for key in keys.values() for row in cache.newest_rows.get(key, ())),
    )


def newest_facts(follower: RunFollower) -> RunFacts:
    """The facts of the first and the newest NEWEST_STEPS steps, read without the steps between. Rows that are missing
    or damaged are left out. The follower is refreshed."""
    known = list(follower.commits)
    chosen = dict.fromkeys([*known[: NEWEST_STEPS + 1], *known[-NEWEST_STEPS:]])  # the first is step 0, without rows
    commits = {step: follower.commits[step] for step in chosen}
    cache, trained = RunCache(), TrainedRows(follower.store)
    for step, commit in commits.items():
        with suppress(BrokenRecord, ChecksumMismatch, MissingObject, SchemaMismatch):
            if batches := trained.batches(commit):
                cache.add(commit_key(step, commit.epoch), step, batches, is_newest=step in known[-NEWEST_STEPS:])
    return RunFacts(run=follower.run, commits=commits, evals=follower.evals, set_evals=follower.set_evals,
                    steps=tuple(cache.steps.values()),
                    newest_rows=tuple(itertools.chain.from_iterable(cache.newest_rows.values())))  # fmt: skip


def _add_compacted(store: ObjectStore, keys: Mapping[int, str], newest: Set[str], cache: RunCache) -> None:
    """Add the figures of the steps in compacted rollouts."""
    for file in list_rollouts(store):
        of_file = {step: commit_key(step, file.epoch) for step in file.steps}
        wanted = {step: key for step, key in of_file.items() if keys.get(step) == key and key not in cache.steps}
        if not wanted:
            continue
        try:
            compacted = CompactedRollouts(store, file)
        except MissingObject:  # store.keep_rows has removed it since the listing
            continue
        table = compacted.read([*_FIGURE_COLUMNS, "step", "fate"])
        table = table.filter(pc.equal(table["fate"], "trained"))
        starts = np.flatnonzero(np.diff(table["step"].to_numpy(), prepend=-1)).tolist()
        for start, end in itertools.pairwise([*starts, len(table)]):
            step = table["step"][start].as_py()
            if step not in wanted:
                continue
            if wanted[step] in newest:
                cache.add(wanted[step], step, [compacted.trained(step)], is_newest=True)
            else:
                cache.steps[wanted[step]] = step_facts(step, table[start:end])


def read_batch(store: ObjectStore, commit: Commit) -> list[TrainedRollout]:
    """The rows of a step in training order.

    Raises BrokenRecord or ChecksumMismatch for damaged rows, SchemaMismatch for the batch of another release,
    MissingObject if the rows were removed.
    """
    return _rows(commit.step, TrainedRows(store).batches(commit))


def _rows(step: int, batches: Sequence[pa.RecordBatch]) -> list[TrainedRollout]:
    return [
        TrainedRollout(
            **{each.name: getattr(row.rollout, each.name) for each in fields(Rollout)},
            step=step,
            loss_mask_trained=row.loss_mask,
            advantage=row.advantage,
        )
        for batch in batches
        for row in decode_batch(batch)
    ]


def step_facts(step: int, table: pa.Table) -> StepFacts:
    """Compute the figures of a batch, of whose columns it needs _FIGURE_COLUMNS."""
    (batch,) = table.select(_FIGURE_COLUMNS).sort_by("group_id").combine_chunks().to_batches()
    spans = spans_of(batch["weight_spans"])
    trained_masks = rows_of(batch["loss_mask_trained"])
    by_version = [measures.tokens_by_version(*row) for row in zip(spans, trained_masks, strict=True)]
    trained: dict[tuple[int, str], int] = {}
    for actor, counts in zip(batch["actor"].to_pylist(), by_version, strict=True):
        for version, num in counts.items():
            trained[version, actor] = trained.get((version, actor), 0) + num
    offsets, mask = flat_list(batch["loss_mask"])
    return StepFacts(
        step=step,
        rewards=batch["reward"].drop_null().to_numpy().astype(np.float64),
        lengths=np.diff(offsets).astype(np.int64),
        sizes=np.unique(batch["group_id"].to_numpy(), return_counts=True)[1],
        scoring_seconds=float(np.mean(batch["scored_at"].to_numpy() - batch["finished_at"].to_numpy())),
        versions=np.array([measures.num_versions(row) for row in spans], dtype=np.int64),
        lags=measures.lag_counts(step, by_version),
        num_masked=int(np.count_nonzero(mask & ~flat_list(batch["loss_mask_trained"])[1])),
        trained=trained,
    )
