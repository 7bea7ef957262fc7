"""Each request that a takeover, a hub, a compaction, a reader, ... makes of a store fails once, in each way.

An operation gives the result of a healthy store, or raises an error that names the store. Afterwards, on a healthy
store, each commit and each row is there, and the audit says what it said before. The requests fail where they leave
this process: calls of the operating system below a directory, and answers of an S3 server.
"""

import errno
import io
import os
import shutil
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np
import pyarrow.compute as pc
import pytest
import torch

from pipelinerl_core.data.codec import decode_batch, encode_rollouts, to_segment
from pipelinerl_core.data.compaction import compact_rollouts, list_rollouts, read_rollouts
from pipelinerl_core.data.segments import SegmentReader
from pipelinerl_core.data.trained import TrainedRows
from pipelinerl_core.errors import Fenced, PipelineRLError
from pipelinerl_core.interfaces import ObjectStore
from pipelinerl_core.messages import FateRecord
from pipelinerl_core.models.resolve import build_config
from pipelinerl_core.report.live_view import run_status
from pipelinerl_core.roles.actor.main import take_life
from pipelinerl_core.roles.hub.recovery import read_stored_state
from pipelinerl_core.run import compaction
from pipelinerl_core.run.commits import read_commits
from pipelinerl_core.run.context import open_run
from pipelinerl_core.run.history import check_not_fenced, counted_commit_keys, is_complete, read_epochs, take_over
from pipelinerl_core.run.locate import find_run
from pipelinerl_core.run.records import HUB_KEY, CheckpointRef, batch_key, rollout_key
from pipelinerl_core.storage.local import FileStore
from pipelinerl_core.storage.s3 import S3Store
from pipelinerl_core.tools.audit import Audit
from pipelinerl_core.tools.gc import collect
from pipelinerl_core.training.live_state import LiveState
from pipelinerl_core.weights.checkpoint import save_checkpoint
from pipelinerl_core.weights.publish import WeightPublisher
from tests.builders import hub_record, put_commit, put_epoch, put_run
from tests.fake_s3 import OUTAGES, Answer, serving
from tests.fakes import MemoryStore
from tests.models import publish, read_checkpoint
from tests.rollout_rows import build_rollout
from tests.synthetic_run import build_report, put_batch, training_row

pytestmark = pytest.mark.slow

STEPS, EPOCH, DROPPED_AT = 11, 2, 3
CONFIG = build_config({"trainer": {"steps": 20}, "schedule": {"max_lag": 30}, "weights": {"keep": 4}})
EMPTY_LISTING = Answer(
    200, b"<?xml version='1.0'?><ListBucketResult><IsTruncated>false</IsTruncated></ListBucketResult>"
)
REFUSALS = {"403": Answer(403, b"<Error><Code>AccessDenied</Code></Error>"), "501": Answer(501)}
ANSWERS = {**OUTAGES, **REFUSALS}
ERRORS = [errno.EIO, errno.ESTALE, errno.EMFILE, errno.ENOMEM, errno.EACCES]


# ---- the run -------------------------------------------------------------------------------------------------------


def group(group_id: int, attempt: int = 0) -> list[Any]:
    rng = np.random.default_rng(group_id)
    return [
        build_rollout(rng, group_id=group_id, attempt=attempt, rollout_index=index, group_size=2, num_tokens=5)
        for index in range(2)
    ]


def fate(group_id: int, name: str = "trained") -> FateRecord:
    return FateRecord(group_id=group_id, attempt=0, fate=name, num_tokens=10)


