"""Audit of a run's objects: one fate for every group, one step for every row, intact files, complete lineage.

Run: python -m pipelinerl_core.tools.audit --run URL [--json]. Exit code 1 if a check fails (the run does not close).

| check    | passes if |
|----------|-----------|
| commits  | each step 0, 1, ... s has one counting commit, of an existing epoch; no takeover left out commits |
| groups   | every group below the frontier has exactly one fate, or is open at the last commit |
| rows     | the rows of each step are the rows of its trained groups, each trained once |
| tokens   | the ledger of every commit adds up; trained and masked tokens equal the tokens in earlier batches |
| versions | no token is newer than the weights that were trained, no trained token is older than max_lag |
| objects  | the rows of all steps, unless `store.keep_rows` removed them, and the newest durable weights are intact |
| quarantined | the rows of every quarantined group are in quarantined/ |

Damaged older weights, checkpoints and segments are reported, but do not fail the audit: a replay of the batches
computes the weights again, and groups in unreadable segments are generated again.
"""

import argparse
import json
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pipelinerl_core.config import RunConfig
from pipelinerl_core.data.codec import decode_batch, from_segment
from pipelinerl_core.data.compaction import list_rollouts, read_rollouts, removed_through
from pipelinerl_core.data.trained import TrainedRows
from pipelinerl_core.errors import BrokenRecord, ChecksumMismatch, MissingObject, SchemaMismatch, StoreUnavailable
from pipelinerl_core.interfaces import ObjectStore
from pipelinerl_core.messages import FateRecord
from pipelinerl_core.roles.runtime.process import RUN, run_main
from pipelinerl_core.run.commits import Commits, read_all_commits, read_commits
from pipelinerl_core.run.compacted import list_commits
from pipelinerl_core.run.context import open_run
from pipelinerl_core.run.history import counted_commit_keys, lost_commits
from pipelinerl_core.run.reading import list_keys, read_record
from pipelinerl_core.run.records import (
    MANIFEST_FILE,
    QUARANTINED_PREFIX,
    CheckpointManifest,
    CheckpointRef,
    Commit,
    EpochRecord,
    checkpoint_prefix,
    commit_key,
    complete_checkpoints,
    parse_commit_key,
)
from pipelinerl_core.run.versions import retained, stored_versions
from pipelinerl_core.storage.digests import verify
from pipelinerl_core.types import FileEntry, GroupKey, Rollout, TrainingRow

_SHOWN_PROBLEMS = 50


