"""Roots with many runs, which retention tests read and remove."""

import functools
import json
import socket
import time

import psutil
from typer.testing import CliRunner

from pipelinerl.flows import cli
from pipelinerl_core.errors import ConfigError
from pipelinerl_core.interfaces import ObjectStore
from pipelinerl_core.models.resolve import build_config
from pipelinerl_core.run.hub_status import process_mark
from pipelinerl_core.run.records import HUB_KEY, RUN_KEY, batch_key
from tests.builders import hub_record, put_run
from tests.unit.tools.run_case import STEPS, stored_run

DAY = 86400.0
GARBAGE = {
    batch_key(2, 1, rank=0): b"of a fenced trainer",
    "checkpoints/00000003.1/state-00001.safetensors": b"x" * 9,
}


@functools.cache
def _template() -> dict[str, bytes]:
    """Key -> bytes of a run of three steps, with garbage."""
    store = stored_run()
    return {**{key: store.get(key) for key in store.list("")}, **GARBAGE}


def write_old_run(
    root: ObjectStore, name: str, *, days: float = 1.0, owner: str = "alice@a", tags: tuple[str, ...] = (),
    state: str = "finished",
) -> dict[str, bytes]:  # fmt: skip
    """Write a run whose newest commit is `days` old; its objects. state: finished, stopped, running or unreadable."""
    store, then = root.child(name), time.time() - days * DAY
    objects = dict(_template())
    for key in objects:
        if key.startswith("commits/"):
            objects[key] = json.dumps({**json.loads(objects[key]), "committed_at": then}).encode()
    if state == "running":
        process = psutil.Process()
        record = hub_record(
            host=socket.gethostname(),
            pid=process.pid,
            process_started_at=process.create_time(),
            process=process_mark(process.pid),
        )
        objects[HUB_KEY] = record.model_dump_json().encode()
    for key, data in objects.items():
        store.put(key, data)
    steps = STEPS if state == "finished" else STEPS + 5
    config = build_config(
        {
            "trainer": {"steps": steps}, "schedule": {"max_lag": 1}, "engine": {"concurrency": 8},
            "tracking": {"tags": list(tags)},
        }
    )  # fmt: skip
    put_run(store, config, run_id=name, created_at=then - 1.0, owner=owner)
    if state == "unreadable":
        store.put(RUN_KEY, b"{")
    return {key: store.get(key) for key in store.list("")}


def contents(root: ObjectStore, name: str) -> dict[str, bytes]:
    """Key -> bytes of a run."""
    store = root.child(name)
    return {key: store.get(key) for key in store.list("")}


def do(*arguments, code=0):
    """The JSON document of a command."""
    ended = CliRunner().invoke(cli.app, [*map(str, arguments), "--json"])
    assert ended.exit_code == code, (ended.exception, ended.output)
    return json.loads(ended.stdout)


def refused(*arguments):
    """The error of a command that is refused with exit code 2."""
    ended = CliRunner().invoke(cli.app, [*map(str, arguments)])
    assert isinstance(ended.exception, ConfigError), ended.output
    return str(ended.exception)


def nothing(*_):
    """No progress is shown."""
