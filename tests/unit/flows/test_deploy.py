"""What `pipelinerl deploy` reads: prefect.yaml and the base job templates."""

import importlib
import json
import re
import shutil
from pathlib import Path

import pytest
from prefect.settings import PREFECT_API_URL, temporary_settings

from pipelinerl.flows.cli.deployment import KINDS, SHIPPED, deploy, read_project
from pipelinerl.tasks.automations import HEARTBEAT_SECONDS, TAG, restart_automations
from pipelinerl_core.errors import ConfigError

ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize("kind", KINDS)
def test_every_deployment_is_a_flow_of_ours_on_the_pool_of_that_kind(kind):
    document = read_project(SHIPPED, kind)
    names = set()
    for entry in document["deployments"]:
        path, _, function = entry["entrypoint"].partition(":")
        flow = getattr(importlib.import_module(path.removesuffix(".py").replace("/", ".")), function)
        names.add(f"{flow.name}/{entry['name']}")
        assert set(entry.get("parameters", {})) <= set(flow.parameters.properties)
        assert TAG in entry["tags"], "automations look for it"
        assert entry["work_pool"] == document["definitions"]["pools"][kind][entry["work_pool"]["name"]]
        environment = entry["work_pool"]["job_variables"]["env"]
        assert environment["PREFECT_FLOWS_HEARTBEAT_FREQUENCY"] == str(HEARTBEAT_SECONDS)
    assert names >= {
        "train/quickstart",
        "train/nightly",
        "actor/actor",
        "trainer/trainer",
        "replay/replay",
    }


def test_prefect_deploy_finds_the_file_and_every_flow_at_the_top_of_the_repository():
    """`prefect deploy --all` in a checkout reads ./prefect.yaml, and entrypoints from there."""
    assert SHIPPED.resolve() == ROOT / "prefect.yaml"
    paths = {entry["entrypoint"].partition(":")[0] for entry in read_project(SHIPPED, "process")["deployments"]}
    assert all((ROOT / path).is_file() for path in paths)


@pytest.mark.parametrize("kind", ["docker", "kubernetes"])
def test_every_variable_of_a_job_template_is_used_and_every_use_is_declared(kind):
    template = json.loads((SHIPPED.parent / "work_pools" / f"{kind}.json").read_text())
    used = set(re.findall(r"\{\{ (\w+) \}\}", json.dumps(template["job_configuration"])))
    assert used == set(template["variables"]["properties"])  # Prefect ignores a variable that nothing refers to
    for pool in read_project(SHIPPED, kind)["definitions"]["pools"][kind].values():
        assert set(pool["job_variables"]) <= used


@pytest.mark.parametrize("kind", ["docker", "kubernetes"])
def test_the_images_of_a_registry_are_those_of_the_pools_and_of_their_deployments(kind):
    document = read_project(SHIPPED, kind, "ghcr.io/team")
    for entry in document["deployments"]:
        image = entry["work_pool"]["job_variables"]["image"]
        assert re.fullmatch(r"ghcr\.io/team/pipelinerl-(control|actor|trainer):\d+\.\d+\.\d+", image)
    assert "image" not in str(read_project(SHIPPED, "process", "ghcr.io/team")["definitions"]["pools"]["process"])


def test_containers_of_docker_see_all_gpus_and_share_the_locks_that_assign_them():
    """A claim is a lock in /dev/shm of the host (supervision/gpus.py): containers must have the same one."""
    pools = read_project(SHIPPED, "docker")["definitions"]["pools"]["docker"]
    for name in ("actors", "trainers"):
        created = pools[name]["job_variables"]["container_create_kwargs"]
        assert created["ipc_mode"] == "host"
        assert created["device_requests"] == [{"driver": "nvidia", "count": -1, "capabilities": [["gpu"]]}]


@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("http://127.0.0.1:9/api", "PREFECT_API_URL=http://127.0.0.1:9/api: no answer"),
        (None, "deploy needs a Prefect server"),
    ],
)
def test_without_a_server_deploy_names_the_setting_to_set(url, says):
    with temporary_settings({PREFECT_API_URL: url}), pytest.raises(ConfigError, match=re.escape(says)):
        deploy("process", ())


def test_wrong_kinds_and_directories_are_refused(tmp_path):
    with pytest.raises(ConfigError, match="--pools nomad: no such type; there are process, docker, kubernetes"):
        read_project(SHIPPED, "nomad")
    with pytest.raises(ConfigError, match=r"no such file\. Without --file"):
        read_project(tmp_path / "prefect.yaml", "process")
    for text in ("name: somebody's own", "deployments: [", "- a list"):
        (tmp_path / "prefect.yaml").write_text(text)
        with pytest.raises(ConfigError, match=r"--file .*prefect\.yaml: "):
            read_project(tmp_path / "prefect.yaml", "process")
    shutil.copy(SHIPPED, tmp_path)
    assert read_project(tmp_path / "prefect.yaml", "process")["name"] == "pipelinerl"


def test_resuming_gives_up_as_late_as_is_asked_for(tmp_path):
    give_up = restart_automations(7)[2]
    assert give_up.trigger.threshold == 7
    assert "never became Running, after 7 restarts (deploy --max-resumes=7)" in give_up.actions[0].message
    with pytest.raises(ConfigError, match="--max-resumes 1: set at least 2"):
        deploy("process", (), max_resumes=1)
