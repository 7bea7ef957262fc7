"""Reads the stored objects of a run once for the report: valid commits, evaluations and trained batches.

Shapes: P = prompt tokens, C = completion tokens, N = rollouts of a step, G = its groups, L = largest lag + 1.
"""

import itertools
import logging
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from pipelinerl_core.data.compaction import list_rollouts, read_rollouts
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
from pipelinerl_core.types import BoolArray, TurnSpan, WeightSpan

logger = logging.getLogger(__name__)

_COLUMNS = (
    "group_id",
    "rollout_index",
    "actor",
    "prompt_token_ids",
    "completion_token_ids",
    "weight_spans",
    "loss_mask",
    "loss_mask_trained",
    "turn_spans",
    "turn_rewards",
    "branch_starts",
    "task",
    "source",
    "reward",
    "reward_components",
    "advantage",
    "outcome",
    "finish_reason",
    "started_at",
    "finished_at",
    "scored_at",
)
NEWEST_STEPS = 8
"""Trained steps whose rollouts RunFacts has."""
_NEWEST_ROWS = 256
_TOKEN_COLUMNS = ("prompt_token_ids", "completion_token_ids", "loss_mask", "loss_mask_trained")
# Fields of a commit that no report shows; they take more memory than the other fields.
_UNUSED: dict[str, Any] = {"fates": (), "low_water": {}, "open_groups": ()}


@dataclass(frozen=True, slots=True, eq=False)
class TrainedRollout:
    """The columns of one row of a batch file that the report needs."""

    step: int
    group_id: int
    rollout_index: int
    actor: str
    reward: float | None
    outcome: str
    finish_reason: str
    scoring_seconds: float
    """From the last token to the reward."""
    prompt_token_ids: Int64Array
    """[P]"""
    completion_token_ids: Int64Array
    """[C]"""
    weight_spans: tuple[WeightSpan, ...]
    loss_mask: BoolArray
    """[C] mask before the lag rule."""
    loss_mask_trained: BoolArray
    """[C] mask after the lag rule."""
    turn_spans: tuple[TurnSpan, ...] = ()
    """Turns in order; empty for one turn."""
    turn_rewards: tuple[float, ...] = ()
    """Parts of the reward that belong to single turns; empty without such parts."""
    branch_starts: tuple[int, ...] = ()
    """Offsets in the completion where a branch begins."""
    task: str = "{}"
    """Columns of the prompt's row, or the environment's task: a JSON object."""
    source: str = ""
    components: Mapping[str, float] = field(default_factory=dict)
    """Components of the reward by name, before their weights."""
    advantage: float = 0.0
    started_at: float = 0.0
    finished_at: float = 0.0

    @property
    def name(self) -> str:
        """Example: 12.3, the fourth rollout of group 12."""
        return f"{self.group_id}.{self.rollout_index}"


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


@dataclass(slots=True, eq=False)
class RunCache:
    """The objects of a run that were already read; both by key of the commit."""

    commits: dict[str, Commit] = field(default_factory=dict)
    steps: dict[str, StepFacts] = field(default_factory=dict)
    newest_rows: dict[str, list[TrainedRollout]] = field(default_factory=dict)

    def add(self, key: str, step: int, rows: list[TrainedRollout]) -> None:
        """The figures of a step, and its rows if it is among the newest steps."""
        self.steps[key] = step_facts(step, rows)
        self.newest_rows[key] = [own_copy(row) for row in rows[:_NEWEST_ROWS]]
        if len(self.newest_rows) > NEWEST_STEPS:
            del self.newest_rows[next(iter(self.newest_rows))]  # steps are added in order


def own_copy(row: TrainedRollout) -> TrainedRollout:
    """The row without the memory of its batch, in which its arrays are."""
    return replace(row, **{name: getattr(row, name).copy() for name in _TOKEN_COLUMNS})


def collect(store: ObjectStore, cache: RunCache | None = None) -> RunFacts:
    """Read the run, apart from what is in `cache`. Raises MissingObject for a missing run or batch."""
    follower = RunFollower(store)
    run = follower.run
    follower.refresh()
    keys = follower.commits.keys_by_step
    cache = RunCache() if cache is None else cache
    counted = set(keys.values())
    cache.newest_rows = {key: rows for key, rows in cache.newest_rows.items() if key in counted}
    with_batch = {parse_step_key(key) for key in list_keys(store, BATCHES_PREFIX)}  # before the compacted rows
    _add_compacted(store, keys, cache)
    missing = []
    for step, key in keys.items():
        if key not in cache.commits:
            cache.commits[key] = follower.commits[step].model_copy(update=_UNUSED)
        commit = cache.commits[key]
        if key not in cache.steps and (step, commit.epoch) in with_batch:
            try:
                cache.add(key, step, read_batch(store, commit))
            except (
                BrokenRecord,
                ChecksumMismatch,
                MissingObject,
            ) as error:  # the figures of one step are no reason to write no report
                logger.warning("the report has no figures of the rollouts of step %d: %s", step, error)
        elif key not in cache.steps and commit.batches:
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
    steps, newest = [], []
    for step, commit in commits.items():
        with suppress(BrokenRecord, ChecksumMismatch, MissingObject, SchemaMismatch):
            rows = read_batch(follower.store, commit) if commit.batches else []
            if rows:
                steps.append(step_facts(step, rows))
                newest += [own_copy(row) for row in rows[:_NEWEST_ROWS]] if step in known[-NEWEST_STEPS:] else []
    return RunFacts(run=follower.run, commits=commits, evals=follower.evals, set_evals=follower.set_evals,
                    steps=tuple(steps), newest_rows=tuple(newest))  # fmt: skip


