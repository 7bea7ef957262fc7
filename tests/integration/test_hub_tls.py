"""The channel over TLS: groups, a wrong certificate, a hub that comes back with another one."""

import contextlib
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from pipelinerl_core.channel.client import HubClient
from pipelinerl_core.channel.server import HubServer
from pipelinerl_core.channel.tls import make_credentials
from pipelinerl_core.data.codec import decode_rollouts, encode_rollouts
from pipelinerl_core.errors import ConfigError, HubUnavailable
from pipelinerl_core.messages import Group, Register, Reserve, Rows, Sync, SyncReply
from pipelinerl_core.roles.runtime.hub_link import HubLink
from pipelinerl_core.run.records import HubRecord
from pipelinerl_core.storage.object_store import open_store
from tests.builders import sync_message
from tests.integration.pipeline import TOKEN, make_run, role
from tests.rollout_rows import build_group, group_ref
from tests.stream_hub import QueueHub
from tests.waiting import wait_for

CREDENTIALS = make_credentials()


@pytest.fixture
def server():
    made = HubServer(QueueHub(), host="127.0.0.1", port=0, token=TOKEN, credentials=CREDENTIALS)
    made.start()
    yield made
    assert made.shutdown(30.0)


@contextlib.contextmanager
def client(server, certificate=CREDENTIALS.certificate, role="actor", token=TOKEN):
    made = HubClient(server.url, token=token, role=role, name=f"{role}-0", certificate=certificate)
    try:
        yield made
    finally:
        made.close()


def test_groups_go_through(server):
    assert server.url.startswith("grpc+tls://127.0.0.1:")
    rollouts = build_group(0, group_id=3, num_tokens=5000)
    with client(server) as actor, client(server, role="trainer") as trainer:
        actor.request(Group(lease_id="x", ref=group_ref(rollouts)), encode_rollouts("run", rollouts))
        assert trainer.request(Reserve(step=1, epoch=1)).is_ready
        ((_, rows),) = trainer.request_rows(Rows(step=1, groups=((3, 0),)))
    for received, sent in zip(decode_rollouts(rows), rollouts, strict=True):
        assert received.completion_token_ids.tolist() == sent.completion_token_ids.tolist()


def test_the_token_is_asked_for_as_ever(server):
    with pytest.raises(ConfigError, match="refuses the token"), client(server, token="wrong"):
        pass


@pytest.mark.parametrize("other", ["another hub's", "none"])
def test_another_certificate_is_refused_in_one_line(server, other):
    certificate = make_credentials().certificate if other == "another hub's" else ""
    with pytest.raises(HubUnavailable) as caught, client(server, certificate):
        pass
    said = str(caught.value)
    assert said.startswith(f"no hub at {server.url}: its certificate is not the certificate in hub.json")
    assert "\n" not in said


def test_a_client_without_tls_is_refused(server):
    plain = f"grpc://127.0.0.1:{urlsplit(server.url).port}"
    with pytest.raises(HubUnavailable, match="no hub at grpc://"):
        HubClient(plain, token=TOKEN, role="actor", name="x")


@pytest.mark.parametrize("is_tls", [True, False])
def test_a_hub_for_other_hosts_warns_without_tls_and_with_tls_writes_its_key_nowhere(tmp_path, is_tls):
    url, log = f"file://{tmp_path}/run", tmp_path / "hub.log"
    make_run(url, f"placement.hub_tls={is_tls}", "placement.hub_host=0.0.0.0")
    with role("hub", url, log):
        record = record_of(tmp_path)
    written = b"".join(path.read_bytes() for path in tmp_path.rglob("*") if path.is_file())
    assert record.url.partition("://")[0] == ("grpc+tls" if is_tls else "grpc")
    assert record.certificate.startswith("-----BEGIN CERTIFICATE-----" if is_tls else "")
    assert b"PRIVATE KEY" not in written
    warnings = [line for line in log.read_text().splitlines() if "WARNING" in line and "was suspended" not in line]
    assert [line.rpartition("; ")[2] for line in warnings] == ([] if is_tls else ["set placement.hub_tls=true"])


def record_of(tmp_path: Path, boot: str = "") -> HubRecord:
    """hub.json of the hub after `boot`."""
    path = tmp_path / "run" / "hub.json"

    def newer_record() -> HubRecord | None:
        record = HubRecord.model_validate_json(path.read_text()) if path.exists() else None
        return record if record is not None and record.boot_id != boot else None

    wait_for(lambda: newer_record() is not None, "hub.json")
    record = newer_record()
    assert record is not None
    return record


def test_an_actor_goes_on_when_the_hub_comes_back_at_the_same_address_with_another_certificate(tmp_path):
    url, log = f"file://{tmp_path}/run", tmp_path / "hub.log"
    make_run(url, "placement.hub_tls=true")
    link = HubLink(
        open_store(url), token=TOKEN, role="actor", name="actor-0",
        registration=lambda: Register(role="actor", name="actor-0", epoch=1), retry_seconds=0.3,
    )  # fmt: skip
    with role("hub", url, log):
        first = record_of(tmp_path)
        link.connect()
        assert isinstance(link.request(sync(link.boot_id)), SyncReply)
    make_run(url, "placement.hub_tls=true", f"placement.hub_port={urlsplit(first.url).port}")
    with role("hub", url, log):
        answer = link.request(sync(first.boot_id))
        assert answer.kind == "refused"  # by the new hub, which it has registered with
        second = record_of(tmp_path, boot=first.boot_id)
        assert (second.url, second.boot_id) == (first.url, link.boot_id)
        assert second.certificate != first.certificate
        assert isinstance(link.request(sync(link.boot_id)), SyncReply)
        link.close()


def sync(boot_id: str) -> Sync:
    return sync_message(boot_id=boot_id)
