"""How a role finds its hub and how long it looks for one."""

import socket
import threading
import time
from types import SimpleNamespace

import pytest

from pipelinerl_core.channel.server import HubServer
from pipelinerl_core.errors import ConfigError, HubUnavailable, RunOver
from pipelinerl_core.messages import Bye, Register
from pipelinerl_core.roles.runtime.hub_link import HubLink
from pipelinerl_core.run.records import HUB_KEY, HubRecord
from pipelinerl_core.storage.object_store import open_store
from tests.builders import hub_record
from tests.stream_hub import QueueHub
from tests.synthetic_run import put_record

TOKEN = "a-test-token"


def record(**fields) -> HubRecord:
    values = {"url": "grpc://127.0.0.1:1", "host": socket.gethostname(), "beat": time.time(), **fields}
    return hub_record(**values)


def test_hub_json_of_an_earlier_version_is_read():
    """The hubs of some versions had a second address, for roles of their host."""
    said = {**record().model_dump(), "local_url": "unix-abstract:pipelinerl-nobody"}
    assert HubRecord.model_validate(said) == record(beat=said["beat"])


@pytest.fixture
def server():
    made = HubServer(QueueHub(), host="127.0.0.1", port=0, token=TOKEN)
    made.start()
    yield made
    assert made.shutdown(60.0)


@pytest.fixture
def link_to(tmp_path):
    """A link to the hub that hub.json says is there."""
    links = []

    def make(hub: HubRecord, *, token: str = TOKEN, deadline_seconds: float = 0.0) -> HubLink:
        store = open_store(str(tmp_path))
        put_record(store, HUB_KEY, hub)
        link = HubLink(
            store, token=token, role="actor", name="actor-0", deadline_seconds=deadline_seconds,
            registration=lambda: Register(role="actor", name="actor-0", epoch=1),
        )  # fmt: skip
        links.append(link)
        return link

    yield make
    for link in links:
        link.close(bye=False)


def test_a_link_goes_where_hub_json_says(server, link_to):
    link = link_to(record(url=server.url))
    assert link.connect().boot_id == "boot"
    assert link._client.url == server.url


def test_a_wrong_token_is_said_at_once(server, link_to):
    link = link_to(record(url=server.url), token="another", deadline_seconds=3600.0)
    with pytest.raises(ConfigError, match="refuses the token"):
        link.connect()


@pytest.mark.parametrize("url", ["grpc://127.0.0.1:1", "grpc+tls://localhost:1", "grpc://[::1]:1"])
def test_a_live_hub_on_the_loopback_of_another_host_is_a_wrong_configuration(link_to, url):
    hub = record(url=url, host="node-7")
    link = link_to(hub)
    with pytest.raises(HubUnavailable, match=r"of host node-7 does not live"):
        link.connect()
    put_record(link._store, HUB_KEY, hub.model_copy(update={"beat": hub.beat + 1}))
    with pytest.raises(ConfigError, match=r"of host node-7, which other hosts cannot reach\. Set placement"):
        link.connect()


def test_a_run_that_is_resumed_on_another_host_waits_for_its_hub_there(server, link_to):
    earlier = record(host="node-7")
    link = link_to(earlier, deadline_seconds=60.0)
    threading.Timer(0.3, lambda: put_record(link._store, HUB_KEY, record(url=server.url))).start()
    assert link.connect().boot_id == "boot"
    ended = earlier.model_copy(update={"beat": earlier.beat + 1, "live": {"state": "stopped"}})
    with pytest.raises(HubUnavailable, match="does not live"):
        link_to(ended).connect()


def test_a_hub_that_is_not_there_is_named_by_its_url(link_to):
    link = link_to(record(url="grpc://127.0.0.1:1"))
    with pytest.raises(HubUnavailable, match=r"no hub at grpc://127\.0\.0\.1:1"):
        link.connect()


def test_a_hub_that_has_left_after_the_last_step_is_not_waited_for(link_to):
    link = link_to(record(live={"state": "done"}), deadline_seconds=60.0)
    link._is_over = lambda: True
    with pytest.raises(RunOver, match="the run is over"):
        link.connect()
    with pytest.raises(HubUnavailable):  # it was of another time: there is something to do
        link_to(record(url="grpc://127.0.0.1:1", live={"state": "done"})).connect()
    with pytest.raises(HubUnavailable):  # of a run that goes on later
        link_to(record(url="grpc://127.0.0.1:1", live={"state": "stopped"})).connect()


def test_a_request_to_a_hub_that_has_ended_its_run_raises_run_over(server, link_to):
    hub = record(url=server.url)
    link = link_to(hub, deadline_seconds=60.0)
    link.connect()
    server.shutdown(60.0)
    link_to(hub.model_copy(update={"live": {"state": "done"}}))  # the last word of the hub
    with pytest.raises(RunOver):
        link.request(Bye())


def test_a_cancelled_link_does_not_wait_for_a_hub(link_to):
    link = link_to(record(url="grpc://127.0.0.1:1"), deadline_seconds=3600.0)
    link.is_cancelled = lambda: True
    with pytest.raises(HubUnavailable, match="no hub at"):
        link.connect()


def test_a_request_may_have_a_deadline_of_its_own(link_to):
    """Whether it had found the hub before or not."""
    link = link_to(record(url="grpc://127.0.0.1:1"), deadline_seconds=3600.0)
    lost = SimpleNamespace(
        request=lambda *_, timeout: (_ for _ in ()).throw(HubUnavailable("lost")), close=lambda bye: None
    )
    for client in (None, lost):
        link._client = client
        with pytest.raises(HubUnavailable, match="no hub for 0 s"):
            link.request(Bye(), seconds=0.0)
    link._client = None


def test_a_link_that_was_closed_meanwhile_opens_nothing(server, link_to):
    link = link_to(record(url=server.url))
    link.close()
    with pytest.raises(HubUnavailable, match="closed"):
        link.connect()
