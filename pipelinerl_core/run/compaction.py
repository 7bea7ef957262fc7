"""Compaction of commits, so that the requests of a start do not grow with the number of steps (docs/storage.md).

A trainer compacts commits that are far behind the newest commit. The compacted object is a function of the commits of
one epoch, each of which has one writer; the rule that selects the commits that count does not change. Therefore a
crash between the two steps below, or a second process that compacts at the same time, is harmless:

    write   compacted/commits/<first>-<last>.<k>.parquet
    delete  commits/<step>.<k>.json for the steps first to last
"""

import itertools
import logging
from collections.abc import Mapping

from pipelinerl_core.interfaces import ObjectStore
from pipelinerl_core.run.compacted import StepRange, decode_commits, encode_commits, list_commits, read_range
from pipelinerl_core.run.history import counting, read_epochs
from pipelinerl_core.run.reading import parse_record
from pipelinerl_core.run.records import Commit, parse_commit_key

logger = logging.getLogger(__name__)

FILE_STEPS = 128
"""Steps of a compacted object; fewer if a trainer epoch begins or ends in between."""
MARGIN_STEPS = 16
"""Newest steps that are never compacted. At most two steps are uncommitted when a trainer is replaced."""


def is_due(step: int) -> bool:
    """Whether commits become compactable with the commit of a step."""
    return step % FILE_STEPS == MARGIN_STEPS - 1


def compact_commits(store: ObjectStore) -> int:
    """Compact the counting commits at least MARGIN_STEPS behind the newest one; returns the number of new objects.

    Raises StoreError. The next call continues.
    """
    listing = list_commits(store)  # before the epochs (see `counting`)
    counted = counting(listing.keys(), read_epochs(store))
    compacted = {key for file in listing.files for key in file.commit_keys()}
    for file in listing.files:
        if left_over := set(listing.originals) & set(file.commit_keys()):  # of a crash before the deletion
            read_range(store, file)
            store.delete(sorted(left_over))
    left = {step: key for step, key in counted.items() if key not in compacted}
    files = _files(left, max(counted, default=-1) - MARGIN_STEPS)
    for file in files:
        _move(store, file)
    if files:
        logger.info("commits of steps %d to %d are compacted", files[0].first, files[-1].last)
    return len(files)


def _files(left: Mapping[int, str], through: int) -> list[StepRange]:
    """The objects to write: consecutive steps of one epoch between multiples of FILE_STEPS, up to step `through`."""
    ends = (through + 1) // FILE_STEPS * FILE_STEPS
    steps = [(step, parse_commit_key(key)[1]) for step, key in left.items() if step < ends]
    groups = itertools.groupby(
        enumerate(steps), lambda entry: (entry[1][1], entry[1][0] // FILE_STEPS, entry[1][0] - entry[0])
    )
    stretches = [(epoch, [step for _, (step, _) in members]) for (epoch, _, _), members in groups]
    return [StepRange(own[0], own[-1], epoch) for epoch, own in stretches]


def _move(store: ObjectStore, file: StepRange) -> None:
    keys = file.commit_keys()
    records = [store.get(key) for key in keys]
    commits = [parse_record(data, f"{store.url}/{key}", Commit) for key, data in zip(keys, records, strict=True)]
    data = encode_commits(records, commits)
    decode_commits(data, file, file.commits_key)  # the originals are deleted only if the rows can be read back
    store.put(file.commits_key, data)
    store.delete(keys)
