"""infra/kubernetes: the workers serve the pools of the project, and no secret has a value."""

from pathlib import Path

import yaml

ROOT = Path(__file__).parents[3]
FILES = sorted((ROOT / "infra" / "kubernetes").glob("*.yaml"))
MANIFESTS = [part for path in FILES for part in yaml.safe_load_all(path.read_text())]
POOLS = yaml.safe_load((ROOT / "prefect.yaml").read_text())["definitions"]["pools"]["kubernetes"]


def of_kind(kind: str) -> list[dict]:
    return [part for part in MANIFESTS if part["kind"] == kind]


def test_there_is_a_worker_for_each_pool_on_a_port_of_its_own():
    (deployment,) = (part for part in of_kind("Deployment") if part["metadata"]["name"] == "pipelinerl-worker")
    containers = deployment["spec"]["template"]["spec"]["containers"]
    ports = set()
    for container in containers:
        command = ["prefect", "worker", "start", "--pool", container["name"], "--type", "kubernetes"]
        assert container["args"] == [*command, "--with-healthcheck"]
        environment = {item["name"]: item["value"] for item in container["env"]}
        port = int(environment.get("PREFECT_WORKER_WEBSERVER_PORT", 8080))
        assert container["livenessProbe"]["httpGet"] == {"path": "/health", "port": port}
        ports.add(port)
    assert {container["name"] for container in containers} == set(POOLS)
    assert len(ports) == len(containers)


def test_everything_is_in_one_namespace_and_jobs_are_made_there():
    (namespace,) = of_kind("Namespace")
    for part in MANIFESTS:
        if part["kind"] not in ("Namespace", "PriorityClass"):
            assert part["metadata"]["namespace"] == namespace["metadata"]["name"], part["kind"]
    template = yaml.safe_load((ROOT / "flows" / "work_pools" / "kubernetes.json").read_text())
    assert template["variables"]["properties"]["namespace"]["default"] == namespace["metadata"]["name"]


def test_the_example_of_a_secret_has_names_and_no_values():
    example = yaml.safe_load((ROOT / "infra" / "kubernetes" / "secret.yaml.example").read_text())
    assert set(example["stringData"].values()) == {""}
    assert {"PREFECT_API_URL", "PIPELINERL_ROOT", "MLFLOW_TRACKING_URI"} < set(example["stringData"])
    template = yaml.safe_load((ROOT / "flows" / "work_pools" / "kubernetes.json").read_text())
    assert template["variables"]["properties"]["secret_name"]["default"] == example["metadata"]["name"]


def test_a_trainer_goes_before_an_actor():
    value = {part["metadata"]["name"]: part["value"] for part in of_kind("PriorityClass")}
    priority = {name: value[pool["job_variables"]["priority_class_name"]] for name, pool in POOLS.items()}
    assert priority["control"] == priority["trainers"] > priority["actors"]


def test_the_pages_of_all_runs_are_a_service_with_a_token_under_the_names_that_the_server_accepts():
    (service,) = of_kind("Service")
    (deployment,) = (part for part in of_kind("Deployment") if part["metadata"]["name"] == "pipelinerl-serve")
    pod = deployment["spec"]["template"]
    (container,) = pod["spec"]["containers"]
    assert service["spec"]["selector"].items() <= pod["metadata"]["labels"].items()
    name, namespace = service["metadata"]["name"], service["metadata"]["namespace"]
    assert f"--allowed-host={name}.{namespace}" in container["args"]
    (port,) = service["spec"]["ports"]
    assert f"--port={port['port']}" in container["args"]
    (source,) = container["envFrom"]
    secret = yaml.safe_load((ROOT / "infra" / "kubernetes" / "secret.yaml.example").read_text())
    assert source["secretRef"]["name"] == secret["metadata"]["name"]
    assert "PIPELINERL_SERVE_TOKEN" in secret["stringData"]


def test_every_pool_requests_processor_and_memory():
    for pool in POOLS.values():
        assert {"cpu_request", "memory_request", "priority_class_name"} <= set(pool["job_variables"])
