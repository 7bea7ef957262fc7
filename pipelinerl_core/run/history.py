"""Epochs of a run, and the selection of commits that count: commits that later epochs have adopted.

A trainer takes over in two writes of its epoch record:

    claim   epochs/<k>.json with is_claim, a new number       from now on no earlier epoch announces a commit
    list    commits/                                          finds every commit that an earlier epoch announced
    adopt   epochs/<k>.json with adopted_through and parent   decides which commits of earlier epochs count

A commit that arrives after the list counts for no reader. An earlier trainer checks for a claim before and after the
write of a commit, and announces the commit after the second check only. Therefore a late write of a fenced process is
harmless, and the hub never has a commit that readers ignore (docs/adr/0019-takeover-in-two-writes.md).
"""

import itertools
import os
import shlex
import socket
import sys
import time
from collections.abc import Collection, Iterable, Mapping
from types import MappingProxyType
from typing import Any, Literal

from pipelinerl_core.errors import ConfigError, Fenced, StoreUnavailable
from pipelinerl_core.interfaces import ObjectStore
from pipelinerl_core.run.compacted import list_commits, read_compacted
from pipelinerl_core.run.hub_status import process_mark, read_hub
from pipelinerl_core.run.processor import processor
from pipelinerl_core.run.reading import find_record, list_keys, read_record
from pipelinerl_core.run.records import (
    COMMITS_PREFIX,
    EVALS_PREFIX,
    HUB_KEY,
    Commit,
    EpochRecord,
    commit_key,
    epoch_key,
    eval_version,
    parse_commit_key,
    parse_step_key,
)

MAX_LATE = 2
"""Commits that a fenced trainer may have written around the listing of its successor."""
# Bound of the search for a free epoch number; a run has far fewer starts.
_MAX_EPOCHS = 100_000


def read_epochs(store: ObjectStore) -> list[EpochRecord]:
    """Every start of hub and trainer, oldest first."""
    return [read_record(store, key, EpochRecord) for key in list_keys(store, "epochs")]


def counting(keys: Iterable[str], epochs: Iterable[EpochRecord]) -> dict[int, str]:
    """Step -> key of the commit that counts, by step. `epochs` must be read after the commits were listed.

    A commit of trainer epoch k for step s counts unless a later trainer epoch adopted only steps below s. If several
    commits of a step count, the commit of the newest epoch is chosen. An epoch that its successor passed over (the
    successor has an older parent) adopts nothing, and its commits do not count. The newest claim is preliminary:
    commits above the claim's adopted_through count only after their adoption.
    Example: epoch 2 committed steps 0 to 6, epoch 4 adopted through 5 and committed 6: step 6 is epoch 4's.
    """
    trainers = [record for record in epochs if record.role == "trainer"]
    lineage = _lineage(trainers)
    newest = lineage[0].epoch if lineage else -1
    limits = [*lineage, *(record for record in trainers if record.is_claim and record.epoch > newest)]
    passed_over = {record.epoch for record in trainers} - {record.epoch for record in lineage}
    last_step = dict.fromkeys(passed_over, -1)  # epoch -> the last of its steps that counts
    counted: dict[int, str] = {}
    for (step, epoch), key in sorted((parse_commit_key(key), key) for key in keys):
        if epoch not in last_step:
            later = (limit.adopted_through for limit in limits if limit.epoch > epoch)
            last_step[epoch] = min(later, default=sys.maxsize)
        if step <= last_step[epoch]:
            counted[step] = key
    return counted


def _lineage(trainers: Iterable[EpochRecord]) -> list[EpochRecord]:
    """The newest epoch that has adopted commits, its parent, the parent of the parent, ..."""
    lineage: list[EpochRecord] = []
    oldest: int | None = None
    for record in sorted(trainers, key=lambda record: record.epoch, reverse=True):
        if not record.is_claim and (oldest is None or record.epoch <= oldest):
            lineage.append(record)
            oldest = record.parent
    return lineage


