"""The work of `pipelinerl deploy`: applies prefect.yaml and the automations to a Prefect server."""

import json
import subprocess
import sys
import tempfile
from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.actions import DeploymentUpdate, WorkPoolCreate, WorkPoolUpdate
from prefect.client.schemas.filters import DeploymentFilter, DeploymentFilterName
from prefect.client.schemas.responses import DeploymentResponse
from prefect.exceptions import ObjectAlreadyExists, ObjectNotFound
from prefect.settings import get_current_settings

from pipelinerl.flows.cli.console import say
from pipelinerl.flows.cli.notification import notification_blocks, read_notified, save_block
from pipelinerl.flows.source import installed
from pipelinerl.tasks.automations import DEFAULT_MAX_RESUMES, LEAST_RESUMES, apply_automation, restart_automations
from pipelinerl.tasks.notifications import notifying_automations
from pipelinerl.tasks.operator_changes import keep
from pipelinerl.tasks.outage import check_prefect
from pipelinerl_core.errors import ConfigError, PipelineRLError

KINDS = ("process", "docker", "kubernetes")
SHIPPED = Path(installed()["directory"]) / "flows" / "prefect.yaml"
_TEMPLATES = "work_pools"
_DEPLOY_SECONDS = 300.0

Entry = tuple[str, str]
"""Name and entrypoint of a deployment in prefect.yaml."""


@dataclass(slots=True)
class Deployed:
    """Name -> created, updated or unchanged, of everything that prefect.yaml describes."""

    api_url: str
    pools: dict[str, str] = field(default_factory=dict)
    deployments: dict[str, str] = field(default_factory=dict)
    automations: dict[str, str] = field(default_factory=dict)
    kept: dict[str, list[str]] = field(default_factory=dict)
    """Deployment -> fields that stay as they are on the server and differ from prefect.yaml."""
    notified: list[str] = field(default_factory=list)
    """Notification blocks, "<type>/<name>"; the URLs of webhooks are secrets."""

    @property
    def lines(self) -> list[str]:
        """The result as text, and the next commands."""
        rows = [("work pool", self.pools), ("deployment", self.deployments), ("automation", self.automations)]
        kept = {
            name: f"; kept as on the server: {', '.join(fields)} (--reset overwrites)"
            for name, fields in self.kept.items()
        }
        results = [
            f"{noun} {name}: {change}{kept.get(name, '')}"
            for noun, changes in rows
            for name, change in changes.items()
        ]
        told = [f"messages go to {slug}" for slug in self.notified]
        workers = [f"  prefect worker start --pool {name}" for name in self.pools]
        return [
            *results,
            *(told or ["messages go to nobody; set --notify URL"]),
            "next, on the machines that run the roles:",
            *workers,
            "  prefect deployment run train/quickstart",
        ]


def deploy(
    kind: str,
    notify: Sequence[str],
    file: Path = SHIPPED,
    max_resumes: int = DEFAULT_MAX_RESUMES,
    *,
    registry: str = "",
    reset: bool = False,
) -> Deployed:
    """Create or update on the server everything that `file` describes, but leave to operators what is theirs.

    notify: URLs of webhooks, or "<block type>/<name>" of notification blocks; empty: who is notified stays.
    max_resumes: how often a crashed train run is scheduled again without becoming Running.
    registry: where the images are, for pools of containers; empty: as `file` names them.
    reset: also overwrite schedules, pauses, tags and limits of deployments, and actions of automations.

    Raises ConfigError without a server, for a missing or invalid file, or for a wrong entry of `notify`.
    """
    if max_resumes < LEAST_RESUMES:
        raise ConfigError(f"--max-resumes {max_resumes}: set at least {LEAST_RESUMES}")
    document = read_project(file, kind, registry)
    url = get_current_settings().api.url
    if not url:
        raise ConfigError("deploy needs a Prefect server. Set PREFECT_API_URL, for example http://127.0.0.1:4200/api")
    check_prefect(str(url))
    blocks = notification_blocks(notify)
    deployed = Deployed(api_url=str(url))
    with get_client(sync_client=True) as client:
        for name in document["definitions"]["pools"][kind]:
            deployed.pools[name] = _make_pool(client, name, kind, file)
        say(f"deploying {len(document['deployments'])} deployments")
        _make_deployments(client, document, deployed, reset=reset)
    for wanted in restart_automations(max_resumes):
        deployed.automations[wanted.name] = apply_automation(wanted, reset=reset)
    told = [save_block(block) for block in blocks]
    if not told:
        told = sorted(set().union(*(notified.blocks for notified in read_notified())))
    for wanted in notifying_automations(told):
        deployed.automations[wanted.name] = apply_automation(
            wanted, reset=reset, keeps_actions=not blocks and not reset
        )
    deployed.notified = sorted({slug for notified in read_notified() for slug in notified.blocks.values()})
    return deployed


