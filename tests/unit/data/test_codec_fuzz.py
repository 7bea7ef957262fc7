"""Whatever arrives: a typed error or a valid object, never another exception."""

import contextlib
import json

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pydantic import TypeAdapter, ValidationError

from pipelinerl_core.channel.admission import parse
from pipelinerl_core.data.checks import split_groups
from pipelinerl_core.data.codec import decode_rollouts, encode_rollouts, from_segment, to_segment
from pipelinerl_core.data.partials import decode_partials, encode_partials
from pipelinerl_core.data.schema import conform
from pipelinerl_core.errors import ConfigError, SchemaMismatch, StoreError
from pipelinerl_core.messages import Register, Request
from pipelinerl_core.models.resolve import build_config, override_config
from pipelinerl_core.storage.keys import check_key
from pipelinerl_core.types import WeightManifest
from tests.builders import partial_row as row
from tests.builders import sync_message
from tests.rollout_rows import build_group

FAST = settings(deadline=None, max_examples=150, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
SEGMENT = to_segment([encode_rollouts("run", build_group(0, group_id=1, size=2))])
LOG = to_segment([encode_partials([row(), row(3, 2, index=1)])])

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=8),
    lambda values: st.lists(values, max_size=3) | st.dictionaries(st.text(max_size=8), values, max_size=3),
    max_leaves=8,
)


def damaged(data):
    """The bytes with some of them changed, and perhaps the end cut off."""
    changes = st.lists(st.tuples(st.integers(0, len(data) - 1), st.integers(0, 255)), min_size=1, max_size=6)

    def apply(picked):
        changed, cut = bytearray(data), picked[1]
        for place, value in picked[0]:
            changed[place] = value
        return bytes(changed[:cut])

    return st.tuples(changes, st.integers(1, len(data))).map(apply)


@FAST
@given(st.binary(max_size=400) | damaged(SEGMENT))
def test_segments(data):
    try:
        for batch in from_segment(data, "key"):
            rows = conform(batch)
            split_groups(rows)
            decode_rollouts(rows)
    except SchemaMismatch:
        pass


@FAST
@given(st.binary(max_size=400) | damaged(LOG))
def test_logs_of_open_groups(data):
    try:
        for batch in from_segment(data, "key"):
            decode_partials(batch)
    except SchemaMismatch:
        pass


SYNC = sync_message(
    engine_version=1, running=1, want=2, leases=("1.0.b",), num_tokens=5, running_seconds=1.0
).model_dump()
REGISTER = Register(role="actor", name="a", epoch=1).model_dump()


@FAST
@given(
    st.binary(max_size=200)
    | JSON.map(lambda value: json.dumps(value).encode())
    | st.tuples(st.sampled_from([SYNC, REGISTER]), st.sampled_from([*SYNC, *REGISTER]), JSON).map(
        lambda picked: json.dumps({**picked[0], picked[1]: picked[2]}).encode()
    )
)
def test_messages(metadata):
    try:
        request = parse(metadata)
    except SchemaMismatch:
        return
    assert TypeAdapter(Request).validate_python(request.model_dump()) == request


@FAST
@given(st.dictionaries(st.sampled_from(list(WeightManifest.__dataclass_fields__)), JSON))
def test_manifests(values):
    with contextlib.suppress(ValidationError):
        TypeAdapter(WeightManifest).validate_python(values)


CONFIG = build_config({})
KEYS = [
    f"{section}.{key}"
    for section, values in CONFIG.model_dump().items()
    if isinstance(values, dict)
    for key in values
]
PARTS = st.lists(st.sampled_from(["..", ".", "", "a", "/", "\\", "\x00"]), max_size=5)


@FAST
@given(st.dictionaries(st.sampled_from([*CONFIG.model_dump(), "nothing"]), JSON, max_size=3))
def test_configurations(values):
    said = ""
    try:
        build_config(values)
    except ConfigError as error:
        said = str(error)
    assert "\n" not in said.strip()


@FAST
@given(st.sampled_from(KEYS), st.text(max_size=20) | JSON.map(json.dumps))
def test_overrides(key, value):
    with contextlib.suppress(ConfigError):
        override_config(CONFIG, [f"{key}={value}"])


@FAST
@given(
    st.text(max_size=30)
    | st.lists(st.sampled_from(["..", ".", "", "a", "/", "\\", "\x00"]), max_size=5).map("/".join)
)
def test_keys_never_leave_their_root(key):
    try:
        parts = check_key(key).split("/")
    except StoreError:
        return
    assert not {"", ".", ".."} & set(parts)


@pytest.mark.parametrize("size", [8 * 2**20 + 1, 2**26])
def test_a_giant_message_is_refused_before_parsing(size):
    with pytest.raises(SchemaMismatch, match="the limit is"):
        parse(b"{" + b" " * size)
