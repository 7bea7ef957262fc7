"""Two hosts: namespaces of their own for network, host name, processes and shared memory, and S3 between them.

Prefect, S3, hub and trainer are on the first host, the actors on the second, which is lost and comes back.
"""

import json
import os
import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from pipelinerl_core.storage.object_store import open_store
from tests.integration.pipeline import ROOT, assert_closes, committed_steps
from tests.integration.prefect_server import PREFECT, await_
from tests.processes import install_debian
from tests.s3_server import ACCESS_KEY, BUCKET, SECRET_KEY, find_rclone

pytestmark = [
    pytest.mark.slow, pytest.mark.campaign, pytest.mark.timeout(1200),
    pytest.mark.skipif(os.geteuid() != 0, reason="namespaces need root"),
]  # fmt: skip

ADDRESSES = {"first": "10.83.0.1", "second": "10.83.0.2"}
OVERRIDES = (
    "placement.kind=work_pools", "placement.actors=2", f"placement.hub_host={ADDRESSES['first']}",
    "placement.hub_tls=true", "tracking.mlflow_uri=none", "weights.transport=object_store",
    "weights.durable_every=4", "model.dtype=bfloat16", "learner.lr=1e-5",  # few weights change in a step
    "trainer.steps=100000", "eval.num_prompts=0", "trainer.groups_per_step=8", "engine.concurrency=32",
)  # fmt: skip


class Host:
    """A host without processes; `end` kills all of them."""

    def __init__(self, name: str, namespace: str, home: Path) -> None:
        """namespace: of the network."""
        home.mkdir(exist_ok=True)
        self.home = home
        kinds = ["--mount", "--uts", "--pid", "--fork", "--mount-proc", "--kill-child"]
        script = f"hostname {name}; mount -t tmpfs tmpfs /dev/shm; exec sleep infinity"
        outer = subprocess.Popen(["ip", "netns", "exec", namespace, "unshare", *kinds, "sh", "-c", script])
        self._started = [outer]
        children = psutil.Process(outer.pid).children
        self._init = str(await_(lambda: [child for child in children() if child.name() == "sleep"], name, 20)[0].pid)

    def spawn(self, *command: str) -> "subprocess.Popen[bytes]":
        """Start a command on this host."""
        environment = {
            **os.environ, "TMPDIR": str(self.home), "PREFECT_HOME": str(self.home / "prefect"),
            "PYTHONPATH": str(ROOT),
            "PREFECT_API_URL": f"http://{ADDRESSES['first']}:4200/api", "PREFECT_SERVER_EPHEMERAL_ENABLED": "false",
            "PREFECT_SERVER_ANALYTICS_ENABLED": "false", "PIPELINERL_ROOT": f"s3://{BUCKET}/runs",
            "AWS_ENDPOINT_URL_S3": f"http://{ADDRESSES['first']}:9000", "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_ACCESS_KEY_ID": ACCESS_KEY, "AWS_SECRET_ACCESS_KEY": SECRET_KEY,
        }  # fmt: skip
        enter = ["nsenter", "--target", self._init, "--mount", "--uts", "--net", "--pid"]
        with (self.home / "log").open("ab") as log:
            self._started.append(
                subprocess.Popen([*enter, *command], env=environment, cwd=ROOT, stdout=log, stderr=log)
            )
        return self._started[-1]

    def run(self, *command: str) -> None:
        """Run a command to its end; fails unless it ends with code 0."""
        assert self.spawn(*command).wait(timeout=200) == 0, self.home / "log"

    def end(self) -> None:
        """Kill all processes, as the loss of a host does."""
        psutil.Process(int(self._init)).kill()
        for process in self._started:
            process.wait(timeout=60)


@pytest.fixture
def network() -> Iterator[dict[str, str]]:
    """Name of a host -> its network namespace; the two are connected with each other alone."""
    if not Path("/usr/sbin/ip").exists():
        install_debian("iproute2")
    tag = uuid.uuid4().hex[:6]
    names = {host: f"prl{tag}{host}" for host in ADDRESSES}
    ends = {host: f"v{tag}{host[0]}" for host in ADDRESSES}
    for name in names.values():
        subprocess.run(["ip", "netns", "add", name], check=True)
    try:
        veth = ["type", "veth", "peer", "name", ends["second"], "netns", names["second"]]
        subprocess.run(["ip", "link", "add", ends["first"], "netns", names["first"], *veth], check=True)
        for host, name in names.items():
            address = ["addr", "add", f"{ADDRESSES[host]}/24", "dev", ends[host]]
            for command in (address, ["link", "set", ends[host], "up"], ["link", "set", "lo", "up"]):
                subprocess.run(["ip", "-n", name, *command], check=True)
        yield names
    finally:
        for name in names.values():
            subprocess.run(["ip", "netns", "del", name], check=True)


def test_a_run_over_two_hosts_loses_nothing_when_the_host_of_the_actors_is_lost(network, tmp_path, prepared_model):
    objects = tmp_path / "s3"
    (objects / BUCKET).mkdir(parents=True)
    hosts = {name: Host(name, network[name], tmp_path / name) for name in ADDRESSES}
    first, cli = hosts["first"], [sys.executable, "-m", "pipelinerl.flows.cli"]
    try:
        s3 = [
            "--addr",
            f"{ADDRESSES['first']}:9000",
            "--config",
            "/dev/null",
            "--auth-key",
            f"{ACCESS_KEY},{SECRET_KEY}",
        ]
        first.spawn(find_rclone(), "serve", "s3", str(objects), *s3)
        first.spawn(PREFECT, "server", "start", "--host", ADDRESSES["first"], "--port", "4200")
        health = ["curl", "-sf", "-o", "/dev/null", f"http://{ADDRESSES['first']}:4200/api/health"]
        await_(lambda: first.spawn(*health).wait(timeout=30) == 0, "the Prefect server", 120)
        first.run(*cli, "deploy")
        for pool in ("control", "trainers"):
            first.spawn(PREFECT, "worker", "start", "--pool", pool)
        hosts["second"].spawn(PREFECT, "worker", "start", "--pool", "actors")
        first.run(PREFECT, "deployment", "run", "train/quickstart", "-p", f"overrides={json.dumps(OVERRIDES)}")
        url = str(await_(lambda: list((objects / BUCKET / "runs").glob("quickstart-*")), "the run", 200)[0])
        await_(lambda: committed_steps(url) >= 3, "three steps", 300)
        hosts["second"].end()
        lost_at = committed_steps(url)
        hosts["second"] = Host("second", network["second"], tmp_path / "second")
        hosts["second"].spawn(PREFECT, "worker", "start", "--pool", "actors")
        await_(lambda: committed_steps(url) >= lost_at + 8, "steps with the actors of the new host", 400)
        first.run(*cli, "drain", Path(url).name)
        await_(lambda: (Path(url) / "report.json").exists(), "the report of the drained run", 200)
    finally:
        for host in hosts.values():
            host.end()
    assert_closes(url)
    assert list(Path(url).glob("weights/*/delta-*.arrow"))
    logs = [key for key in open_store(url).list("logs") if key.startswith("logs/actor-")]
    assert logs
    assert all(key.endswith("@second.json") for key in logs), logs
