"""Reads the stored objects of a run once for the report: valid commits, evaluations and trained batches.

Shapes: P = prompt tokens, C = completion tokens, N = rollouts of a step, G = its groups, L = largest lag + 1.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from pipelinerl_core.errors import SchemaMismatch
from pipelinerl_core.interfaces import ObjectStore
from pipelinerl_core.run.follow import RunFollower
from pipelinerl_core.run.records import Commit, EvalRecord, RunRecord
from pipelinerl_core.telemetry import measures
from pipelinerl_core.telemetry.measures import Int64Array
from pipelinerl_core.types import BoolArray, WeightSpan

_SCHEMA_MAJOR = "1"
# Batches are small, and idle threads of the Arrow pool can abort the interpreter at its exit.
_ONE_THREAD = pa.ipc.IpcReadOptions(use_threads=False)
_COLUMNS = (
    "group_id",
    "rollout_index",
    "actor",
    "prompt_token_ids",
    "completion_token_ids",
    "weight_spans",
    "loss_mask",
    "loss_mask_trained",
    "reward",
    "outcome",
    "finish_reason",
)


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
    prompt_token_ids: Int64Array
    """[P]"""
    completion_token_ids: Int64Array
    """[C]"""
    weight_spans: tuple[WeightSpan, ...]
    loss_mask: BoolArray
    """[C] mask before the lag rule."""
    loss_mask_trained: BoolArray
    """[C] mask after the lag rule."""


@dataclass(frozen=True, slots=True, eq=False)
class StepFacts:
    """Figures of one trained batch."""

    step: int
    rewards: NDArray[np.float64]
    """[N]"""
    lengths: Int64Array
    """[N] completion tokens."""
    spreads: NDArray[np.float64]
    """[G] longest over mean completion length of each group; a group is complete with its longest completion."""
    versions: Int64Array
    """[N] weight versions in each rollout."""
    lags: Int64Array
    """[L] trained tokens per lag."""
    num_masked: int
    """Sampled tokens that the lag rule masked."""
    trained: dict[tuple[int, str], int]
    """(version, actor) -> trained tokens."""


@dataclass(frozen=True, slots=True, eq=False)
class RunFacts:
    """Record, commits, evaluations and trained batches of a run."""

    run: RunRecord
    commits: dict[int, Commit]
    """Step -> valid commit."""
    evals: dict[int, EvalRecord]
    """Version -> evaluation on the run's own held-out prompts."""
    set_evals: dict[str, dict[int, EvalRecord]]
    """The same by name of a set of eval.sets."""
    steps: tuple[StepFacts, ...]
    """Trained steps, in order; step 0 has no batch."""

    @property
    def trained_commits(self) -> list[Commit]:
        """Commits of optimizer steps: all but the initial weights."""
        return [commit for step, commit in self.commits.items() if step > 0]


StepCache = dict[str, StepFacts]
"""Key of a batch file -> figures of its step."""


def collect(store: ObjectStore, known: StepCache | None = None) -> RunFacts:
    """Read the run; batches in `known` are not read again. Raises MissingObject for a missing run or batch."""
    follower = RunFollower(store)
    run = follower.run
    follower.refresh()
    trained = [commit for commit in follower.commits.values() if commit.batches]
    known = {} if known is None else known
    for commit in trained:
        if commit.batches[0].name not in known:
            known[commit.batches[0].name] = step_facts(commit.step, read_batch(store, commit))
    steps = [known[commit.batches[0].name] for commit in trained]
    return RunFacts(
        run=run,
        commits=follower.commits,
        evals=follower.evals,
        set_evals=follower.set_evals,
        steps=tuple(steps),
    )


def read_batch(store: ObjectStore, commit: Commit) -> list[TrainedRollout]:
    """The rows of a step in training order, rank by rank. Raises SchemaMismatch."""
    rows: list[TrainedRollout] = []
    for entry in commit.batches:
        with pa.ipc.open_file(pa.BufferReader(store.get(entry.name)), options=_ONE_THREAD) as reader:
            table = reader.read_all()
        _check(f"{store.url}/{entry.name}", table)
        rows += _rows(commit.step, table)
    return rows


def step_facts(step: int, rows: list[TrainedRollout]) -> StepFacts:
    """Compute the figures of a batch."""
    by_version = [measures.tokens_by_version(row.weight_spans, row.loss_mask_trained) for row in rows]
    trained: dict[tuple[int, str], int] = {}
    for row, counts in zip(rows, by_version, strict=True):
        for version, num in counts.items():
            trained[version, row.actor] = trained.get((version, row.actor), 0) + num
    return StepFacts(
        step=step,
        rewards=np.array([row.reward for row in rows if row.reward is not None], dtype=np.float64),
        lengths=np.array([len(row.completion_token_ids) for row in rows], dtype=np.int64),
        spreads=_spreads(rows),
        versions=np.array([measures.num_versions(row.weight_spans) for row in rows], dtype=np.int64),
        lags=measures.lag_counts(step, by_version),
        num_masked=sum(int(np.count_nonzero(row.loss_mask & ~row.loss_mask_trained)) for row in rows),
        trained=trained,
    )


def _spreads(rows: list[TrainedRollout]) -> NDArray[np.float64]:
    lengths: dict[int, list[int]] = {}
    for row in rows:
        lengths.setdefault(row.group_id, []).append(len(row.completion_token_ids))
    return np.array([max(group) * len(group) / sum(group) for group in lengths.values() if sum(group)])


def _check(where: str, table: pa.Table) -> None:
    version = (table.schema.metadata or {}).get(b"schema_version", b"").decode()
    if version.partition(".")[0] != _SCHEMA_MAJOR:
        raise SchemaMismatch(
            f"{where} has batch schema version {version!r}; this release reads {_SCHEMA_MAJOR}.x. "
            "Use the release that wrote the batch"
        )
    missing = [name for name in _COLUMNS if name not in table.column_names]
    if missing:
        raise SchemaMismatch(f"{where} lacks the columns {', '.join(missing)}: it is not a batch file")


def _rows(step: int, table: pa.Table) -> list[TrainedRollout]:
    prompts, completions = _lists(table["prompt_token_ids"]), _lists(table["completion_token_ids"])
    masks, trained_masks = _lists(table["loss_mask"]), _lists(table["loss_mask_trained"])
    plain = table.select(
        ["group_id", "rollout_index", "actor", "reward", "outcome", "finish_reason", "weight_spans"]
    ).to_pylist()
    return [
        TrainedRollout(
            step=step,
            group_id=row["group_id"],
            rollout_index=row["rollout_index"],
            actor=row["actor"],
            reward=row["reward"],
            outcome=row["outcome"],
            finish_reason=row["finish_reason"],
            prompt_token_ids=prompts[index],
            completion_token_ids=completions[index],
            weight_spans=tuple(WeightSpan(**span) for span in row["weight_spans"]),
            loss_mask=masks[index],
            loss_mask_trained=trained_masks[index],
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
