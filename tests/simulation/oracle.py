"""What must hold for the store of a run that has ended, whatever happened to its processes."""

import hashlib
from collections.abc import Iterator

from pipelinerl_core.config import RunConfig
from pipelinerl_core.data.codec import decode_batch, from_segment
from pipelinerl_core.data.compaction import list_rollouts, read_rollouts
from pipelinerl_core.data.segments import SegmentReader
from pipelinerl_core.errors import SchemaMismatch
from pipelinerl_core.run.commits import Commits, read_commits
from pipelinerl_core.tools.audit import Audit
from pipelinerl_core.types import GroupKey
from pipelinerl_core.weights.files import serialize
from tests.fakes import MemoryStore
from tests.simulation.parts import ScriptedLearner
from tests.simulation.store import PlainStore


def check(store: PlainStore, config: RunConfig) -> list[str]:
    """Sentences; empty if the run closes, its weights are those of its batches, and no row is lost."""
    audit = Audit(store, config).run().document
    if not audit["closes"] or audit["lost"] or audit["trained_twice"] or audit["commits"] != config.trainer.steps + 1:
        return [f"audit: {audit}"]
    commits = read_commits(store)
    return [*_other_weights(store, commits), *_lost_rows(store, commits)]


def weights_of(store: PlainStore) -> list[str]:
    """sha256 of the weights of each step."""
    return [commit.weights_sha256 for commit in read_commits(store).values()]


def _other_weights(store: PlainStore, commits: Commits) -> Iterator[str]:
    """Steps whose weights are not those of the recorded batches."""
    learner = ScriptedLearner()
    for step, commit in commits.items():
        if step:
            data = [batch for entry in commit.batches for batch in from_segment(store.get(entry.name), entry.name)]
            learner.learn([row for batch in data for row in decode_batch(batch)])
        if hashlib.sha256(serialize(learner.weights())).hexdigest() != commit.weights_sha256:
            yield f"step {step}: the weights are not those of the recorded batches"
            return


def _lost_rows(store: PlainStore, commits: Commits) -> Iterator[str]:
    """Groups whose rows were in a deleted segment, were not trained, and are in no compacted object."""
    kept: set[GroupKey] = set()
    for steps in list_rollouts(store):
        table = read_rollouts(store, steps, ["group_id", "attempt"])
        kept |= set(zip(table["group_id"].to_pylist(), table["attempt"].to_pylist(), strict=True))
    fates = {fate.group_id: fate for commit in commits.values() for fate in commit.fates}
    removed = MemoryStore()
    for key, data in store.disk.removed.items():
        removed.put(key, data)
        try:
            refs = SegmentReader(removed).groups_in(key)
        except SchemaMismatch:  # a fault damaged it
            continue
        for group_id, attempt in ((ref.group_id, ref.attempt) for ref in refs):
            fate = fates.get(group_id)
            if fate is None:
                yield f"{key} was deleted with the undecided group {group_id}"
            elif fate.attempt == attempt and (group_id, attempt) not in kept:
                yield f"{key} was deleted, and group {group_id} ({fate.fate}) is in no compacted object"
