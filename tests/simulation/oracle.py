"""What must hold for a hub at any time, and for the store of a run that has ended, whatever happened before."""

import contextlib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping

import numpy as np

from pipelinerl_core.config import RunConfig
from pipelinerl_core.data.compaction import list_rollouts, read_rollouts
from pipelinerl_core.data.segments import SegmentReader
from pipelinerl_core.errors import SchemaMismatch
from pipelinerl_core.ledger import ActorKey, Ledger
from pipelinerl_core.ledger.tokens import RETIRED_ACTORS
from pipelinerl_core.run.commits import Commits, read_commits
from pipelinerl_core.run.reading import read_record
from pipelinerl_core.run.records import EVALS_PREFIX, Commit, EvalRecord, rollout_key
from pipelinerl_core.tools.audit import Audit
from pipelinerl_core.types import GroupKey, TrainingRow
from pipelinerl_core.weights.files import take_snapshot
from tests.fakes import MemoryStore
from tests.simulation.parts import ScriptedLearner, versions_of
from tests.simulation.store import PlainStore


def check_ledger(
    ledger: Ledger, sampled: Mapping[tuple[str, int], int], reached: "Counter[str]"
) -> dict[str, object]:
    """Raises AssertionError if a group has two states, or if an account is not the sum of its groups.

    sampled: actor epoch -> the tokens that its engine has sampled. reached: counts what the hub has done.
    """
    reached["a step waits for old groups"] += ledger._held_back is not None
    pool = ledger._pool  # the groups themselves: queries of the ledger give their numbers only
    reserved = [ref for reservation in pool.reservations.values() for ref in reservation.refs.values()]
    ready = [summary.ref for group_id in pool.ready if (summary := pool.ready.get(group_id)) is not None]
    states = Counter([*pool.leases.group_ids(), *(ref.group_id for ref in [*ready, *reserved])])
    twice = [group_id for group_id, number in states.items() if number > 1]
    assert not twice, f"groups {twice} have two states"
    assert max(states, default=-1) < pool.next_group_id, "a group at or above the frontier has a state"
    decided = {record.group_id for record in pool.fates} & states.keys()
    assert not decided, f"groups {decided} are decided and open"
    present: Counter[ActorKey] = Counter()
    for ref in [*ready, *reserved]:
        for actor, num_tokens in ref.shares().items():
            present[ActorKey(*actor)] += num_tokens
    accounts = {actor: account.present for actor, account in pool.tokens.accounts.items() if account.present}
    in_retired = sum(num for actor, num in present.items() if actor in pool.tokens.retired)
    own = {actor: num for actor, num in present.items() if num and actor not in pool.tokens.retired}
    expected = {**own, **({RETIRED_ACTORS: in_retired} if in_retired else {})}
    assert accounts == expected, f"tokens of ready and reserved groups: accounts {accounts}, groups {expected}"
    settled = sum(account.decided for account in pool.tokens.accounts.values())
    assert settled == sum(pool.tokens.decided.values()), f"decided tokens: {settled} in the accounts"
    for actor, account in pool.tokens.accounts.items():
        most = sampled.get(actor, account.generated)
        assert account.generated <= most, f"{actor} has sampled {most} tokens, its account has {account}"
    return {}


def check_memory(used_bytes: int, most_bytes: int) -> None:
    """Raises AssertionError if the rows in a hub's memory are far above placement.hub_bytes."""
    assert used_bytes <= most_bytes, f"rows of {used_bytes} bytes, at most {most_bytes}"


Rows = dict[int, list[TrainingRow] | None]
"""Step -> its rows; None if `store.keep_rows` has removed them."""


class _Audit(Audit):
    """The audit, which keeps the rows of each commit."""

    def __init__(self, store: PlainStore, config: RunConfig) -> None:
        super().__init__(store, config)
        self.rows: Rows = {}

    def _rows(self, commit: Commit) -> list[TrainingRow] | None:
        rows = super()._rows(commit)
        self.rows[commit.step] = rows
        return rows