def refuse_missing(
    store: ObjectStore, steps: Collection[int], epochs: Iterable[EpochRecord], known: int = -1
) -> None:
    """Raise StoreUnavailable if commits that existed are not among the counting `steps`, as the store listed them.

    These are steps below the newest one, steps that an earlier trainer epoch has adopted, and steps up to `known`.
    The store may have given a wrong answer once; no run continues from a wrong answer.
    """
    adopters = [record for record in epochs if record.role == "trainer" and not record.is_claim]
    accepted = max((adopter.epoch for adopter in adopters if adopter.accepts_loss), default=0)
    adopted = max((adopter.adopted_through for adopter in adopters if adopter.epoch >= accepted), default=-1)
    newest = max(adopted, known, *steps, -1)
    missing = next((step for step in range(newest + 1) if step not in steps), None)
    if missing is not None:
        raise StoreUnavailable(
            f"{store.url}/{COMMITS_PREFIX}/{missing:08d}.*: the store lists no commit of step {missing}, but step "
            f"{newest} was committed. The store may have answered wrongly: try again. If commits are lost for good, "
            f"`pipelinerl accept-loss {shlex.quote(store.url)}` lets the run continue from the last step before them"
        )


def counted_by_hub(store: ObjectStore) -> int:
    """The newest step that the trainer has announced to a hub, after its commit was written; -1 without a hub.

    Read before the commits are listed: a hub that is live counts on.
    """
    hub = read_hub(store)
    step = hub.live.get("step") if hub is not None else None
    return step if isinstance(step, int) and step > 0 else -1


def refuse_shrunk(store: ObjectStore, listed: Collection[int], before: Iterable[int]) -> None:
    """Raise StoreUnavailable if the store lists fewer steps than in an earlier listing. gc may remove old orphans."""
    missing = max((step for step in before if step not in listed), default=None)
    if missing is not None and missing > max(listed, default=-1):
        raise StoreUnavailable(
            f"{store.url}/{COMMITS_PREFIX}/{missing:08d}.*: the store listed the commit a moment ago, and now "
            "does not list it: try again"
        )


def lost_commits(keys: Iterable[str], epochs: Iterable[EpochRecord]) -> list[str]:
    """A sentence for each trainer epoch with more commits that do not count than a takeover leaves (MAX_LATE).

    keys, epochs: as in `counting`. Losses that a user has accepted are left out.
    """
    known, trainers = list(keys), [record for record in epochs if record.role == "trainer"]
    lineage, counted = _lineage(trainers), set(counting(known, trainers).values())
    newest = max(trainers, key=lambda record: record.epoch, default=None)
    steps: dict[tuple[int, str], list[int]] = {}
    for step, epoch in sorted(parse_commit_key(key) for key in known if key not in counted):
        later = [record for record in lineage if record.epoch > epoch and record.adopted_through < step]
        reason = f"no epoch adopted epoch {epoch}"
        if later:  # the newest epoch is the first
            reason = f"epoch {later[-1].epoch} adopted only steps through {later[-1].adopted_through}"
        elif newest is not None and newest.is_claim and lineage and lineage[0].epoch == epoch:
            reason = f"epoch {newest.epoch} has not adopted them. If it has ended, the next start adopts them"
        if not any(record.accepts_loss and record.epoch > epoch for record in lineage):
            steps.setdefault((epoch, reason), []).append(step)
    return [
        f"{len(late)} commits of epoch {epoch} do not count, steps {late[0]} to {late[-1]}: {reason}"
        for (epoch, reason), late in steps.items()
        if len(late) > MAX_LATE
    ]


def counted_commit_keys(store: ObjectStore) -> dict[int, str]:
    """Step -> key of the commit that counts, for all committed steps in order; `read_commit` reads the keys."""
    # The commits are listed before the epochs: a commit that an epoch did not adopt was written after the claim of
    # the epoch, so that the epochs that are read contain the claim.
    keys = list_commits(store).keys()
    return counting(keys, read_epochs(store))


