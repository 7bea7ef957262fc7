"""Sampled rollouts of a run, of bounded number, for MLflow's pages: a table, and traces of a few of them.

The number of steps of the run determines the rollouts in the table. After a resume or an outage of MLflow, the table
therefore has the same rows, and no row twice.
"""

from collections.abc import Mapping
from typing import Any

from pipelinerl_core.errors import BrokenRecord, ChecksumMismatch, MissingObject, SchemaMismatch
from pipelinerl_core.interfaces import ObjectStore
from pipelinerl_core.report.facts import TrainedRollout, own_copy, read_batch
from pipelinerl_core.report.rollout_traces import MAX_CHARS
from pipelinerl_core.report.samples import Decode, one_per_group, plain_text
from pipelinerl_core.run.records import Commit
from pipelinerl_core.telemetry import measures

TABLE_NAME = "rollouts.json"
COLUMNS = (
    "step",
    "reward",
    "task",
    "prompt",
    "completion",
    "versions",
    "lag",
    "tokens",
    "masked",
    "outcome",
    "finish_reason",
    "group",
    "rollout",
    "actor",
)
"""lag: mean over the trained tokens, in optimizer steps; masked: tokens without a gradient because of their age."""

ROWS_PER_STEP = 4
"""Rollouts of a step: the first rollout of each of so many groups; not chosen by reward."""
MAX_STEPS = 50
"""Steps with rows: the first, the last, and evenly spaced steps between."""


class RolloutTable:
    """The rows of a run; `update` adds the rows of new commits."""

    def __init__(self, store: ObjectStore, steps: int, decode: Decode | None) -> None:
        """steps: number of steps of the run."""
        self._store = store
        self._steps = steps
        self._decode = decode
        self._rows: dict[int, list[list[Any]]] = {}
        self.traced: dict[int, TrainedRollout] = {}
        """Step -> its first rollout, which becomes a trace."""

    def has_row(self, step: int) -> bool:
        every = -(-self._steps // (MAX_STEPS - 1))
        return step > 0 and (step in (1, self._steps) or step % every == 0)

    def update(self, commits: Mapping[int, Commit], limit: int = 1) -> bool:
        """Read at most `limit` batches of steps that are missing in the table; returns whether rows were added."""
        wanted = [step for step in commits if step not in self._rows and self.has_row(step)][:limit]
        for step in wanted:
            self._rows[step] = self._read(commits[step])
        return any(self._rows[step] for step in wanted)

    @property
    def rows(self) -> list[list[Any]]:
        """The rows by step; cells as in COLUMNS."""
        return [row for step in sorted(self._rows) for row in self._rows[step]]

    def _read(self, commit: Commit) -> list[list[Any]]:
        try:
            batch = read_batch(self._store, commit)
        except (BrokenRecord, ChecksumMismatch, MissingObject, SchemaMismatch):  # deleted, or damaged: audit says so
            return []
        rollouts = one_per_group(batch, ROWS_PER_STEP)
        if rollouts:
            self.traced[commit.step] = own_copy(rollouts[0])
        return [self._row(rollout) for rollout in rollouts]

    def _row(self, rollout: TrainedRollout) -> list[Any]:
        lags = measures.lag_counts(
            rollout.step, [measures.tokens_by_version(rollout.weight_spans, rollout.loss_mask_trained)]
        )
        mean_lag = measures.mean_of_counts(lags) if lags.sum() else None
        return [
            rollout.step,
            rollout.reward,
            rollout.task[:MAX_CHARS],
            plain_text(rollout.prompt_token_ids, self._decode)[:MAX_CHARS],
            plain_text(rollout.completion_token_ids, self._decode)[:MAX_CHARS],
            ", ".join(map(str, dict.fromkeys(span.version for span in rollout.weight_spans))),
            None if mean_lag is None else round(mean_lag, 2),
            len(rollout.completion_token_ids),
            int((rollout.loss_mask & ~rollout.loss_mask_trained).sum()),
            rollout.outcome,
            rollout.finish_reason,
            rollout.group_id,
            rollout.rollout_index,
            rollout.actor,
        ]
