"""The JSON objects of a run in the object store, and the key of every object (docs/storage.md)."""

import json
import re
from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from pipelinerl_core.messages import ActorSample, FateRecord, LedgerSnapshot, SwapRecord
from pipelinerl_core.ranges import Count, Finite, Number, Seconds, Step, StepOrNone
from pipelinerl_core.storage.digests import digest
from pipelinerl_core.types import FileEntry, WeightManifest

FORMAT_VERSION = 4
"""Version of every object of a run. A change of an object, a default or a formula increments the version, unless runs
of before are read as before: then CHANGELOG says that earlier checkouts cannot read the new objects."""
RUN_KEY = "run.json"
EXPORT_ORIGIN = "pipelinerl.json"
"""File beside an exported model that names the run, the version and the digest of the weights."""
HUB_KEY = "hub.json"
CONTROL_KEY = "control.json"
RESUME_KEY = "resume.json"
STARTS_KEY = "starts.json"
GARBAGE_KEY = "garbage.json"
REPORT_JSON_KEY = "report.json"
REPORT_HTML_KEY = "report.html"
WEIGHTS_TABLE_KEY = "weights.parquet"
ROLES_PREFIX = "roles"
EVALS_PREFIX = "evals"
LIVES_PREFIX = "lives"
LOGS_PREFIX = "logs"
RETIRED_PREFIX = "retired"
BATCHES_PREFIX = "batches"
COMMITS_PREFIX = "commits"
COMPACTED_COMMITS_PREFIX = "compacted/commits"
COMPACTED_ROLLOUTS_PREFIX = "compacted/rollouts"
RENDEZVOUS_PREFIX = "meetings"
QUARANTINED_PREFIX = "quarantined"
WEIGHTS_FILE = "model.safetensors"
"""All weights of a version, under the names of the model."""
ADAPTERS_FILE = "adapters.safetensors"
"""Instead of WEIGHTS_FILE with weights.content=adapters: the adapters' factors; the header says how to merge them."""
MANIFEST_FILE = "manifest.json"
"""Manifest of a weight version or a checkpoint; written last."""


# Only the name that this release writes, so that no two names stand for the same step: gc removes all but one.
_N = r"(?:0|[1-9]\d*)"
_N4, _N6, _N8 = (rf"(?:\d{{{width}}}|[1-9]\d{{{width},}})" for width in (4, 6, 8))
_OF_STEP = rf"{_N8}\.{_N}"
_OF_LIFE = rf"[^/]+/{_N6}"
KEY_PATTERNS: Mapping[str, re.Pattern[str]] = MappingProxyType(
    {
        folder: re.compile(f"{folder}/{names}")
        for folder, names in {
            "epochs": rf"{_N6}\.json",
            "rollouts": rf"{_OF_LIFE}/{_N8}\.arrow",
            "partials": rf"{_OF_LIFE}/{_N8}\.arrow",
            LIVES_PREFIX: _OF_LIFE,
            RETIRED_PREFIX: _OF_LIFE,
            BATCHES_PREFIX: rf"{_OF_STEP}/{_N4}\.arrow",
            QUARANTINED_PREFIX: rf"{_OF_STEP}/{_N4}\.arrow",
            "weights": rf"{_OF_STEP}/[^/]+",
            "checkpoints": rf"{_OF_STEP}/.+",
            COMMITS_PREFIX: rf"{_OF_STEP}\.json",
            COMPACTED_COMMITS_PREFIX: rf"{_N8}-{_N8}\.{_N}\.parquet",
            COMPACTED_ROLLOUTS_PREFIX: rf"{_N8}-{_N8}\.{_N}\.parquet",
            EVALS_PREFIX: rf"{_N8}(\.[^/]+)?\.json",
            ROLES_PREFIX: r"[^/]+\.json",
            RENDEZVOUS_PREFIX: rf"{_N8}\.json",
        }.items()
    }
)
"""Folder -> its keys. `run.reading.list_keys` leaves other files out, such as an editor's backup."""


_OTHER_KEYS = re.compile(
    r"(run|hub|control|resume|starts|prediction|garbage|report)\.json|report\.html|weights\.parquet"
    r"|logs/[^/]+|code/[^/]+\.py|marks/.+|broadcasts/[^/]+\.json|check-[0-9a-f]+(/check)?"
)


