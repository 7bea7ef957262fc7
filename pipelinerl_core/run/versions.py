"""Durable weight versions of a run, and the versions that --version names."""

import math
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping

from pipelinerl_core.config import RunConfig
from pipelinerl_core.errors import ConfigError
from pipelinerl_core.interfaces import ObjectStore
from pipelinerl_core.run.commits import read_commits
from pipelinerl_core.run.context import RunContext
from pipelinerl_core.run.reading import list_keys
from pipelinerl_core.run.records import MANIFEST_FILE, Commit, base_of, parse_step_key
from pipelinerl_core.storage.keys import delete_with_folders

ALL = "all"
DUE = "due"
"""--version of the versions that an evaluator beside training evaluates, as many as are durable."""
# The evaluator beside training reads the newest version that is due; a newer version may be due while it reads.
_KEPT_DUE = 2


def names_several(version: str) -> bool:
    """Whether --version names several versions: `all`, `due`, or numbers with commas."""
    return version in (ALL, DUE) or "," in version


def retained(config: RunConfig, stored: Iterable[int]) -> set[int]:
    """The versions whose weights stay in the object store, of all versions that were ever stored.

    These are the first and the last version, the newest `weights.keep` versions, as many of those that the
    configuration keeps (`RunConfig.keeps`; others were stored with a checkpoint), and the newest two that an
    evaluator beside training may have to read.
    """
    versions = sorted(set(stored))
    keep = config.weights.keep
    if keep == 0:
        return set(versions)
    kept = [version for version in versions if config.keeps(version)]
    due = [version for version in versions if config.evaluates(version)]
    ends = {0, config.trainer.steps}.intersection(versions)
    return {*ends, *versions[-keep:], *kept[-keep:], *due[-_KEPT_DUE:]}


def weights_to_remove(config: RunConfig, keys: Iterable[str], step: int) -> list[str]:
    """The keys below `weights` of versions before a committed `step` that the run does not retain."""
    stored = [(version, key) for key in keys if (version := parse_step_key(key)[0]) <= step]
    kept = retained(config, (version for version, key in stored if key.endswith(f"/{MANIFEST_FILE}")))
    kept |= bases_of(kept, (key for _, key in stored))
    return [key for version, key in stored if version not in kept and version < step]


def bases_of(versions: Collection[int], keys: Iterable[str]) -> set[int]:
    """The versions that are needed to read versions that are stored as differences. keys: below `weights`."""
    needed = {base_of(key) for key in keys if parse_step_key(key)[0] in versions}
    return {base for base in needed if base is not None}


def remove_weights(store: ObjectStore, keys: Collection[str]) -> None:
    """Delete manifests before data, so that an interrupted deletion leaves no version that looks complete."""
    manifests = {key for key in keys if key.endswith(f"/{MANIFEST_FILE}")}
    store.delete(sorted(manifests))
    delete_with_folders(store, sorted(set(keys) - manifests))


def stored_weights(store: ObjectStore) -> dict[int, set[str]]:
    """Version -> prefixes (`WeightManifest.key`) under which the object store has it, whole or as a difference.

    Two trainers may have stored the same version, of which a commit names one.
    """
    end, stored = f"/{MANIFEST_FILE}", defaultdict[int, set[str]](set)
    for key in list_keys(store, "weights"):
        if key.endswith(end):
            stored[parse_step_key(key)[0]].add(key.removesuffix(end))
    return dict(stored)


def stored_versions(store: ObjectStore, through: float = math.inf) -> set[int]:
    """Versions that the object store has, of any trainer; one listing.

    through: the newest version that counts. Later ones may be of steps that were given up.
    """
    return {version for version in stored_weights(store) if version <= through}


def is_stored(commits: Mapping[int, Commit], step: int, stored: Mapping[int, set[str]]) -> bool:
    """Whether the weights that the commit of a step names are among `stored_weights`.

    Reads the commit only if a version of the step is stored.
    """
    if step not in stored or step not in commits:
        return False
    manifest = commits[step].manifest
    return manifest is not None and manifest.key in stored[step]


def durable_versions(commits: Iterable[Commit]) -> list[int]:
    """Versions whose weights were stored in the object store, in order; `retained` says which stay there."""
    return sorted(commit.step for commit in commits if commit.manifest and commit.manifest.key is not None)


def find_commit(run: RunContext, version: str, *, may_replay: bool = False) -> Commit:
    """The commit of `first`, `last` (the newest durable version) or a number. ConfigError if it is not stored.

    may_replay: a number may be of any committed step, whose weights a replay computes again.
    """
    commits, stored = read_commits(run.store), stored_weights(run.store)
    named = [step for step in commits if version in ("first", str(step))][:1]
    for step in reversed(commits) if version == "last" else named:
        if is_stored(commits, step, stored) or (may_replay and version == str(step)):
            return commits[step]
    if may_replay:
        there = f"the newest step is {max(commits)}" if commits else "no step is committed"
        raise ConfigError(f"--version {version}: no such step; {there}")
    weights = run.config.weights
    raise ConfigError(
        f"--version {version}: not durable (the newest step is {max(commits, default=-1)}, weights.durable_every="
        f"{weights.durable_every}, weights.keep={weights.keep}). `last` is the newest durable version. "
        "On a CPU, `pipelinerl export` and `pipelinerl train --from` compute the weights of any step again"
    )


def find_commits(run: RunContext, version: str) -> list[Commit]:
    """Commits that --version names, in order: `all` durable versions, those of them that training evaluates (`due`),
    numbers with commas, or see `find_commit`."""
    if version in (ALL, DUE):
        commits = read_commits(run.store)
        stored = stored_weights(run.store)
        durable = [commits[step] for step in sorted(stored) if is_stored(commits, step, stored)]
        ends = {0, max(commits, default=0)}
        return [
            commit for commit in durable if version == ALL or commit.step in ends or run.config.evaluates(commit.step)
        ]
    named = {commit.step: commit for commit in (find_commit(run, number) for number in version.split(","))}
    return [named[step] for step in sorted(named)]


def first_of_every(steps: Iterable[int], num_steps: int) -> set[int]:
    """The first of the steps in each range of `num_steps` steps from a multiple of it; num_steps=0: none."""
    first: dict[int, int] = {}
    for step in sorted(steps) if num_steps else ():
        first.setdefault(step // num_steps, step)
    return set(first.values())
