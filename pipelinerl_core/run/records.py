"""The JSON objects of a run in the object store, and the key of every object (docs/storage.md).

<root>/<run_id>/
  run.json                               resolved configuration, seeds, code version, MLflow run id; written once
  hub.json                               where the hub is, and that it lives; rewritten every second
  control.json                           what is wanted of the run: that it drains
  epochs/<k>.json                        one per start of hub and trainer
  rollouts/<actor>/<epoch>/<seq>.arrow   finished groups, all rows of a group in one segment
  partials/<actor>/<epoch>/<seq>.arrow   growth of the rollouts of open groups
  batches/<step>.<k>/<rank>.arrow        the rows as trained
  weights/<version>.<k>/                 data first (WEIGHTS_FILE or ADAPTERS_FILE), manifest.json last
  broadcasts/<number>.json               who receives weights from the trainer's memory, and how they meet
  checkpoints/<step>.<k>/                model, optimizer, RNG; manifest.json last
  commits/<step>.<k>.json                the truth about a step
  evals/<version>.json                   held-out accuracy of a version
  roles/<role>-<name>.json               a role that lives: where its health and metrics are; removed at its end
  report.json report.html weights.parquet
"""

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from pipelinerl_core.messages import FateRecord, LedgerSnapshot
from pipelinerl_core.ranges import Count, Finite, Number, Seconds, Step, StepOrNone
from pipelinerl_core.types import FileEntry, WeightManifest

FORMAT_VERSION = 1
RUN_KEY = "run.json"
HUB_KEY = "hub.json"
CONTROL_KEY = "control.json"
RESUME_KEY = "resume.json"
STARTS_KEY = "starts.json"
REPORT_JSON_KEY = "report.json"
REPORT_HTML_KEY = "report.html"
WEIGHTS_TABLE_KEY = "weights.parquet"
ROLES_PREFIX = "roles"
RENDEZVOUS_PREFIX = "meetings"
WEIGHTS_FILE = "model.safetensors"
"""All weights of a version, under the names of the model."""
ADAPTERS_FILE = "adapters.safetensors"
"""In its place with weights.content=adapters: the factors of each, and in the header what it takes to merge them."""


def holds_adapters(manifest: WeightManifest) -> bool:
    """Whether a version is adapters alone, to be merged into the starting model."""
    return any(entry.name == ADAPTERS_FILE for entry in manifest.files)


def epoch_key(epoch: int) -> str:
    """Record of one start of hub or trainer."""
    return f"epochs/{epoch:06d}.json"


def rollout_key(actor: str, epoch: int, seq: int) -> str:
    """Segment of finished groups; one writer per (actor, epoch)."""
    return f"rollouts/{actor}/{epoch:06d}/{seq:08d}.arrow"


def partial_prefix(actor: str, epoch: int) -> str:
    """The write-ahead log of the open groups of one actor epoch."""
    return f"partials/{actor}/{epoch:06d}"


def partial_key(actor: str, epoch: int, seq: int) -> str:
    """Segment of that log."""
    return f"{partial_prefix(actor, epoch)}/{seq:08d}.arrow"


def batch_key(step: int, epoch: int, rank: int) -> str:
    """The rows that one rank trained in a step."""
    return f"batches/{step:08d}.{epoch}/{rank:04d}.arrow"


def weights_prefix(version: int, epoch: int) -> str:
    """Files of one durable weight version."""
    return f"weights/{version:08d}.{epoch}"


def broadcast_key(number: int) -> str:
    """A broadcast group."""
    return f"broadcasts/{number}.json"


def checkpoint_prefix(step: int, epoch: int) -> str:
    """Files of one checkpoint."""
    return f"checkpoints/{step:08d}.{epoch}"


def commit_key(step: int, epoch: int) -> str:
    """The truth about one step."""
    return f"commits/{step:08d}.{epoch}.json"


def eval_key(version: int) -> str:
    """Held-out accuracy of one version."""
    return f"evals/{version:08d}.json"


def role_key(role: str, name: str) -> str:
    """A role that lives."""
    return f"{ROLES_PREFIX}/{role}-{name}.json"


def rendezvous_key(epoch: int) -> str:
    """meetings/<epoch>.json"""
    return f"{RENDEZVOUS_PREFIX}/{epoch:08d}.json"


def parse_commit_key(key: str) -> tuple[int, int]:
    """(step, epoch) of a commit key."""
    step, epoch, _ = key.rpartition("/")[2].split(".")
    return int(step), int(epoch)


class Record(BaseModel):
    """Frozen JSON object; unknown fields of a newer minor version are kept out silently."""

    model_config = ConfigDict(frozen=True, extra="ignore", allow_inf_nan=False)

    format_version: Count = FORMAT_VERSION
    """`run.reading.read_record`, through which every record is read, refuses another version by name."""


class RunRecord(Record):
    """run.json."""

    run_id: str
    created_at: Seconds
    code_version: str
    config: dict[str, Any]
    """The resolved RunConfig."""
    flow_run_id: str | None = None
    mlflow_run_id: str | None = None
    mlflow_uri: str | None = None