def read_commit(store: ObjectStore, key: str) -> Commit:
    """Read a commit, original or compacted; `Commits` reads many (run/commits.py).

    Raises StoreError, naming the value, if the commit is damaged or a number is out of range.
    """
    return find_record(store, key, Commit) or read_compacted(store, key)


def is_complete(store: ObjectStore, steps: int) -> bool:
    """Whether the last step is committed, by a commit that counts."""
    if not any(parse_commit_key(key)[0] >= steps for key in list_keys(store, COMMITS_PREFIX)):
        return False
    return max(counted_commit_keys(store), default=-1) >= steps


def take_over(
    store: ObjectStore, arithmetic: Mapping[str, str | int] = MappingProxyType({}), *, accepts_loss: int | None = None
) -> tuple[EpochRecord, dict[int, str]]:
    """Claim the next trainer epoch and adopt the commits of earlier epochs: (epoch, step -> key of its commit).

    accepts_loss: the last step before missing commits that a user gives up; later steps are not adopted.
    Raises Fenced if a newer trainer has claimed an epoch in the meantime, StoreUnavailable as `refuse_missing`.
    """
    known = counted_by_hub(store)
    # Listed twice, because readers believe the claim until the adoption: one wrong answer must not change it.
    through = max(max(counted_commit_keys(store), default=-1) for _ in range(2))
    claim = take_epoch(store, "trainer", through, arithmetic, is_claim=True)
    keys = list_commits(store).keys()
    trainers = [record for record in read_epochs(store) if record.role == "trainer"]
    if claim.epoch not in {record.epoch for record in trainers}:
        raise _incomplete(store, claim)
    for newer in trainers:
        if newer.epoch > claim.epoch:
            raise _fenced(claim, newer)
    # Claims of earlier epochs are ignored. Their processes are fenced: they commit nothing, also if they adopt later.
    earlier = [record for record in trainers if not record.is_claim]
    commits = counting(keys, earlier)
    if accepts_loss is not None:
        if _last_whole(commits) != accepts_loss:
            raise StoreUnavailable(
                f"{store.url}/{COMMITS_PREFIX}: the store lists other commits than a moment ago; nothing is given up"
            )
        commits = {step: key for step, key in commits.items() if step <= accepts_loss}
    else:
        refuse_missing(store, commits, earlier, max(known, through))
    adopted = {
        "is_claim": False,
        "accepts_loss": accepts_loss is not None,
        "adopted_through": max(commits, default=-1),
        "parent": max((record.epoch for record in earlier), default=None),
    }
    epoch = claim.model_copy(update=adopted)
    store.put(epoch_key(epoch.epoch), epoch.model_dump_json().encode())
    return epoch, commits


def accept_lost_commits(store: ObjectStore, *, is_final: bool) -> dict[str, Any]:
    """The last step before missing commits, and why they are missing; `is_final` makes the run continue there.

    Commits that a takeover has left out are accepted too. Raises ConfigError if no commit is missing or left out.
    """
    known = counted_by_hub(store)
    keys, epochs = list_commits(store).keys(), read_epochs(store)
    commits = counting(keys, epochs)
    reason = next(iter(lost_commits(keys, epochs)), "")
    try:
        refuse_missing(store, commits, epochs, known)
    except StoreUnavailable as error:
        reason = str(error).partition(": ")[2].partition(". ")[0]
    if not reason:
        raise ConfigError(f"{store.url}: no commit is missing, so there is no loss to accept")
    last = _last_whole(commits)
    if is_final:
        take_over(store, accepts_loss=last)
        _remove_given_up(store, last)
        if hub := read_hub(store):
            accepted = hub.model_copy(update={"live": {**hub.live, "step": max(0, last)}})
            store.put(HUB_KEY, accepted.model_dump_json().encode())
    return {"run": store.url, "step": last, "reason": reason, "is_accepted": is_final}


def _remove_given_up(store: ObjectStore, last: int) -> None:
    """Delete the weights and evaluations of the steps after `last`: the run makes these versions again. Delete the
    logs of unfinished groups too, which may have tokens of these versions."""
    store.delete(list_keys(store, "partials"))
    store.delete([key for key in list_keys(store, "weights") if parse_step_key(key)[0] > last])
    store.delete([key for key in list_keys(store, EVALS_PREFIX) if eval_version(key) > last])