class Audit:
    """Reads a run once, from the first to the last commit, and collects failed checks."""

    def __init__(self, store: ObjectStore, config: RunConfig) -> None:
        self._store = store
        self._config = config
        self.problems: list[str] = []
        self.damaged: list[str] = []
        """Damaged objects that the audit does not need."""
        self.accepted_losses: list[int] = []
        """Steps after which a user has continued without commits that were lost."""
        self.quarantined: list[str] = []
        """Objects with the rows of steps whose loss or gradient was not finite."""
        self._quarantined_groups: set[GroupKey] = set()
        self._durable_weights: dict[int, str] = {}
        """Version -> error, "" for intact weights; in the order of the commits."""
        self._bases: dict[str, str] = {}
        """Key of a file that versions are differences from -> error, "" for an intact file."""
        self._names_checkpoint = False
        """Whether a commit names a checkpoint; in a run of trainers, all do."""
        self.num_commits = 0
        self.num_files = self.num_bytes = 0
        self.lost: list[int] = []
        """Groups below the frontier that are neither decided nor open."""
        self.trained_twice: list[int] = []
        self.taken_over_tokens = 0
        """Trained tokens that one actor epoch sampled, in groups that another actor epoch finished."""
        self.tokens: dict[str, int] = {}
        """The token ledger of the last commit."""
        self._fates: dict[int, str] = {}
        self._found: Counter[str] = Counter()
        """Trained and masked tokens in the batches read so far."""
        self._trained_tokens = 0
        """Tokens of the trained groups so far, including rollouts without a reward."""
        self._trained = TrainedRows(store)
        self.num_removed_steps = 0
        self._removed_through = -1
        """The last step whose rows `store.keep_rows` may have removed."""
        self._last_without_rows = -1
        """The last step whose rows it has removed."""
        self._samples: float | None = None
        """Rows trained until the last commit that was read, where the commit says."""
        self._counts_all_rows = True
        """Whether the classes of tokens in the ledger can be compared: the rows of all steps are there, and one hub
        has counted."""

    def run(self) -> "Audit":
        """Run all checks; a failed check does not stop the audit."""
        try:
            commits = read_all_commits(self._store)
        except StoreUnavailable as error:
            self._problem(str(error))
            commits = read_commits(self._store)
        keys, epochs = commits.keys_by_step, commits.epochs
        self._removed_through = removed_through(self._store, self._config.store.keep_rows)
        self._counts_all_rows = sum(record.role == "hub" for record in epochs) <= 1
        self._check_lineage(epochs, keys)
        last = None
        for step in commits:
            last = self._read(commits, step)
            if last is not None:
                self._check_commit(step, last)
        if last is not None:
            self._check_groups(last)
        self._check_newest_weights()
        if self._names_checkpoint:
            self._check_checkpoints()
        self._check_quarantined()
        self._check_segments()
        return self

    @property
    def document(self) -> dict[str, Any]:
        """The result as a JSON-compatible document."""
        return {
            "closes": not self.problems,
            "commits": self.num_commits,
            "groups": dict(Counter(self._fates.values())),
            "lost": len(self.lost),
            "trained_twice": len(self.trained_twice),
            "taken_over_tokens": self.taken_over_tokens,
            "tokens": self.tokens,
            "files": self.num_files,
            "bytes": self.num_bytes,
            "removed_steps": self.num_removed_steps,
            "problems": self.problems,
            "damaged": self.damaged,
            "quarantined": self.quarantined,
            "accepted_losses": self.accepted_losses,
        }

    def _check_lineage(self, epochs: Sequence[EpochRecord], commits: Mapping[int, str]) -> None:
        parents = {record.epoch: record.parent for record in epochs}
        for epoch, parent in parents.items():
            if parent is not None and (parent not in parents or parent >= epoch):
                self._problem(f"epoch {epoch}: parent {parent} is not an earlier epoch")
        self.problems += lost_commits(list_commits(self._store).keys(), epochs)
        self.accepted_losses = [record.adopted_through for record in epochs if record.accepts_loss]
        if not commits:
            self._problem("the run has no commit")
        for key in commits.values():
            _, epoch = parse_commit_key(key)
            if epoch not in parents:
                self._problem(f"{key}: no record of epoch {epoch}")

    def _read(self, commits: Commits, step: int) -> Commit | None:
        try:
            return commits[step]
        except (MissingObject, BrokenRecord) as error:
            self._problem(f"{commits.keys_by_step[step]}: cannot be read: {str(error).splitlines()[0]}")
            return None

    def _check_commit(self, step: int, commit: Commit) -> None:
        self.num_commits += 1
        if commit.step != step:
            self._problem(f"commit {step}: the record is of step {commit.step}")
        self._check_tokens(step, commit)
        rows = self._rows(commit)
        self._check_fates(step, commit, rows)
        self._check_number(step, commit, rows)
        for row in rows or ():
            self._check_versions(step, row)
        self._check_weights(step, commit)
        self._names_checkpoint = self._names_checkpoint or commit.checkpoint is not None

    def _check_tokens(self, step: int, commit: Commit) -> None:
        """The ledger of a commit is a snapshot of the step's reservation: it includes the earlier steps only.

        A restarted hub may have only the total number of tokens of a trained group; its ledger then counts masked
        tokens as trained, and only the sum of both can be compared.
        """
        self.tokens = tokens = dict(commit.tokens)
        if not tokens:
            return
        total = sum(number for name, number in tokens.items() if name != "generated")
        if total != tokens["generated"]:
            self._problem(f"commit {step}: {tokens['generated']} tokens generated, {total} accounted for")
        placed = tokens["trained"] + tokens["masked_stale"]
        if not placed <= self._trained_tokens <= placed + tokens["failed"]:
            self._problem(
                f"commit {step}: the ledger has {placed} tokens trained or masked, the earlier trained groups "
                f"have {self._trained_tokens}"
            )
        for name in ("trained", "masked_stale"):
            if self._counts_all_rows and tokens[name] != self._found[name]:
                self._problem(
                    f"commit {step}: the ledger has {tokens[name]} tokens {name}, the earlier batches have "
                    f"{self._found[name]}"
                )

    def _check_number(self, step: int, commit: Commit, rows: Sequence[TrainingRow] | None) -> None:
        """Compare the number of rows with the totals of this commit and of the commit before."""
        before, self._samples = self._samples, commit.metrics.get("progress/samples", 0.0 if step == 0 else None)
        if rows and before is not None and self._samples is not None and len(rows) != self._samples - before:
            self._problem(
                f"commit {step}: {len(rows)} rows are there, {self._samples - before:.0f} rows were trained"
            )

    def _count(self, step: int, rows: Sequence[TrainingRow]) -> Counter[GroupKey]:
        """Add the rows of a step to the totals; returns the tokens of each group."""
        tokens: Counter[GroupKey] = Counter()
        for row in rows:
            tokens[row.rollout.group_id, row.rollout.attempt] += row.rollout.num_tokens
            live = int(row.loss_mask.sum()) + self._num_live_unsampled(step, row.rollout)
            self._found["trained"] += live
            self._found["masked_stale"] += row.rollout.num_tokens - live
            self.taken_over_tokens += sum(origin.num_tokens for origin in row.rollout.origins)
        return tokens

    def _check_fates(self, step: int, commit: Commit, rows: Sequence[TrainingRow] | None) -> None:
        """rows: None if the rows were removed; then only the fates are checked."""
        self._counts_all_rows = self._counts_all_rows and rows is not None
        tokens = self._count(step, rows or ())
        for record in commit.fates:
            before = self._fates.get(record.group_id)
            if before is not None:
                self._problem(f"commit {step}: group {record.group_id} is {record.fate}, but was {before} before")
                if record.fate == "trained" and before == "trained":
                    self.trained_twice.append(record.group_id)
            self._fates[record.group_id] = record.fate
            key = (record.group_id, record.attempt)
            if record.fate == "quarantined":
                self._quarantined_groups.add(key)
            if record.fate == "trained":
                self._trained_tokens += record.num_tokens
                if rows is not None:
                    self._check_group(step, record, tokens.pop(key, 0))
        for key in tokens:
            self._problem(f"commit {step}: the batch has rows of group {key}, which is not a trained group")

    def _check_group(self, step: int, record: FateRecord, num_tokens: int) -> None:
        key = (record.group_id, record.attempt)
        if num_tokens == 0:
            self._problem(f"commit {step}: group {key} is trained, but its rows are not in the batch")
        elif num_tokens > record.num_tokens:
            self._problem(
                f"commit {step}: group {key} has {num_tokens} tokens in the batch, {record.num_tokens} in total"
            )

    def _num_live_unsampled(self, step: int, rollout: Rollout) -> int:
        """Tokens between turns that the ledger counts as live, because the ledger has versions but no masks."""
        lag_C = step - 1 - _token_versions(rollout)
        return int(np.count_nonzero(~rollout.loss_mask & (lag_C <= self._config.schedule.max_lag)))

    def _check_versions(self, step: int, row: TrainingRow) -> None:
        versions = _token_versions(row.rollout)
        if len(versions) and int(versions.max()) >= step:
            self._problem(
                f"step {step}: group {row.rollout.group_id} has tokens of version {versions.max()}, which did not "
                "exist when the group was trained"
            )
        lags = step - 1 - versions[row.loss_mask]
        if len(lags) and int(lags.max()) > self._config.schedule.max_lag:
            self._problem(f"step {step}: group {row.rollout.group_id} was trained with a lag of {lags.max()}")

    def _check_groups(self, last: Commit) -> None:
        still_open = set(last.open_groups)
        for group_id in range(last.next_group_id):
            if group_id not in self._fates and group_id not in still_open:
                self.lost.append(group_id)
            elif group_id in self._fates and group_id in still_open:
                self._problem(f"group {group_id} is open at the end, but was {self._fates[group_id]}")
            elif group_id in still_open:
                self._fates[group_id] = "open"
        if self.lost:
            self._problem(f"{len(self.lost)} groups have no fate and are not open: {self.lost[:8]}")

    def _rows(self, commit: Commit) -> list[TrainingRow] | None:
        """The rows of a step, empty after a problem; None if `store.keep_rows` has removed them."""
        try:
            return [row for batch in self._trained.batches(commit) for row in decode_batch(batch)]
        except MissingObject as error:
            if commit.step > self._removed_through:  # of a live run, more rows may have been removed meanwhile
                self._removed_through = removed_through(self._store, self._config.store.keep_rows)
            if commit.step <= self._removed_through:
                self.num_removed_steps += 1
                self._last_without_rows = max(self._last_without_rows, commit.step)
                return None
            self._problem(str(error))
        except (ChecksumMismatch, SchemaMismatch, BrokenRecord) as error:
            self._problem(str(error))
        return []

    def _file_error(self, key: str, entry: FileEntry) -> str:
        """What differs from the manifest entry of an object; empty for an intact object."""
        try:
            data = self._store.get(key)
            verify(data, entry, f"{self._store.url}/{key}")
        except (MissingObject, ChecksumMismatch) as error:  # a store that does not answer ends the audit
            return str(error)
        self.num_files += 1
        self.num_bytes += len(data)
        return ""

    def _check_weights(self, step: int, commit: Commit) -> None:
        manifest = commit.manifest
        if manifest is None or manifest.key is None:
            return
        for entry in manifest.files:
            if entry.digest != commit.weights_digest:
                self._problem(f"commit {step}: the checksum of the weights differs from the manifest's")
            if manifest.delta is None:
                self._durable_weights[step] = self._file_error(f"{manifest.key}/{entry.name}", entry)
                continue
            base = manifest.delta.base
            if base.name not in self._bases:
                self._bases[base.name] = self._file_error(base.name, base)
            error = self._file_error(f"{manifest.key}/{manifest.delta.entry.name}", manifest.delta.entry)
            self._durable_weights[step] = error or self._bases[base.name]

    def _check_newest_weights(self) -> None:
        """Damaged newest weights fail the audit; a replay can compute older weights again.

        Versions that the run does not retain (`weights.keep`) may be missing.
        """
        # A trainer may have stored further versions, which no commit names, and then keeps fewer of these. Versions
        # of steps that were given up do not count. A live run has made more commits since the audit began.
        stored = stored_versions(self._store)
        newest_step = max(counted_commit_keys(self._store), default=-1)
        kept = retained(self._config, {*self._durable_weights, *(step for step in stored if step <= newest_step)})
        *older, newest = [error for step, error in self._durable_weights.items() if step in kept] or [""]
        self.damaged += filter(None, older)
        if newest:
            self._problem(newest)

    def _check_checkpoints(self) -> None:
        """Without an intact checkpoint after which all rows are there, the run can be neither resumed nor replayed.

        A live run may remove a checkpoint during the check: then there is a newer one.
        """
        wrong: list[str] = []
        for _ in range(2):
            wrong, commits = [], counted_commit_keys(self._store)
            references = [
                reference
                for reference in complete_checkpoints(list_keys(self._store, "checkpoints"))
                if commits.get(reference.step) == commit_key(reference.step, reference.epoch)
            ]
            intact = [reference.step for reference in references if self._is_intact(reference, wrong)]
            if any(step >= self._last_without_rows for step in intact):
                self.damaged += wrong
                return
        where = f" at or after step {self._last_without_rows}" if self._last_without_rows >= 0 else ""
        why = f": {wrong[0]}" if wrong else ""
        self._problem(f"no checkpoint{where} is intact, so the run can be neither resumed nor replayed{why}")

    def _is_intact(self, reference: CheckpointRef, wrong: list[str]) -> bool:
        """Whether all files of a checkpoint are as its manifest says; adds to `wrong` what is not."""
        prefix, before = checkpoint_prefix(reference.step, reference.epoch), len(wrong)
        try:
            manifest = read_record(self._store, f"{prefix}/{MANIFEST_FILE}", CheckpointManifest)
        except (MissingObject, BrokenRecord) as error:
            wrong.append(str(error))
            return False
        wrong += filter(None, (self._file_error(f"{prefix}/{entry.name}", entry) for entry in manifest.files))
        return len(wrong) == before

    def _check_quarantined(self) -> None:
        """A damaged object is no problem: the rows are in the segments or compacted rollouts, too."""
        missing, num_damaged = set(self._quarantined_groups), len(self.damaged)
        self.quarantined = sorted(list_keys(self._store, QUARANTINED_PREFIX))
        for key in self.quarantined:
            try:
                data = self._store.get(key)
                rows = [row for batch in from_segment(data, key) for row in decode_batch(batch)]
            except (MissingObject, SchemaMismatch) as error:
                self.damaged.append(str(error))
                continue
            self.num_files += 1
            self.num_bytes += len(data)
            missing -= {(row.rollout.group_id, row.rollout.attempt) for row in rows}
        if missing:
            text = f"groups {sorted(missing)[:8]} are quarantined, but quarantined/ lacks their rows"
            (self.problems if len(self.damaged) == num_damaged else self.damaged).append(text)

    def _check_segments(self) -> None:
        for key in list_keys(self._store, "rollouts"):
            try:
                data = self._store.get(key)
                from_segment(data, key)
            except (MissingObject, SchemaMismatch) as error:
                self.damaged.append(str(error))
                continue
            self.num_files += 1
            self.num_bytes += len(data)
        self.num_files += self._trained.num_files
        self.num_bytes += self._trained.num_bytes
        for steps in list_rollouts(self._store):
            try:
                self.num_bytes += read_rollouts(self._store, steps).nbytes
                self.num_files += 1
            except (MissingObject, BrokenRecord) as error:
                if str(error) not in self.problems:  # then the step of trained rows has said so
                    self.damaged.append(str(error))

    def _problem(self, text: str) -> None:
        self.problems.append(text)