def _add_compacted(store: ObjectStore, keys: Mapping[int, str], cache: RunCache) -> None:
    """Add the figures of the steps in compacted rollouts."""
    for file in list_rollouts(store):
        of_file = {step: commit_key(step, file.epoch) for step in range(file.first, file.last + 1)}
        wanted = {step: key for step, key in of_file.items() if keys.get(step) == key and key not in cache.steps}
        if wanted:
            try:
                table = read_rollouts(store, file, [*_COLUMNS, "step", "fate"])
            except MissingObject:  # store.keep_rows has removed it since the listing
                continue
            table = table.filter(pc.equal(table["fate"], "trained"))
            starts = np.flatnonzero(np.diff(table["step"].to_numpy(), prepend=-1)).tolist()
            for start, end in itertools.pairwise([*starts, len(table)]):
                step = table["step"][start].as_py()
                if step in wanted:
                    cache.add(wanted[step], step, _rows(step, table[start:end]))


def read_batch(store: ObjectStore, commit: Commit) -> list[TrainedRollout]:
    """The rows of a step in training order.

    Raises BrokenRecord or ChecksumMismatch for damaged rows, SchemaMismatch for the batch of another release,
    MissingObject if the rows were removed.
    """
    batches = TrainedRows(store).batches(commit)
    return _rows(commit.step, pa.Table.from_batches(batches)) if batches else []


def step_facts(step: int, rows: list[TrainedRollout]) -> StepFacts:
    """Compute the figures of a batch."""
    rows = sorted(rows, key=lambda row: row.group_id)
    by_version = [measures.tokens_by_version(row.weight_spans, row.loss_mask_trained) for row in rows]
    trained: dict[tuple[int, str], int] = {}
    for row, counts in zip(rows, by_version, strict=True):
        for version, num in counts.items():
            trained[version, row.actor] = trained.get((version, row.actor), 0) + num
    return StepFacts(
        step=step,
        rewards=np.array([row.reward for row in rows if row.reward is not None], dtype=np.float64),
        lengths=np.array([len(row.completion_token_ids) for row in rows], dtype=np.int64),
        sizes=np.unique([row.group_id for row in rows], return_counts=True)[1],
        scoring_seconds=float(np.mean([row.scoring_seconds for row in rows])) if rows else 0.0,
        versions=np.array([measures.num_versions(row.weight_spans) for row in rows], dtype=np.int64),
        lags=measures.lag_counts(step, by_version),
        num_masked=sum(int(np.count_nonzero(row.loss_mask & ~row.loss_mask_trained)) for row in rows),
        trained=trained,
    )


def _rows(step: int, table: pa.Table) -> list[TrainedRollout]:
    prompts, completions = _lists(table["prompt_token_ids"]), _lists(table["completion_token_ids"])
    masks, trained_masks = _lists(table["loss_mask"]), _lists(table["loss_mask_trained"])
    plain = table.select([name for name in _COLUMNS if name not in _TOKEN_COLUMNS]).to_pylist()
    return [
        TrainedRollout(
            step=step,
            group_id=row["group_id"],
            rollout_index=row["rollout_index"],
            actor=row["actor"],
            reward=row["reward"],
            outcome=row["outcome"],
            finish_reason=row["finish_reason"],
            scoring_seconds=row["scored_at"] - row["finished_at"],
            prompt_token_ids=prompts[index],
            completion_token_ids=completions[index],
            weight_spans=tuple(WeightSpan(**span) for span in row["weight_spans"]),
            loss_mask=masks[index],
            loss_mask_trained=trained_masks[index],
            turn_spans=tuple(TurnSpan(**turn) for turn in row["turn_spans"] or ()),
            turn_rewards=tuple(row["turn_rewards"] or ()),
            branch_starts=tuple(row["branch_starts"] or ()),
            task=row["task"],
            source=row["source"],
            components={part["name"]: part["value"] for part in row["reward_components"] or ()},
            advantage=row["advantage"],
            started_at=row["started_at"],
            finished_at=row["finished_at"],
        )
        for index, row in enumerate(plain)
    ]


def _lists(column: pa.ChunkedArray) -> list[Any]:
    """One array per row of a list column."""
    arrays: list[Any] = []
    for chunk in column.chunks:
        ends = np.cumsum(chunk.value_lengths().to_numpy(zero_copy_only=False))
        arrays += np.split(chunk.flatten().to_numpy(zero_copy_only=False), ends[:-1]) if len(chunk) else []
    return arrays