class EpochRecord(Record):
    """epochs/<k>.json: fences every earlier epoch of the same role."""

    epoch: Count
    role: Literal["hub", "trainer"]
    parent: Count | None
    """Newest earlier epoch of the same role."""
    adopted_through: StepOrNone
    """Last commit of earlier epochs that counts; -1 for none."""
    started_at: Seconds
    host: str
    pid: Count
    arithmetic: dict[str, Any] = {}
    """Trainer: what its rounding depends on (see `RunConfig.arithmetic`)."""


class SwapRecord(Record):
    """One swap in one actor."""

    actor: str
    actor_epoch: Count
    version: Step
    at: Seconds
    """Unix seconds."""
    pause_seconds: Seconds
    num_bytes: Count
    num_running: Count
    num_tokens: Count
    """Tokens the actor epoch had sampled when it happened."""


class RoleRecord(Record):
    """roles/<role>-<name>.json: a process of the run, rewritten while it lives."""

    run_id: str
    role: str
    name: str
    host: str
    pid: Count
    url: str
    """Of /healthz, /readyz and /metrics."""
    started_at: Seconds
    """Unix seconds."""
    beat: Seconds
    """Unix seconds."""
    start_beat: Seconds = 0.0
    """Unix seconds of its newest sign of life before it was ready: a trainer may train steps again for long."""


class ResumeRecord(Record):
    """resume.json: settings that the newest resume has changed."""

    overrides: tuple[str, ...]
    """`section.key=value`, of RESUMABLE keys only."""
    at: Seconds
    """Unix seconds."""


class StartsRecord(Record):
    """starts.json: since which start of its Prefect flow run the newest commit is what it is."""

    flow_run_id: str
    run_count: Count
    """Prefect's number of that start, 1 for the first."""
    step: StepOrNone
    """Newest committed step then; -1: none."""


class RendezvousRecord(Record):
    """meetings/<epoch>.json: address of rank 0, for the ranks of a trainer on other hosts."""

    epoch: Count
    """Of the trainer; a newer one is another start."""
    where: str
    size: Count
    """Ranks in all."""
    per_node: Count
    """Ranks on each host."""
    device: str
    seconds: Seconds
    """Longest wait of a rank for the others."""


class ControlRecord(Record):
    """control.json: what somebody wants of a run."""

    desired: Literal["run", "drain"]
    at: Seconds
    """Unix seconds."""
    by: str = ""


class ActorSample(Record):
    """What an actor had done when a step was reserved."""

    at: Seconds
    engine_version: StepOrNone
    running: Count
    waiting: Count
    concurrency: Count
    num_tokens: Count
    running_seconds: Number
    counters: dict[str, Number] = Field(default_factory=dict)


class CheckpointRef(Record):
    """The newest finished checkpoint when a step was committed."""

    step: Step
    epoch: Count


class Commit(LedgerSnapshot, Record):
    """commits/<step>.<k>.json. Step 0 commits the initial weights."""

    run_id: str
    step: Step
    epoch: Count
    batches: tuple[FileEntry, ...]
    """`name` is the key."""
    weights_sha256: str
    """sha256 of the safetensors bytes of the weights after the step, published or not."""
    manifest: WeightManifest | None
    """None when this version was not published."""
    checkpoint: CheckpointRef | None
    fates: tuple[FateRecord, ...] = ()
    """Fate of every group decided since the commit before, `trained` included."""
    metrics: dict[str, Finite] = Field(default_factory=dict)
    """Keys of telemetry/metrics.py."""
    swaps: tuple[SwapRecord, ...] = ()
    """Swaps the hub has heard of since the commit before."""
    actors: dict[str, ActorSample] = Field(default_factory=dict)
    """"<actor>/<epoch>" -> sample at the reservation of this step."""
    reserved_at: Seconds
    computed_at: Seconds
    committed_at: Seconds


class CheckpointManifest(Record):
    """checkpoints/<step>.<k>/manifest.json, written last."""

    step: Step
    epoch: Count
    files: tuple[FileEntry, ...]
    values: dict[str, Any]
    """JSON part of the learner's state."""


class EvalRecord(Record):
    """evals/<version>.json."""

    version: Step
    num_prompts: Count
    accuracy: Number
    mean_tokens: Number
    errors: Count
    seconds: Seconds
    samples: tuple[dict[str, Any], ...] = ()
    """A few {prompt, completion, reward}."""


class HubRecord(Record):
    """hub.json: where the hub is, that it lives, and what the run looks like now."""

    url: str
    certificate: str = ""
    """PEM of the certificate that this hub shows, and no other; empty without TLS."""
    boot_id: str
    host: str
    pid: Count
    process_started_at: Seconds
    """Start time of the process (psutil), so that a reused pid is not taken for it."""
    beat: Seconds
    """Unix seconds of the last rewrite."""
    live: dict[str, Any] = Field(default_factory=dict)
    """Live totals: step, steps, newest_version, state, ready, leased, reserved, tokens, lengths, tokens_per_second,
    actors, reward_mean, lag_mean, swap_pause_seconds, row_bytes."""