def check(store: PlainStore, config: RunConfig, reached: "Counter[str]", *, has_processors: bool) -> list[str]:
    """Sentences; empty if the run closes, its weights are those of its batches, and no row is lost.

    reached: counts what the run has done. has_processors: the weights also depend on the processors.
    """
    auditor = _Audit(store, config)
    audit = auditor.run().document
    if not audit["closes"] or audit["lost"] or audit["trained_twice"] or audit["commits"] != config.trainer.steps + 1:
        return [f"audit: {audit}"]
    commits = read_commits(store)
    evals = [read_record(store, key, EvalRecord) for key in store.list(EVALS_PREFIX)]
    wrong = [record.version for record in evals if config.eval.on == "own" and record.last_version != record.version]
    if wrong:
        return [f"evaluations of versions {wrong} have tokens of other versions"]
    reached["an actor continued tokens of another"] += audit["taken_over_tokens"] > 0
    reached["an evaluation between the first and the last version"] += any(
        0 < record.version < config.trainer.steps for record in evals
    )
    other = () if has_processors else _other_weights(ScriptedLearner(config.model.dtype), auditor.rows, commits)
    return [
        *other, *_lost_rows(store, auditor.rows, commits), *_wrong_rows(auditor.rows, config, reached),
        *_wrong_fates(store, commits, config, reached), *_damaged(store, audit["damaged"]),
        *_lost_weights(store, commits, config),
    ]  # fmt: skip


def weights_of(store: PlainStore) -> list[str]:
    """Digests of the weights of each step."""
    return [commit.weights_digest for commit in read_commits(store).values()]


def _other_weights(learner: ScriptedLearner, rows: Rows, commits: Commits) -> Iterator[str]:
    """Steps whose weights are not those of the recorded batches."""
    for step, commit in commits.items():
        if step:
            if (of_step := rows[step]) is None:
                return
            learner.learn(of_step)
        if take_snapshot(learner).entry.digest != commit.weights_digest:
            yield f"step {step}: the weights are not those of the recorded batches"
            return


def _lost_rows(store: PlainStore, rows: Rows, commits: Commits) -> Iterator[str]:
    """Groups whose rows were in a deleted segment, were not trained, and are in no compacted object."""
    kept: set[GroupKey] = set()
    written = store.disk.written
    read: dict[int, int] = {}  # step -> when the writer of its compacted object listed the segments
    for steps in list_rollouts(store):
        read |= dict.fromkeys(range(steps.first, steps.last + 1), store.disk.segments_read[steps.rollouts_key])
        table = read_rollouts(store, steps, ["group_id", "attempt"])
        kept |= set(zip(table["group_id"].to_pylist(), table["attempt"].to_pylist(), strict=True))
    fates = {fate.group_id: (step, fate) for step, commit in commits.items() for fate in commit.fates}
    removed = MemoryStore()
    for key, data in store.disk.removed.items():
        removed.put(key, data)
        try:
            refs = SegmentReader(removed).groups_in(key)
        except SchemaMismatch:  # a fault damaged it
            continue
        for group_id, attempt in ((ref.group_id, ref.attempt) for ref in refs):
            if group_id not in fates and store.disk.collects_undecided:
                continue
            if group_id not in fates:
                yield f"{key} was deleted with the undecided group {group_id}"
                continue
            step, fate = fates[group_id]
            if store.disk.collects_segments and (fate.fate != "trained" or step not in read):
                continue  # trained rows that are not compacted yet are in batches
            # docs/storage.md: a segment may be written after a compaction has listed the segments.
            is_late = fate.fate != "trained" and written[key] > read.get(step, written[key])
            if rows[step] is not None and fate.attempt == attempt and (group_id, attempt) not in kept and not is_late:
                yield f"{key} was deleted, and group {group_id} ({fate.fate}) is in no compacted object"