def is_run_key(key: str) -> bool:
    """Whether a run has such a key; other objects at the place of a run belong to somebody else."""
    return any(pattern.fullmatch(key) for pattern in (*KEY_PATTERNS.values(), _OTHER_KEYS))


def holds_adapters(manifest: WeightManifest) -> bool:
    """Whether a version holds adapters only, which readers merge into the starting model."""
    return any(entry.name == ADAPTERS_FILE for entry in manifest.files)


def code_key(sha256: str) -> str:
    """A file of the user's code."""
    return f"code/{sha256}.py"


def epoch_key(epoch: int) -> str:
    """Record of one start of hub or trainer."""
    return f"epochs/{epoch:06d}.json"


def rollout_key(actor: str, epoch: int, seq: int) -> str:
    """Segment of finished groups; one writer per (actor, epoch)."""
    return f"rollouts/{actor}/{epoch:06d}/{seq:08d}.arrow"


def life_key(actor: str, epoch: int) -> str:
    """Object that makes one process the owner of an actor epoch."""
    return f"{LIVES_PREFIX}/{actor}/{epoch:06d}"


def retired_key(actor: str, epoch: int) -> str:
    """Object that retires an actor life."""
    return f"{RETIRED_PREFIX}/{actor}/{epoch:06d}"


def parse_retired_key(key: str) -> tuple[str, int]:
    """(actor, epoch) of the key of a retired life."""
    _, actor, epoch = key.split("/")
    return actor, int(epoch)


def partial_prefix(actor: str, epoch: int) -> str:
    """Prefix of the write-ahead log of one actor epoch's open groups."""
    return f"partials/{actor}/{epoch:06d}"


def partial_key(actor: str, epoch: int, seq: int) -> str:
    """Segment of the write-ahead log of open groups."""
    return f"{partial_prefix(actor, epoch)}/{seq:08d}.arrow"


def batch_key(step: int, epoch: int, rank: int) -> str:
    """The rows that one rank trained in a step."""
    return f"{BATCHES_PREFIX}/{step:08d}.{epoch}/{rank:04d}.arrow"


def quarantined_key(step: int, epoch: int, number: int) -> str:
    """Rows of a step that was not taken; `number` counts the tries of the step, from 1."""
    return f"{QUARANTINED_PREFIX}/{step:08d}.{epoch}/{number:04d}.arrow"


def delta_file(base: int) -> str:
    """Name of a version's file that has only its difference from the version `base` of the same trainer."""
    return f"delta-{base:08d}.arrow"


def base_of(key: str) -> int | None:
    """The version that the difference of this key is a difference from; None for another key."""
    match = re.fullmatch(rf"weights/{_OF_STEP}/delta-({_N8})\.arrow", key)
    return int(match[1]) if match else None


def weights_prefix(version: int, epoch: int) -> str:
    """Files of one durable weight version."""
    return f"weights/{version:08d}.{epoch}"


def parse_step_key(key: str) -> tuple[int, int]:
    """(step, epoch) of a key <folder>/<step>.<k>/<file>: of weights, batches or checkpoints."""
    step, epoch = key.split("/")[1].split(".")
    return int(step), int(epoch)


def broadcast_key(number: int) -> str:
    """Record of one broadcast."""
    return f"broadcasts/{number}.json"


def checkpoint_prefix(step: int, epoch: int) -> str:
    """Files of one checkpoint."""
    return f"checkpoints/{step:08d}.{epoch}"


def commit_key(step: int, epoch: int) -> str:
    """The commit of one step."""
    return f"commits/{step:08d}.{epoch}.json"


def eval_version(key: str) -> int:
    """The version in the key of an evaluation."""
    return int(key.rpartition("/")[2].partition(".")[0])


def eval_key(version: int, name: str = "") -> str:
    """Evaluation of one version on a set of eval.sets, or on the run's own held-out prompts."""
    return f"{EVALS_PREFIX}/{version:08d}{f'.{name}' if name else ''}.json"


def role_key(role: str, name: str) -> str:
    """Record of a live role."""
    return f"{ROLES_PREFIX}/{role}-{name}.json"