def _make_deployments(
    client: SyncPrefectClient, document: dict[str, Any], deployed: Deployed, *, reset: bool
) -> None:
    """Deploy the document; unless `reset`, deployments on the server keep what is left to operators."""
    entries = {(entry["name"], entry["entrypoint"]): entry for entry in document["deployments"]}
    before = _read_deployments(client, entries)
    kept: dict[Entry, list[str]] = {}
    for key, existing in before.items():
        if not reset:
            kept[key] = keep(entries[key], existing)
    _deploy_all(document)
    for key, existing in before.items():
        if reset and not entries[key].get("schedules"):  # `prefect deploy` leaves these
            client.update_deployment(existing.id, DeploymentUpdate(schedules=[]))
    after = _read_deployments(client, entries)
    for key in entries:
        is_equal = key in before and key in after and _content(before[key]) == _content(after[key])
        name = f"{key[1].rpartition(':')[2].replace('_', '-')}/{key[0]}"  # as Prefect names a flow
        deployed.deployments[name] = "created" if key not in before else "unchanged" if is_equal else "updated"
        if kept.get(key):
            deployed.kept[name] = kept[key]


def _read_deployments(client: SyncPrefectClient, keys: Collection[Entry]) -> dict[Entry, DeploymentResponse]:
    """The deployments of prefect.yaml that are on the server, by name and entrypoint."""
    named = DeploymentFilter(name=DeploymentFilterName(any_=sorted({name for name, _ in keys})))
    by_key = {(each.name, each.entrypoint or ""): each for each in client.read_deployments(deployment_filter=named)}
    return {key: by_key[key] for key in keys if key in by_key}


def _content(deployment: DeploymentResponse) -> dict[str, Any]:
    """What `deploy` sets, with the order of tags as the server has it."""
    names = {
        "concurrency_limit", "concurrency_options", "description", "entrypoint", "job_variables",
        "parameter_openapi_schema", "parameters", "path", "paused", "pull_steps", "tags", "work_pool_name",
    }  # fmt: skip
    content = deployment.model_dump(mode="json", include=names)
    content["schedules"] = sorted(
        schedule.model_dump_json(include={"schedule", "active", "parameters", "slug"})
        for schedule in deployment.schedules
    )
    return {**content, "tags": sorted(deployment.tags)}


def read_project(file: Path, kind: str, registry: str = "") -> dict[str, Any]:
    """The document of `file`, with the work pool of every deployment replaced by its pool of this kind.

    registry: put before the names of images.
    """
    if kind not in KINDS:
        raise ConfigError(f"--pools {kind}: no such type; there are {', '.join(KINDS)}")
    try:
        document: dict[str, Any] = yaml.safe_load(file.read_text())
    except FileNotFoundError:
        raise ConfigError(f"--file {file}: no such file. Without --file, {SHIPPED} is deployed") from None
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(f"--file {file}: {error}") from None
    try:
        pools = document["definitions"]["pools"][kind]
        for pool in pools.values():
            variables = pool["job_variables"]
            if registry and "image" in variables:
                variables["image"] = f"{registry.rstrip('/')}/{variables['image']}"
        for entry in document["deployments"]:
            entry["work_pool"] = pools[entry["work_pool"]["name"]]
    except (AttributeError, KeyError, TypeError) as error:
        raise ConfigError(
            f"--file {file}: no definitions.pools.{kind} or no deployments of these pools ({error!r}). "
            "Start from `pipelinerl deploy --show`"
        ) from None
    return document


def _make_pool(client: SyncPrefectClient, name: str, kind: str, file: Path) -> str:
    template = _template(file, kind)
    try:
        pool = client.read_work_pool(name)
    except ObjectNotFound:
        wanted = WorkPoolCreate(name=name, type=kind, **({} if template is None else {"base_job_template": template}))
        with suppress(ObjectAlreadyExists):
            client.create_work_pool(wanted)
        return "created"
    if pool.type != kind:
        raise ConfigError(
            f"work pool {name} is of type {pool.type}, not {kind}. Delete it (prefect work-pool delete {name}) or "
            f"deploy with --pools {pool.type}"
        )
    if template is None or pool.base_job_template == template:
        return "unchanged"
    client.update_work_pool(name, WorkPoolUpdate(base_job_template=template))
    return "updated"


def _template(file: Path, kind: str) -> dict[str, Any] | None:
    """Base job template of a kind of pool: beside the file, else the shipped one; None: Prefect's default."""
    for directory in (file.parent, SHIPPED.parent):
        path = directory / _TEMPLATES / f"{kind}.json"
        if path.exists():
            template: dict[str, Any] = json.loads(path.read_text())
            return template
    return None


def _deploy_all(document: dict[str, Any]) -> None:
    """Run `prefect deploy` on the document in the parent directory of the package `flows`, as entrypoints require."""
    project = installed()["directory"]
    with tempfile.NamedTemporaryFile("w", suffix=".yaml", prefix="prefect-") as file:
        yaml.safe_dump(document, file)
        file.flush()
        command = [sys.executable, "-m", "prefect", "--no-prompt", "deploy", "--all", "--prefect-file", file.name]
        try:
            ended = subprocess.run(
                command, cwd=project, capture_output=True, text=True, timeout=_DEPLOY_SECONDS, check=False
            )
        except subprocess.TimeoutExpired:
            raise PipelineRLError(f"`prefect deploy` did not end within {_DEPLOY_SECONDS:.0f} s") from None
    if ended.returncode != 0:
        raise PipelineRLError(f"`prefect deploy` failed:\n{(ended.stderr or ended.stdout)[-2000:].strip()}")