def put_step(store: ObjectStore, step: int) -> None:
    """Step n trains group n, whose rows are in segment n; step DROPPED_AT drops group 0 too."""
    groups = [step] if step else []
    fates = [fate(group_id) for group_id in groups]
    batches: Any = ()
    if step:
        batches = put_batch(
            store, step, EPOCH, [training_row(rollout, advantage=step / 7) for rollout in group(step)]
        )
    if step == DROPPED_AT:
        groups.append(0)
        fates.append(fate(0, "dropped_stale"))
    if groups:
        rows = [rollout for group_id in groups for rollout in group(group_id)]
        store.put(rollout_key("actor-0", 1, step), to_segment([encode_rollouts("run", rows)]))
    publisher = WeightPublisher(store, run_id="run", epoch=EPOCH, use_shm=False)
    manifest = publish(publisher, step, {"w": torch.full((2,), float(step))}, durable=True)
    checkpoint = CheckpointRef(step=step // 4 * 4, epoch=EPOCH)
    if step % 4 == 0:
        save_checkpoint(
            store, step, EPOCH, LiveState({"weights.w": torch.full((2,), float(step))}, {"version": step})
        )
    put_commit(
        store, step, EPOCH, fates=tuple(fates), batches=batches, next_group_id=step + 1, manifest=manifest,
        open_groups=(0,) if step < DROPPED_AT else (), checkpoint=checkpoint,
        weights_digest=manifest.files[0].digest,
    )  # fmt: skip


def whole_run() -> dict[str, bytes]:
    """Key -> bytes of a run: some commits and rollouts are compacted, and there is something for each operation."""
    store = MemoryStore()
    put_run(store, CONFIG)
    put_epoch(store, 1, "hub")
    put_epoch(store, EPOCH)
    for step in range(STEPS + 1):
        put_step(store, step)
        if step == 7:
            compaction.compact_commits(store)
    store.put(rollout_key("actor-0", 1, STEPS + 1), to_segment([encode_rollouts("run", group(STEPS + 1))]))
    store.put("batches/00000002.1/0000.arrow", b"of a fenced trainer")
    store.put(HUB_KEY, hub_record(live={"step": STEPS, "state": "done"}).model_dump_json().encode())
    return {key: store.get(key) for key in store.list("")}


# ---- operations and what must hold ---------------------------------------------------------------------------------


def take(store: ObjectStore) -> Any:
    epoch, commits = take_over(store)
    return epoch.adopted_through, commits


def is_fenced(store: ObjectStore) -> bool:
    try:
        check_not_fenced(store, put_epoch(MemoryStore(), EPOCH))
    except Fenced:
        return True
    return False


def start_hub(store: ObjectStore) -> Any:
    state = read_stored_state(store)
    assert state.commit is not None
    groups = sorted((sealed_group.summary.ref.group_id, sealed_group.seq) for sealed_group in state.sealed)
    return state.commit.step, groups, sorted(state.rows), state.retired


def resume(store: ObjectStore) -> Any:
    if find_run(store.url) is None:
        return None
    return open_run(store.url).config, is_complete(store, 20), take_life(store, "actor-0") > 0


def collect_garbage(store: ObjectStore) -> None:
    collect(store, CONFIG, with_rollouts=True, dry_run=False, now=True)


def compact(store: ObjectStore) -> None:
    compaction.compact_commits(store)
    compact_rollouts(store)


OPERATIONS: dict[str, Callable[[ObjectStore], Any]] = {
    "takeover": take,
    "fencing": is_fenced,
    "hub": start_hub,
    "compaction": compact,
    "gc": collect_garbage,
    "audit": lambda store: Audit(store, CONFIG).run().document,
    "status": run_status,
    "report": build_report,
    "resume": resume,
}


class Kept(NamedTuple):
    """What no operation may change."""

    commits: dict[int, str]
    trained: set[tuple[int, int, float]]
    untrained: set[int]
    problems: list[str]
    epochs: list[int]


def kept(store: ObjectStore) -> Kept:
    commits = read_commits(store)
    trained_rows = TrainedRows(store)
    rows = {
        (commit.step, row.rollout.group_id, row.advantage)
        for commit in commits.values()
        for batch in trained_rows.batches(commit)
        for row in decode_batch(batch)
    }
    reader = SegmentReader(store)
    untrained = {ref.group_id for name in reader.segments() for ref in reader.groups_in(rollout_key(*name))}
    for steps in list_rollouts(store):
        untrained |= set(read_rollouts(store, steps, ["group_id"])["group_id"].to_pylist())
        columns = ["step", "group_id", "advantage"]
        table = read_rollouts(store, steps, [*columns, "fate"]).filter(pc.field("fate") == "trained")
        compacted = set(zip(*(table[name].to_pylist() for name in columns), strict=True))
        assert compacted == {row for row in rows if steps.first <= row[0] <= steps.last}, steps
    newest = commits.newest(1)[0]
    assert newest.checkpoint is not None
    read_checkpoint(store, newest.checkpoint.step, newest.checkpoint.epoch)
    epochs = [record.epoch for record in read_epochs(store)]
    return Kept(counted_commit_keys(store), rows, untrained, Audit(store, CONFIG).run().problems, epochs)


def in_memory(objects: Mapping[str, bytes]) -> ObjectStore:
    store = MemoryStore()
    for key, data in objects.items():
        store.put(key, data)
    return store


def check(objects: dict[str, bytes], checked: list[dict[str, bytes]], healthy: Kept, case: str) -> None:
    """objects: what is in the store after a fault; checked: states that need no check; this one is added.

    Then the run takes more steps and is compacted: a later call must not delete what an earlier call left out.
    """
    if objects in checked:
        return
    checked.append(objects)
    store = in_memory(objects)
    left = kept(store)
    assert set(left.epochs) >= set(healthy.epochs), case
    assert left._replace(epochs=[]) == healthy._replace(epochs=[]), case
    if left.epochs == healthy.epochs:  # the trainer goes on
        for step in range(STEPS + 1, STEPS + 9):
            put_step(store, step)
        compact(store)
        assert kept(store).untrained >= healthy.untrained, case
    assert take_over(store)[0].adopted_through == max(read_commits(store)), case


def attempt(
    operation: Callable[[ObjectStore], Any], store: ObjectStore, wanted: Any, case: str, *, is_lie: bool = False
) -> None:
    """The result of a healthy store, or a refusal.

    is_lie: the answer was well-formed and wrong. Then what is kept counts, and what trainer and hub continue from.
    """
    try:
        result = operation(store)
    except PipelineRLError as error:
        raised = str(error)
    else:
        raised = ""
    if raised:
        assert store.url in raised, case
        return
    if isinstance(result, dict) and "problems" in result:  # an audit may fail, and may not pass by mistake
        is_same = result == wanted or result["problems"] != wanted["problems"] or result["damaged"]
    else:
        is_same = wanted is None or _untimed(result) == _untimed(wanted)
    if is_lie:
        is_same = _continued_from(operation, result) == _continued_from(operation, wanted)
    assert is_same, f"{case}: another result, without an error"


def _continued_from(operation: Callable[[ObjectStore], Any], result: Any) -> Any:
    if operation is start_hub:
        return result[0]
    return result if operation in (take, is_fenced) else None


def _untimed(result: Any) -> Any:
    if isinstance(result, dict):
        return {key: value for key, value in result.items() if key not in ("heartbeat_age", "eta_seconds", "at")}
    return result


@pytest.fixture(scope="module", autouse=True)
def _small_objects():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compaction, "FILE_STEPS", 4)
        patch.setattr(compaction, "MARGIN_STEPS", 2)
        yield