def log_key(name: str, host: str) -> str:
    """Copy of the last lines of a role's log on a host."""
    return f"{LOGS_PREFIX}/{name}@{host}.json"


def rendezvous_key(epoch: int) -> str:
    """meetings/<epoch>.json: rendezvous of the ranks."""
    return f"{RENDEZVOUS_PREFIX}/{epoch:08d}.json"


def parse_commit_key(key: str) -> tuple[int, int]:
    """(step, epoch) of a commit key."""
    step, epoch, _ = key.rpartition("/")[2].split(".")
    return int(step), int(epoch)


class Record(BaseModel):
    """Frozen JSON object."""

    model_config = ConfigDict(frozen=True, extra="ignore", allow_inf_nan=False)

    format_version: Count = FORMAT_VERSION
    """`run.reading.read_record` reads every record and refuses other versions."""


_BEFORE = {"share_prompts": False, "score_zero_advantage": True}


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
    code: dict[str, str] = {}
    """sha256 of each file of the user, stored as `code_key`. "": of reward.function or environment.path; the name of
    a part of a mixture: the same of the part; loss.function, loss.advantage_function."""
    packages: dict[str, str] = {}
    """The same names -> distribution and version of a module that is installed instead of a file."""
    commits: dict[str, str] = {}
    """The same names -> commit of the git checkout that has the file; "-dirty" at the end: with other changes."""
    owner: str = ""
    """Whose run this is: tracking.owner, else user@host of the process that started the run."""
    preset: str = ""
    """Preset or TOML file that the configuration starts from; empty: recorded before, or an arm of a comparison."""
    parent: str = ""
    """RUN@VERSION whose exported weights are the starting model; empty for another model."""
    files: dict[str, str] = {}
    """Setting -> digest of the rows or the model that it names (run/local_files.py)."""

    @property
    def model_path(self) -> str:
        """model.path; empty: not recorded."""
        return str(self.config.get("model", {}).get("path", ""))

    @field_validator("config")
    @classmethod
    def _with_recorded_meaning(cls, config: dict[str, Any]) -> dict[str, Any]:
        """Keys that a run from before them lacks, with what such a run did."""
        if not isinstance(config.get("trainer", {}), dict):
            raise ValueError("config.trainer is no object")
        return {**config, "trainer": {**_BEFORE, **config["trainer"]}} if "trainer" in config else config


class LogRecord(Record):
    """logs/<role>@<host>.json: the last lines of a role's log on a host, without secrets."""

    name: str
    """Of the role: hub, trainer, actor-0, ..."""
    host: str
    at: Seconds
    """Unix seconds of the copy; a later copy is made only if the log has grown."""
    num_lines: Count
    """Of the log, since the role was started on this host."""
    num_warnings: Count
    num_errors: Count
    last_problem: str
    """Newest warning or error."""
    last_lines: tuple[str, ...]


class EpochRecord(Record):
    """epochs/<k>.json: fences every earlier epoch of the same role. A trainer writes its record twice."""

    epoch: Count
    role: Literal["hub", "trainer"]
    parent: Count | None
    """Newest earlier epoch of the same role that was not only a claim; None for the first epoch."""
    adopted_through: StepOrNone
    """Last commit of earlier epochs that counts; -1 for none."""
    accepts_loss: bool = False
    """By `pipelinerl accept-loss`: later commits of earlier epochs were missing; the run continues without them."""
    is_claim: bool = False
    """A trainer that has not adopted commits yet: `adopted_through` is preliminary (run/history.py)."""
    started_at: Seconds
    host: str
    pid: Count
    process: str = ""
    """As in HubRecord."""
    arithmetic: dict[str, Any] = {}
    """Trainer: the settings on which its rounding depends (see `RunConfig.arithmetic`)."""
    processor: str = ""
    """Trainer: `run.processor.processor` of its host."""


