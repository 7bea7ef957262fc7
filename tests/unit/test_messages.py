"""What a message may say: numbers that fit, names that are plain, nothing that JSON cannot carry back."""

import json

import pytest
from pydantic import ValidationError

from pipelinerl_core.channel.admission import parse
from pipelinerl_core.errors import SchemaMismatch
from pipelinerl_core.messages import Group, Introduction, LeaseRef, Register, Sealed, Sync
from pipelinerl_core.types import GroupRef

REF = GroupRef(group_id=1, attempt=0, actor="actor-0", actor_epoch=1, num_rollouts=2, num_tokens=10)
SYNC = Sync(
    boot_id="b", engine_version=1, running=1, waiting=0, concurrency=8, want=2, leases=("1.0.b",), num_tokens=5,
    running_seconds=1.0, counters={"cpu_seconds": 1.0},
)  # fmt: skip
REGISTER = Register(role="actor", name="a", epoch=1, leases=(LeaseRef(group_id=1, attempt=0, lease_id="1.0.b"),))
GROUP = Group(lease_id="1.0.b", ref=REF)
SWAP = {
    "actor": "a", "actor_epoch": 5, "version": 1, "at": 0.0, "pause_seconds": 0.0, "num_bytes": 1, "num_running": 1,
    "num_tokens": 1,
}  # fmt: skip
SEALED = Sealed(actor="actor-0", epoch=1, seq=0, groups=((1, 0),))


@pytest.mark.parametrize("message", [SYNC, REGISTER, GROUP, SEALED], ids=lambda message: message.kind)
def test_a_message_is_parsed_to_itself(message):
    assert parse(message.model_dump_json().encode()) == message


@pytest.mark.parametrize(
    ("message", "place", "value"),
    [
        (SYNC, ("running_seconds",), float("nan")),
        (SYNC, ("counters", "cpu_seconds"), float("inf")),
        (SYNC, ("counters", "reward_errors"), -1),
        (SYNC, ("swaps",), [{"actor": "a", "actor_epoch": 5, "version": 1, "at": 0.0, "pause_seconds": 0.0}]),
        (SYNC, ("swaps",), [{**SWAP, "pause_seconds": float("nan")}]),
        (SYNC, ("num_tokens",), -1),
        (SYNC, ("num_tokens",), 1 << 63),
        (SYNC, ("leases",), ["1.0.b\nINFO root: all is well"]),
        (SYNC, ("leases",), ["x" * 201]),
        (REGISTER, ("epoch",), 10**30),
        (REGISTER, ("name",), "a/b"),
        (REGISTER, ("name",), ".."),
        (REGISTER, ("name",), "a\u202eb"),
        (REGISTER, ("leases", 0, "attempt"), -1),
        (REGISTER, ("leases", 0, "group_id"), -1),
        (GROUP, ("ref", "attempt"), -1),
        (GROUP, ("ref", "num_tokens"), 1 << 63),
        (GROUP, ("seq",), -1),
        (SEALED, ("actor",), ""),
        (SEALED, ("actor",), "x\ny"),
        (SEALED, ("groups",), [[-1, 0]]),
    ],
)
def test_a_value_out_of_its_bounds_is_refused_by_its_place(message, place, value):
    fields = json.loads(message.model_dump_json())
    inner = fields
    for key in place[:-1]:
        inner = inner[key]
    inner[place[-1]] = value
    with pytest.raises(SchemaMismatch) as caught:
        parse(json.dumps(fields).encode())
    assert str(caught.value).startswith(f"not a valid request: {message.kind}.{place[0]}")
    assert len(str(caught.value)) < 400


def test_a_name_may_have_spaces_and_letters_of_any_language():
    assert str(Introduction(role="actor", name="węzeł 7")) == "actor/węzeł 7"
    with pytest.raises(ValidationError):
        Introduction(role="hub", name="x")