def _wrong_rows(rows: Rows, config: RunConfig, reached: "Counter[str]") -> Iterator[str]:
    """Trained rows whose tokens name other versions than their spans, or whose mask is not the rule of lags."""
    for step, of_step in rows.items():
        for row in of_step or ():
            sampled = versions_of(row.rollout.completion_token_ids)
            spans = [np.full(span.end - span.start, span.version) for span in row.rollout.weight_spans]
            live = step - 1 - sampled <= config.schedule.max_lag
            reached["a token is masked"] += not live.all()
            if not np.array_equal(sampled, np.concatenate([np.zeros(0, np.int64), *spans])):
                yield f"step {step}: group {row.rollout.group_id} has tokens of versions that are not recorded"
            if not np.array_equal(row.loss_mask, live):
                yield f"step {step}: group {row.rollout.group_id}: the mask is not that of the lags"


def _wrong_fates(store: PlainStore, commits: Commits, config: RunConfig, reached: "Counter[str]") -> Iterator[str]:
    """Groups whose fate does not follow from their rows, in all segments that ever were."""
    segments = MemoryStore()
    kept = {key: data for key, data in store.disk.objects.items() if key.startswith("rollouts/")}
    for key, data in {**store.disk.removed, **kept}.items():
        segments.put(key, data)
    reader, places = SegmentReader(segments), {}
    for name in reader.segments():
        with contextlib.suppress(SchemaMismatch):  # a fault damaged it
            places |= {(ref.group_id, ref.attempt): name for ref in reader.groups_in(rollout_key(*name))}
    for step, commit in commits.items():
        for fate in commit.fates:
            reached[f"a group is {fate.fate}"] += 1
            if (name := places.get((fate.group_id, fate.attempt))) is None:
                continue
            rows = reader.read_group(*name, fate.group_id, fate.attempt).to_pylist()
            rewards = [row["reward"] for row in rows if row["reward"] is not None]
            tokens = [token for row in rows if row["reward"] is not None for token in row["completion_token_ids"]]
            versions = versions_of(np.array(tokens, np.int64))
            stale = step - 1 - versions > config.schedule.max_lag
            # A commit may have fates of groups that the next step could not take.
            stale_next = step - versions > config.schedule.max_lag
            is_scored = len(rewards) >= 2
            is_equal = config.rollouts.filter_zero_variance and len(set(rewards)) == 1
            is_right = {
                "failed": not is_scored,
                "filtered": is_scored and is_equal,
                "dropped_stale": stale_next.any() if config.schedule.stale == "drop" else stale_next.all(),
                "trained": is_scored and not is_equal and not stale.all(),
                "quarantined": is_scored,
            }[fate.fate]
            if not is_right:
                reason = f"rewards {rewards}, {stale.sum()} stale tokens"
                yield f"step {step}: group {fate.group_id} is {fate.fate}: {reason}"


def _damaged(store: PlainStore, damaged: Iterable[str]) -> Iterator[str]:
    """Objects that the audit calls damaged and no fault has damaged."""
    for text in damaged:
        if not any(key in text or key.rpartition("/")[0] in text for key in store.disk.damaged):
            yield f"damaged without a fault: {text}"


def _lost_weights(store: PlainStore, commits: Commits, config: RunConfig) -> Iterator[str]:
    """docs/storage.md: the first, the last, and the newest weights.keep durable versions stay."""
    manifests = {step: commit.manifest for step, commit in commits.items() if commit.manifest is not None}
    durable = {step: manifest.key for step, manifest in manifests.items() if manifest.key is not None}
    newest = sorted(durable)[-config.weights.keep :]
    for step in durable.keys() & {0, config.trainer.steps, *newest}:
        if not any(key.startswith(f"{durable[step]}/") for key in store.disk.objects):
            yield f"the weights of version {step} are gone"