class RoleRecord(Record):
    """roles/<role>-<name>.json: a process of the run, which rewrites its record while it runs."""

    run_id: str
    role: str
    name: str
    host: str
    pid: Count
    url: str
    """Base URL of /healthz, /readyz and /metrics."""
    started_at: Seconds
    """Unix seconds."""
    beat: Seconds
    """Unix seconds of the last heartbeat."""
    start_beat: Seconds = 0.0
    """Unix seconds of the last heartbeat before the role was ready: a trainer may retrain steps for a long time."""
    progress: str = ""
    """What the role does now. Example: evaluating version 0: 300/1,000 prompts."""


class ResumeRecord(Record):
    """resume.json: overrides of all resumes."""

    overrides: tuple[str, ...]
    """`section.key=value`, of RESUMABLE keys only."""
    at: Seconds
    """Unix seconds."""


class GarbageRecord(Record):
    """garbage.json: what a call of `pipelinerl gc` noted; a later call removes what still is garbage."""

    at: Seconds
    """Unix seconds."""
    keys: tuple[str, ...]


class StartsRecord(Record):
    """starts.json: first start of a Prefect flow run at the newest commit, to count starts without a new commit."""

    flow_run_id: str
    run_count: Count
    """Prefect's number of that start, 1 for the first."""
    step: StepOrNone
    """Newest committed step at that start; -1: none."""


class RendezvousRecord(Record):
    """meetings/<epoch>.json: rendezvous of the ranks of a trainer on several hosts."""

    epoch: Count
    """Epoch of the trainer; each start has a new epoch."""
    where: str
    """Address of rank 0."""
    size: Count
    """Total number of ranks."""
    per_node: Count
    """Ranks on each host."""
    device: str
    seconds: Seconds
    """Deadline of a rank's wait for the other ranks."""


class ControlRecord(Record):
    """control.json: a request to run or to drain."""

    desired: Literal["run", "drain"]
    at: Seconds
    """Unix seconds."""
    by: str = ""
    """Origin of the request."""


class RescoredActor(Record):
    """Rollouts of one actor epoch that a step scored again (algo/rescoring.py); means of |difference| in nats."""

    tokens: Count
    """Compared tokens without older context."""
    mismatch: Number | None = None
    """Over these: engine against trainer, both under the version that sampled the token."""
    signed_mismatch: Number | None = None
    """Mean of engine - trainer."""
    stale_kv_tokens: Count = 0
    """Compared tokens with older context."""
    stale_kv: Number | None = None
    """Over these: engine against trainer, as above."""
    staleness_tokens: Count = 0
    """Compared tokens of earlier versions."""
    staleness: Number | None = None
    """Over these: the policy before the step against the version that sampled the token, both by the trainer."""
    alarm: str = ""
    """What is wrong with the actor; empty without an alarm."""


class CheckpointRef(Record):
    """Reference to the newest complete checkpoint when a step was committed."""

    step: Step
    epoch: Count


class Commit(LedgerSnapshot, Record):
    """commits/<step>.<k>.json. Step 0 commits the initial weights."""

    run_id: str
    step: Step
    epoch: Count
    batches: tuple[FileEntry, ...]
    """`name` is the key."""
    weights_digest: str
    """BLAKE3 of the safetensors bytes of the weights after the step, published or not."""
    manifest: WeightManifest | None
    """None when this version was not published."""
    checkpoint: CheckpointRef | None
    fates: tuple[FateRecord, ...] = ()
    """Fate of every group decided since the previous commit, including `trained`."""
    metrics: dict[str, Finite] = Field(default_factory=dict)
    """Keys of telemetry/metrics.py."""
    swaps: tuple[SwapRecord, ...] = ()
    """Swaps that actors have reported to the hub since the previous commit."""
    actors: dict[str, ActorSample] = Field(default_factory=dict)
    """"<actor>/<epoch>" -> sample at the reservation of this step."""
    rescored: dict[str, RescoredActor] = Field(default_factory=dict)
    """"<actor>/<epoch>" -> what re-scoring found at this step; empty in steps that compared nothing."""
    reserved_at: Seconds
    computed_at: Seconds
    committed_at: Seconds