@pytest.fixture(scope="module")
def run():
    return whole_run()


@pytest.fixture
def objects(run, name):
    """The run, for a fenced trainer with the epoch of its successor."""
    store = MemoryStore()
    put_epoch(store, EPOCH + 1, parent=EPOCH, adopted_through=STEPS)
    successor = {key: store.get(key) for key in store.list("")}
    return {**run, **successor} if name == "fencing" else run


# ---- a directory ---------------------------------------------------------------------------------------------------


class Disk:
    """Counts calls of the operating system below a directory, and lets one of them fail."""

    def __init__(self, root: str, patch: pytest.MonkeyPatch) -> None:
        self.root, self.calls, self.fails_at, self.number = root, [], -1, 0
        for module, name in (
            (os, "scandir"), (os, "stat"), (os, "unlink"), (os, "replace"), (os, "link"), (os, "mkdir"), (io, "open"),
        ):  # fmt: skip
            patch.setattr(module, name, self._counted(name, getattr(module, name)))

    def _counted(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(path: Any, *arguments: Any, **options: Any) -> Any:
            if isinstance(path, str | os.PathLike) and os.fspath(path).startswith(self.root):
                self.calls.append(f"{name} {os.fspath(path).removeprefix(self.root)}")
                if len(self.calls) - 1 == self.fails_at:
                    raise OSError(self.number, os.strerror(self.number), os.fspath(path))
            return function(path, *arguments, **options)

        return call

    def arm(self, fails_at: int, number: int = 0) -> None:
        self.calls.clear()
        self.fails_at, self.number = fails_at, number


SHARES = [80, pytest.param(1, marks=pytest.mark.campaign)]
"""Of the calls after the tenth, which are alike, one of so many fails; 1: and each listing in every way."""


@pytest.mark.parametrize("share", SHARES)
@pytest.mark.parametrize("name", OPERATIONS)
def test_a_call_of_the_operating_system_fails(tmp_path, monkeypatch, objects, name, share):
    operation, directory = OPERATIONS[name], tmp_path / "live"
    saved = FileStore(tmp_path / "saved")
    for key, data in objects.items():
        saved.put(key, data)
    store = FileStore(directory, retry_seconds=0)

    def restore() -> None:
        shutil.rmtree(directory, ignore_errors=True)
        shutil.copytree(tmp_path / "saved", directory, copy_function=os.link)

    def stored() -> dict[str, bytes]:
        files = (path for path in directory.rglob("[!.]*") if path.is_file())
        return {path.relative_to(directory).as_posix(): path.read_bytes() for path in files}

    restore()
    healthy, checked = kept(in_memory(objects)), [objects]
    disk = Disk(str(directory), monkeypatch)
    disk.arm(-1)
    wanted = operation(store)
    calls = list(disk.calls)
    for index, call in enumerate(calls):
        # Directories of steps fail alike.
        is_listing = call.startswith("scandir") and not any(map(str.isdigit, call))
        if not is_listing and index > 10 and index % share:
            continue
        chosen = [*ERRORS] if is_listing and share == 1 else [ERRORS[index % len(ERRORS)]]
        for number in [*chosen, errno.ENOENT] if call.startswith(("scandir", "open")) else chosen:
            disk.arm(-1)
            restore()
            disk.arm(index, number)
            case = f"{name}, call {index}: {call}, {errno.errorcode[number]}"
            attempt(operation, store, wanted, case, is_lie=number == errno.ENOENT)
            disk.arm(-1)
            check(stored(), checked, healthy, case)
    assert calls


# ---- S3 ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("share", SHARES)
@pytest.mark.parametrize("name", OPERATIONS)
def test_a_wrong_answer_of_s3_changes_no_result_silently(s3_environment, objects, name, share):
    operation = OPERATIONS[name]
    with serving() as server:
        s3_environment(server.endpoint)
        store = S3Store("s3://bucket/run", retry_seconds=0.0)
        assert store.is_conditional

        def stored() -> dict[str, bytes]:
            return {path.removeprefix("/bucket/run/"): data for path, data in server.objects.items()}

        def restore() -> None:
            server.fault = lambda asked: None
            server.asked.clear()
            server.objects = {f"/bucket/run/{key}": data for key, data in objects.items()}

        healthy, checked = kept(in_memory(objects)), [objects]
        restore()
        wanted = operation(store)
        asked = list(server.asked)
        paths = [path for _, path, _ in server.requests[-len(asked) :]]
        names = [*ANSWERS]
        lies = {
            "empty listing": EMPTY_LISTING,
            "missing": Answer(404, b"<Error><Code>NoSuchKey</Code></Error>"),
            "another object": Answer(200, objects[batch_key(1, EPOCH, 0)]),
        }
        for index, request in enumerate(asked):
            is_listing = "list-type" in request
            if not is_listing and index > 10 and index % share:
                continue
            chosen = [*names] if is_listing and share == 1 else [names[index % len(names)]]
            chosen += ["empty listing"] if is_listing else []
            if request == "GET":
                chosen += ["missing"]
                # Nothing in a segment says which segment it is: an answer with another segment is not recognised.
                chosen += ["another object"] if "/rollouts/" not in paths[index] else []
            for answer in chosen:
                restore()
                fault = {**ANSWERS, **lies}[answer]
                server.fault = lambda _, at=index, fault=fault: fault if len(server.asked) == at + 1 else None
                case = f"{name}, request {index}: {request}, {answer}"
                is_unread = request == "GET" and answer.startswith("200")  # a damaged object
                attempt(operation, store, wanted, case, is_lie=answer in lies or is_unread)
                server.fault = lambda asked: None
                check(stored(), checked, healthy, case)
        assert asked