def _token_versions(rollout: Rollout) -> NDArray[np.int64]:
    """[C] version of each token, 0 outside of all spans; unlike algo/staleness.py, accepts invalid spans."""
    versions_C = np.zeros(rollout.num_tokens, np.int64)
    for span in rollout.weight_spans:
        versions_C[span.start : span.end] = span.version
    return versions_C


def lines(document: Mapping[str, Any]) -> list[str]:
    """The result as lines of text."""
    groups = ", ".join(f"{number:,} {fate}" for fate, number in sorted(document["groups"].items()))
    tokens = ", ".join(f"{number:,} {name}" for name, number in document["tokens"].items())
    shown = document["problems"][:_SHOWN_PROBLEMS]
    more = len(document["problems"]) - len(shown)
    return [
        f"{document['commits']} commits, {document['files']} files of {document['bytes']:,} bytes read",
        f"groups (open: not trained when the run stopped): {groups}",
        f"lost {document['lost']}, trained twice {document['trained_twice']}",
        f"tokens at the last reservation: {tokens}",
        f"trained tokens of groups that another actor continued: {document['taken_over_tokens']:,}",
        *(
            [f"rows of {removed:,} steps were removed, as store.keep_rows says: not checked"]
            if (removed := document["removed_steps"])
            else []
        ),
        *(f"DOES NOT CLOSE: {problem}" for problem in shown),
        *([f"and {more} more"] if more else []),
        *(f"rows of a step that was not taken: {key}" for key in document["quarantined"][:_SHOWN_PROBLEMS]),
        *(
            f"accepted: the run went on after step {step} without lost commits"
            for step in document["accepted_losses"]
        ),
        *(f"damaged, but the run goes on without it: {text}" for text in document["damaged"][:_SHOWN_PROBLEMS]),
        "PASS: no rollout was lost or trained twice, the run closes"
        if document["closes"]
        else "FAIL: the run does not close",
    ]


def main() -> int:
    """Command line of the audit."""
    arguments = {**RUN, "--json": {"action": "store_true"}}
    return run_main((__doc__ or "").splitlines()[0], arguments, _audit, logs=False)


def _audit(arguments: argparse.Namespace) -> int:
    context = open_run(arguments.run)
    document = {"run_id": context.run_id, **Audit(context.store, context.config).run().document}
    print(json.dumps(document) if arguments.json else "\n".join(lines(document)))  # noqa: T201
    return 0 if document["closes"] else 1


if __name__ == "__main__":
    sys.exit(main())
