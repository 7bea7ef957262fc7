"""Garbage collection of a run's objects; the audit closes before and after.

Run: python -m pipelinerl_core.tools.gc --run URL [--rollouts] [--dry-run] [--json]. Refused on a live run.

| class    | objects | removed |
|----------|---------|---------|
| orphans  | up to the newest commit: objects of trainers that crashed before their commit, or were fenced | always |
| checkpoints | all except the checkpoint of step 0 and the newest two (only the newest in a finished run) | always |
| partials | logs of decided groups; in a finished run all logs | always |
| rollouts | segments in which every group is decided; batches/ has the trained rows, too | with --rollouts |

Detection of a live run is not reliable: the hub may be restarting, a clock may be behind, the store may be slow.
Therefore objects that a run may write when it continues from the newest commit are never garbage: objects of later
steps stay until the run has passed these steps. If the run is started during the collection, nothing is removed.
"""

import argparse
import json
import sys
from collections.abc import Iterable

from pipelinerl_core.config import RunConfig
from pipelinerl_core.data.codec import from_segment
from pipelinerl_core.data.partials import decode_partials
from pipelinerl_core.data.segments import parse_rollout_key
from pipelinerl_core.errors import PipelineRLError, SchemaMismatch
from pipelinerl_core.interfaces import ObjectStore
from pipelinerl_core.roles.runtime.process import RUN, run_main
from pipelinerl_core.run.context import open_run
from pipelinerl_core.run.history import counted_commit_keys, read_commit, read_epochs
from pipelinerl_core.run.hub_status import refuse_second_hub
from pipelinerl_core.run.records import Commit, batch_key, checkpoint_prefix


class Collector:
    """Finds the garbage of a run, class by class; keys sorted by name."""

    def __init__(self, store: ObjectStore, config: RunConfig) -> None:
        """Read every commit."""
        self._store = store
        self.epochs = read_epochs(store)
        """Epochs that define the counting commits; a newer epoch invalidates the collection."""
        keys = counted_commit_keys(store, self.epochs)
        self._commit_keys = set(keys.values())
        self._commits: list[Commit] = [read_commit(store, key) for key in keys.values()]
        last = self._commits[-1] if self._commits else None
        self._is_done = last is not None and last.step == config.trainer.steps
        self._open = set(last.open_groups) if last is not None else set()
        self._frontier = last.next_group_id if last is not None else 0
        self._low_water = dict(last.low_water) if last is not None else {}

    def orphans(self) -> list[str]:
        """Objects of passed steps that no counting commit refers to."""
        if not self._commits:
            return []
        last = self._commits[-1].step
        kept = {f"{commit.manifest.key}/" for commit in self._commits if commit.manifest and commit.manifest.key}
        kept |= {f"{checkpoint_prefix(commit.step, commit.epoch)}/" for commit in self._commits}
        kept |= {f"{batch_key(commit.step, commit.epoch, rank=0).rpartition('/')[0]}/" for commit in self._commits}
        found = [key for key in self._store.list("commits") if key not in self._commit_keys]
        for prefix in ("batches", "weights", "checkpoints"):
            found += [key for key in self._store.list(prefix) if f"{key.rpartition('/')[0]}/" not in kept]
        if not self._is_done:
            # Weights of the last step stay, too: a starting trainer, or an actor that cannot read the weights, makes
            # the trainer publish the version again under a key that no commit names.
            found = [key for key in found if _step_of(key) <= last - key.startswith("weights/")]
        return sorted(found)

    def checkpoints(self) -> list[str]:
        """Checkpoints that neither a start nor a replay needs."""
        named = [commit.checkpoint for commit in self._commits if commit.checkpoint is not None]
        prefixes = list(dict.fromkeys(f"{checkpoint_prefix(ref.step, ref.epoch)}/" for ref in named))
        first = [f"{checkpoint_prefix(0, commit.epoch)}/" for commit in self._commits[:1]]
        kept = {*first, *prefixes[-1 if self._is_done else -2 :]}
        made = {f"{checkpoint_prefix(commit.step, commit.epoch)}/" for commit in self._commits} - kept
        return [key for key in self._store.list("checkpoints") if f"{key.rpartition('/')[0]}/" in made]

    def partials(self) -> list[str]:
        """Logs without an open group."""
        keys = self._store.list("partials")
        return keys if self._is_done else [key for key in keys if not self._is_open(self._logged(key))]

    def rollouts(self) -> list[str]:
        """Segments below the low-water marks, in which every group is decided."""
        found = []
        for key in self._store.list("rollouts"):
            name = parse_rollout_key(key)
            mark = self._low_water.get(f"{name.actor}/{name.epoch}")
            if self._is_done or (mark is not None and name.seq < mark):
                found.append(key)
        return found

    def _is_open(self, groups: Iterable[int]) -> bool:
        return any(group_id in self._open or group_id >= self._frontier for group_id in groups)

    def _logged(self, key: str) -> set[int]:
        try:
            batches = from_segment(self._store.get(key), key)
            return {row.group_id for batch in batches for row in decode_partials(batch)}
        except SchemaMismatch:
            return set()  # an incomplete log: no actor can continue a group from it


def _step_of(key: str) -> int:
    """Step of a key <class>/<step>.<k>...; -1 for any other key."""
    digits = key.split("/")[1].partition(".")[0]
    return int(digits) if digits.isdecimal() else -1


def collect(store: ObjectStore, config: RunConfig, *, with_rollouts: bool, dry_run: bool) -> dict[str, list[str]]:
    """Class -> removed keys (`dry_run`: removable keys). If the run was started: PipelineRLError, nothing removed."""
    collector = Collector(store, config)
    garbage = {
        "orphans": collector.orphans(),
        "checkpoints": collector.checkpoints(),
        "partials": collector.partials(),
    }
    if with_rollouts:
        garbage["rollouts"] = collector.rollouts()
    if not dry_run:
        refuse_second_hub(store)
        if read_epochs(store) != collector.epochs:  # a hub takes its epoch long before its first heartbeat
            raise PipelineRLError(f"{store.url}: the run was started during the collection; nothing was removed")
        for keys in garbage.values():
            store.delete(keys)
    return garbage


def main() -> int:
    """Command line of the garbage collection."""
    switches = {name: {"action": "store_true"} for name in ("--rollouts", "--dry-run", "--json")}
    return run_main((__doc__ or "").splitlines()[0], {**RUN, **switches}, _remove, logs=False)


def _remove(options: argparse.Namespace) -> None:
    context = open_run(options.run)
    refuse_second_hub(context.store)
    garbage = collect(context.store, context.config, with_rollouts=options.rollouts, dry_run=options.dry_run)
    verb = "would be removed" if options.dry_run else "removed"
    if options.json:
        print(json.dumps({"run_id": context.run_id, "dry_run": options.dry_run, **garbage}))  # noqa: T201
    else:
        for name, keys in garbage.items():
            print(f"{name}: {len(keys)} objects {verb}")  # noqa: T201


if __name__ == "__main__":
    sys.exit(main())