def _last_whole(commits: Collection[int]) -> int:
    """The last of the steps 0, 1, 2, ... without a gap; -1 for none."""
    return next(step for step in itertools.count() if step not in commits) - 1


def take_epoch(
    store: ObjectStore,
    role: Literal["hub", "trainer"],
    adopted_through: int,
    arithmetic: Mapping[str, str | int] = MappingProxyType({}),
    *,
    is_claim: bool = False,
) -> EpochRecord:
    """Create the record of the next epoch number, which fences all earlier epochs of the role.

    A trainer calls `take_over`. Raises Fenced if no number is free.
    """
    # Listed twice: if the only listing lacked the earlier hubs, this hub would take itself for the first hub, and
    # would number its attempts as the first hub did.
    keys = {*list_keys(store, "epochs"), *list_keys(store, "epochs")}
    epochs = [read_record(store, key, EpochRecord) for key in keys]
    parent = max((earlier.epoch for earlier in epochs if earlier.role == role and not earlier.is_claim), default=None)
    candidate = max((record.epoch for record in epochs), default=0) + 1
    while candidate < _MAX_EPOCHS:
        record = EpochRecord(
            epoch=candidate,
            role=role,
            parent=parent,
            adopted_through=adopted_through,
            is_claim=is_claim,
            started_at=time.time(),
            host=socket.gethostname(),
            pid=os.getpid(),
            process=process_mark(os.getpid()),
            arithmetic=dict(arithmetic),
            processor=processor(),
        )
        try:
            store.put(epoch_key(candidate), record.model_dump_json().encode(), create_only=True)
        except FileExistsError:
            candidate += 1
            continue
        return record
    raise Fenced(f"no free epoch below {_MAX_EPOCHS} under {store.url}/epochs")


def steps_to_replay(run: str, commits: Mapping[int, str], first: int | None, last: int | None) -> tuple[int, int]:
    """First and last step of a replay; None: the first and the last step of the run. Raises ConfigError."""
    if not commits or max(commits) < 1:
        raise ConfigError(f"{run}: no step is committed, so a replay has no batches")
    end = min(last if last is not None else max(commits), max(commits))
    begin = max(1, first if first is not None else 1)
    if begin > end:
        raise ConfigError(f"--from-step {begin} is beyond the last step to replay, {end}")
    return begin, end


def write_commit(store: ObjectStore, epoch: EpochRecord, commit: Commit) -> None:
    """Write a commit of a trainer epoch. If this function returns, every successor adopts the commit.

    Raises Fenced if a newer trainer exists, which may or may not adopt the commit.
    """
    check_not_fenced(store, epoch)
    store.put(commit_key(commit.step, commit.epoch), commit.model_dump_json().encode())
    # A trainer that claimed its epoch between check and write may have listed the commits before the write.
    check_not_fenced(store, epoch)


def check_not_fenced(store: ObjectStore, epoch: EpochRecord) -> None:
    """Raise Fenced if a newer epoch of the same role exists, StoreUnavailable if the listing is not whole."""
    for key in reversed(list_keys(store, "epochs")):
        if key == epoch_key(epoch.epoch):
            return
        newer = read_record(store, key, EpochRecord)
        if newer.role == epoch.role:
            raise _fenced(epoch, newer)
    raise _incomplete(store, epoch)


def _incomplete(store: ObjectStore, epoch: EpochRecord) -> StoreUnavailable:
    key = epoch_key(epoch.epoch)
    return StoreUnavailable(
        f"{store.url}/epochs: the store lists no {key}, which this process has written: try again"
    )


def _fenced(epoch: EpochRecord, newer: EpochRecord) -> Fenced:
    return Fenced(f"{epoch.role} epoch {epoch.epoch} was taken over by epoch {newer.epoch} on {newer.host}")
