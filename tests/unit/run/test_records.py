"""Every JSON record of a run is refused in one line when it is of another format, broken, or out of a range."""

import json

import pytest

from pipelinerl_core.errors import BrokenRecord
from pipelinerl_core.report.scrape_targets import live_roles
from pipelinerl_core.roles.trainer.rendezvous import newest_rendezvous
from pipelinerl_core.run.context import open_run, resume_overrides
from pipelinerl_core.run.drain import wants_drain
from pipelinerl_core.run.follow import RunFollower
from pipelinerl_core.run.history import read_commit, read_epochs
from pipelinerl_core.run.hub_status import read_hub, refuse_second_hub
from pipelinerl_core.run.reading import read_record
from pipelinerl_core.run.records import (
    CONTROL_KEY,
    GARBAGE_KEY,
    HUB_KEY,
    MANIFEST_FILE,
    RESUME_KEY,
    RUN_KEY,
    STARTS_KEY,
    CheckpointManifest,
    ControlRecord,
    EvalRecord,
    GarbageRecord,
    LogRecord,
    Record,
    RendezvousRecord,
    ResumeRecord,
    RoleRecord,
    StartsRecord,
    checkpoint_prefix,
    commit_key,
    epoch_key,
    eval_key,
    log_key,
    rendezvous_key,
    role_key,
)
from pipelinerl_core.run.start_count import count_start
from pipelinerl_core.storage.object_store import open_store
from pipelinerl_core.weights.checkpoint import load_checkpoint
from tests.builders import epoch_record, hub_record, run_record
from tests.synthetic_run import make_commit, put_record

HUB = hub_record(beat=1.0)
ROLE = RoleRecord(run_id="r", role="actor", name="a", host="h", pid=1, url="http://h:1", started_at=1.0, beat=1.0)
EPOCH = epoch_record(1, "hub")
EVALUATION = EvalRecord(version=0, num_prompts=1, accuracy=0.5, mean_tokens=1.0, errors=0, seconds=1.0)
MEETING = RendezvousRecord(epoch=1, where="tcp:h:1", size=2, per_node=1, device="cpu", seconds=1.0)
MANIFEST_KEY = f"{checkpoint_prefix(1, 1)}/manifest.json"

# Key -> a record that is right, one of its numbers, and what reads the record.
RECORDS = {
    log_key("trainer", "h"): (
        LogRecord(
            name="trainer",
            host="h",
            at=1.0,
            num_lines=1,
            num_warnings=0,
            num_errors=0,
            last_problem="",
            last_lines=("a line",),
        ),
        "at",
        lambda store: read_record(store, log_key("trainer", "h"), LogRecord),
    ),
    RUN_KEY: (
        run_record(),
        "created_at",
        lambda store: open_run(store.url),
    ),
    HUB_KEY: (HUB, "pid", read_hub),
    epoch_key(1): (EPOCH, "adopted_through", read_epochs),
    commit_key(1, 1): (make_commit(1), "low_water", lambda store: read_commit(store, commit_key(1, 1))),
    MANIFEST_KEY: (
        CheckpointManifest(step=1, epoch=1, files=(), values={}),
        "step",
        lambda store: load_checkpoint(store, 1, 1),
    ),
    eval_key(0): (EVALUATION, "accuracy", lambda store: RunFollower(store).refresh()),
    rendezvous_key(1): (MEETING, "size", newest_rendezvous),
    RESUME_KEY: (ResumeRecord(overrides=(), at=1.0), "at", resume_overrides),
    STARTS_KEY: (
        StartsRecord(flow_run_id="f", run_count=1, step=-1),
        "step",
        lambda s: count_start(s.url, "f", 1, 1),
    ),
    GARBAGE_KEY: (
        GarbageRecord(at=1.0, keys=()),
        "at",
        lambda store: read_record(store, GARBAGE_KEY, GarbageRecord),
    ),
    CONTROL_KEY: (
        ControlRecord(desired="run", at=1.0),
        "at",
        lambda store: read_record(store, CONTROL_KEY, ControlRecord),
    ),
    role_key("actor", "a"): (ROLE, "beat", lambda store: read_record(store, role_key("actor", "a"), RoleRecord)),
}


def damaged(record: Record, damage: str, number: str) -> bytes:
    values = record.model_dump(mode="json")
    if damage == "another format":
        return json.dumps({"format_version": 1, "all": "else"}).encode()
    if damage == "no JSON":
        return json.dumps(values).encode()[:-1]
    return json.dumps({**values, number: {"a/1": -2} if isinstance(values[number], dict) else -1e300}).encode()


@pytest.fixture
def store(tmp_path):
    return open_store(str(tmp_path))


@pytest.mark.parametrize("key", RECORDS)
@pytest.mark.parametrize(
    ("damage", "says"),
    [
        ("another format", "has format_version 1; this version of pipelinerl reads 4"),
        ("no JSON", "is not a valid {model}: not JSON, EOF while parsing"),
        ("out of range", "is not a valid {model}: {number}"),
    ],
)
def test_a_record_that_cannot_be_read_is_one_line_that_names_its_key(store, key, damage, says):
    record, number, read = RECORDS[key]
    store.put(key, damaged(record, damage, number))
    with pytest.raises(BrokenRecord) as caught:
        read(store)
    assert str(caught.value).startswith(
        f"{store.url}/{key} {says.format(model=type(record).__name__, number=number)}"
    )
    assert "\n" not in str(caught.value)


def test_every_kind_of_record_with_a_key_of_its_own_is_here():
    parts = {"SwapRecord", "ActorSample", "CheckpointRef", "RescoredActor"}  # of a commit
    assert {type(record) for record, _, _ in RECORDS.values()} == {
        kind for kind in Record.__subclasses__() if kind.__name__ not in parts
    }


@pytest.mark.parametrize("data", [b"", b"\xff", b"[]", b"null", b'{"format_version": "one"}'])
def test_bytes_that_are_no_record_at_all_are_one_line(store, data):
    store.put(HUB_KEY, data)
    for read in (read_hub, refuse_second_hub):
        with pytest.raises(BrokenRecord, match=r"hub\.json (is not a valid HubRecord: |has format_version 'one'; )"):
            read(store)


def test_a_drain_request_and_a_role_that_cannot_be_read_are_named_in_the_log_and_ignored(store, caplog):
    for key in (CONTROL_KEY, role_key("actor", "a")):
        put_record(store, key, RECORDS[key][0].model_copy(update={"format_version": 1}))
    assert not wants_drain(store)
    assert live_roles(store) == []
    assert "control.json has format_version 1" in caplog.text
    assert "roles/actor-a.json has format_version 1" in caplog.text


def test_a_changed_bit_in_the_values_of_a_checkpoint_is_noticed(store):
    key = f"{checkpoint_prefix(3, 1)}/{MANIFEST_FILE}"
    values = {"version": 3, "rng": [1, 2], "lr": 1e-5, "none": None}
    put_record(store, key, CheckpointManifest(step=3, epoch=1, files=(), values=values).digested())
    assert load_checkpoint(store, 3, 1)[1] == values
    whole = store.get(key)
    for old, new in ((b'"version"', b'"verrion"'), (b"[1,2]", b"[1,3]"), (b"00001", b"00003"), (b"null", b"0   ")):
        assert old in whole
        store.put(key, whole.replace(old, new))
        with pytest.raises(BrokenRecord, match="differ from values_digest"):
            load_checkpoint(store, 3, 1)
