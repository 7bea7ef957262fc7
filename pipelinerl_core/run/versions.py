"""Durable weight versions of a run, and the versions that --version names."""

from collections.abc import Iterable

from pipelinerl_core.errors import ConfigError
from pipelinerl_core.run.context import RunContext
from pipelinerl_core.run.history import counted_commit_keys, read_commit, read_epochs
from pipelinerl_core.run.records import Commit

ALL = "all"


def names_several(version: str) -> bool:
    """Whether --version names several versions: `all`, or numbers with commas."""
    return version == ALL or "," in version


def is_durable(commit: Commit) -> bool:
    """Whether the weights after a step are in the object store."""
    return commit.manifest is not None and commit.manifest.key is not None


def durable_versions(commits: Iterable[Commit]) -> list[int]:
    """Versions whose weights are in the object store, in order."""
    return sorted(commit.step for commit in commits if is_durable(commit))


def find_commit(run: RunContext, version: str) -> Commit:
    """The commit of `first`, `last` (the newest durable version) or a number. ConfigError if it is not durable."""
    keys = counted_commit_keys(run.store, read_epochs(run.store))
    named = [step for step in keys if version in ("first", str(step))][:1]
    for step in reversed(keys) if version == "last" else named:
        commit = read_commit(run.store, keys[step])
        if is_durable(commit):
            return commit
    raise ConfigError(
        f"--version {version}: not durable (the newest step is {max(keys, default=-1)}, weights.durable_every="
        f"{run.config.weights.durable_every}). `last` is the newest durable version; `pipelinerl replay` can compute "
        "the weights of a step again"
    )


def find_commits(run: RunContext, version: str) -> list[Commit]:
    """Commits that --version names, in order: `all` durable versions, numbers with commas, or see `find_commit`."""
    if version == ALL:
        keys = counted_commit_keys(run.store, read_epochs(run.store))
        return [commit for key in keys.values() if is_durable(commit := read_commit(run.store, key))]
    found = {commit.step: commit for commit in (find_commit(run, one) for one in version.split(","))}
    return [found[step] for step in sorted(found)]