class CheckpointManifest(Record):
    """checkpoints/<step>.<k>/manifest.json, written last."""

    step: Step
    epoch: Count
    files: tuple[FileEntry, ...]
    values: dict[str, Any]
    """The JSON part of the learner's state."""
    values_digest: str = ""
    """Digest of `values`; "": written before there were digests."""

    def digested(self) -> Self:
        """The manifest with the digest of its values."""
        return self.model_copy(update={"values_digest": self._digest()})

    def _digest(self) -> str:
        # As they are read: JSON has no tuples, and other versions of pydantic write some numbers in another way.
        values = json.loads(self.model_dump_json(include={"values"}))
        return digest(json.dumps(values, sort_keys=True).encode())

    @model_validator(mode="after")
    def _check_values(self) -> Self:
        if self.values_digest not in ("", self._digest()):
            raise ValueError("values differ from values_digest")
        return self


def complete_checkpoints(keys: Iterable[str]) -> list[CheckpointRef]:
    """The checkpoints whose manifest is among the keys below `checkpoints`."""
    names = [parse_step_key(key) for key in keys if key.endswith(f"/{MANIFEST_FILE}")]
    return [CheckpointRef(step=step, epoch=epoch) for step, epoch in names]


class EvalRecord(Record):
    """evals/<version>.json and evals/<version>.<set>.json: an evaluation on one set of held-out prompts."""

    version: Step
    """Version of the first sampled token."""
    last_version: StepOrNone = -1
    """Version of the last sampled token; larger than `version` only on an actor's engine. -1: recorded before."""
    set: str = ""
    """Name in eval.sets, or part of a mixture; empty: the run's own held-out prompts, of a mixture the weighted mean
    of all parts."""
    num_prompts: Count
    num_samples: Count = 1
    """Sampled completions per prompt."""
    temperature: Number = 1.0
    """Temperature of the sampled completions."""
    top_p: Number = 1.0
    """top_p of the sampled completions."""
    accuracy: Number
    """Mean over prompts of the mean reward of their completions (avg@num_samples); prompts without a reward are left
    out."""
    low: Number | None = None
    high: Number | None = None
    """95 % confidence interval of `accuracy` over prompts."""
    best: Number | None = None
    """Mean over prompts of the best reward, for num_samples > 1; with rewards 0 and 1 this is pass@num_samples."""
    greedy: Number | None = None
    """Mean reward of greedy completions."""
    components: dict[str, Finite] = Field(default_factory=dict)
    """Component of the reward -> its mean over completions."""
    mean_tokens: Number
    errors: Count
    """Completions without a reward."""
    seconds: Seconds
    finished_at: Seconds = 0.0
    """Unix seconds."""
    newest_step: StepOrNone = -1
    """Newest committed step when the evaluation ended."""
    samples: tuple[dict[str, Any], ...] = ()
    """A few {prompt, completion, reward, reference, task}; reference: the answer of the prompt's row, or empty; task:
    its columns, long values cut. An episode of several turns also has turns: [{given, text, reward}]."""
    error: str = ""
    """The error of the first completion without a reward; empty without errors."""

    @property
    def known_accuracy(self) -> float | None:
        """The accuracy; None if completions failed and none has a reward."""
        return None if self.errors > 0 and self.low is None else self.accuracy

    def document(self) -> dict[str, Any]:
        """The record as JSON values, with the known accuracy."""
        return self.model_dump(mode="json") | {"accuracy": self.known_accuracy}

    @property
    def lag(self) -> int:
        """Optimizer steps between the evaluated version and the end of the evaluation."""
        return max(0, self.newest_step - self.version)


class HubRecord(Record):
    """hub.json: address, heartbeat and live totals of the hub."""

    url: str
    certificate: str = ""
    """PEM of the hub's TLS certificate, the only certificate that clients accept; empty without TLS."""
    boot_id: str
    host: str
    pid: Count
    process_started_at: Seconds
    """Start time of the process (psutil), Unix seconds."""
    process: str = ""
    """`run.hub_status.process_mark`, to detect another process with the same pid; empty: recorded before."""
    beat: Seconds
    """Unix seconds of the last heartbeat, that is, of the last rewrite, by the clock of the hub's host."""
    live: dict[str, Any] = Field(default_factory=dict)
    """Live totals: step, steps, newest_version, state, ready, leased, reserved, tokens, lengths, tokens_per_second,
    actors, reward_mean, lag_mean, swap_pause_seconds, row_bytes."""
