"""A hub with a low limit of descriptors, and more connections than the limit, from a client without the token."""

import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from pipelinerl_core.channel.client import HubClient
from pipelinerl_core.errors import HubUnavailable
from pipelinerl_core.messages import Register, Registered, SyncReply
from pipelinerl_core.models.resolve import build_config
from pipelinerl_core.run.records import HubRecord
from pipelinerl_core.storage.object_store import open_store
from tests.builders import put_run, sync_message
from tests.waiting import wait_for

TOKEN = "a-token-for-tests"
ROOT = Path(__file__).parents[2]
LIMIT = 256
BARE = 400
SECONDS = 60.0
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="threads have descriptors of their own on Linux only")


class FewDescriptors:
    """A hub process, and what is to be seen of it from outside."""

    def __init__(self, run: Path) -> None:
        put_run(open_store(str(run)), build_config({"placement": {"metrics_host": ""}}))
        self.run = run
        module = "pipelinerl_core.roles.hub.main"
        hub = [sys.executable, "-m", module, "--run", str(run), "--parent-pid", str(os.getpid())]
        with (run / "hub.log").open("w") as log:
            self.process = subprocess.Popen(
                ["sh", "-c", f'ulimit -n {LIMIT}; exec "$@"', "sh", *hub],
                env={**os.environ, "PIPELINERL_TOKEN": TOKEN}, stderr=log, cwd=ROOT,
            )  # fmt: skip

    def told(self) -> HubRecord:
        """hub.json as it is."""
        return HubRecord.model_validate_json((self.run / "hub.json").read_bytes())

    def num_descriptors(self) -> int:
        return len(os.listdir(f"/proc/{self.process.pid}/fd"))

    def wait_for(self, condition: Callable[[], bool], description: str) -> None:
        wait_for(condition, f"{description}, {self.run / 'hub.log'}", SECONDS, process=self.process)

    def wait_for_beats(self, count: int) -> None:
        """hub.json is written so many times from now on."""
        beats = {self.told().beat}
        self.wait_for(lambda: len(beats | {self.told().beat}) > count or beats.add(self.told().beat), "a beat")


@pytest.fixture
def hub(tmp_path) -> Iterator[FewDescriptors]:
    made = FewDescriptors(tmp_path)
    try:
        made.wait_for((tmp_path / "hub.json").exists, "hub.json")
        yield made
    finally:
        made.process.kill()
        made.process.wait(timeout=SECONDS)


def come(url: str, name: str) -> tuple[HubClient, Registered]:
    client = HubClient(url, token=TOKEN, role="actor", name=name)
    answer = client.request(Register(role="actor", name=name, epoch=1))
    assert isinstance(answer, Registered)
    return client, answer


def test_bare_connections_stop_neither_the_heartbeat_nor_present_clients_and_new_clients_are_served_afterwards(hub):
    url = hub.told().url
    client, registered = come(url, "early")
    sync = sync_message(boot_id=registered.boot_id, want=1)
    host, port = url.partition("://")[2].split(":")
    bare = [socket.create_connection((host, int(port)), timeout=SECONDS) for _ in range(BARE)]
    hub.wait_for(lambda: hub.num_descriptors() >= LIMIT, f"{LIMIT} open descriptors")
    hub.wait_for_beats(3)
    assert hub.num_descriptors() >= LIMIT
    assert isinstance(client.request(sync), SyncReply)
    for connection in bare:
        connection.close()
    deadline = time.monotonic() + SECONDS
    while True:
        try:
            late, _ = come(url, "late")
            break
        except HubUnavailable:
            assert time.monotonic() < deadline
            time.sleep(0.2)
    for connected in (client, late):
        connected.close()
