"""One frozen section per stage. A default lives on its field and nowhere else; the text below a field is its help."""

import os
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator

from pipelinerl_core.config.mlflow_login import take_login
from pipelinerl_core.config.section import Auto, Section

MLFLOW_VARIABLE = "MLFLOW_TRACKING_URI"


class ModelConfig(Section):
    """The model to train."""

    path: str = "builtin:sums"
    """Directory of a Hugging Face model and tokenizer; or the model's name on the hub, org/name or org/name@revision,
    to download the model and record its commit; or builtin:sums, a small model that `pipelinerl prepare` builds
    (builtin:sums?seed=1 has other initial weights), or builtin:smollm2, the chat model of `make demo`."""
    dtype: Literal["auto", "float32", "bfloat16"] = "float32"
    """Data type of the weights in engine and trainer; both compute the logits in float32. auto: bfloat16 if the GPU
    or CPU of this host has units for it, else float32; chosen when the configuration is read, and stored with the
    run. Set bfloat16 on GPUs."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Device of the learner and of the embedded engine; auto: a GPU if engine.kind=vllm and the host has one, else
    the CPU. vLLM uses the device that it was built for."""
    chat_template: bool = False
    """Wrap each prompt as a user message with the tokenizer's chat template. Set for instruction-tuned models."""


class RolloutsConfig(Section):
    """How rollouts are sampled."""

    group_size: int = Field(8, ge=2)
    """Rollouts per prompt; the rewards of a group form the baseline. Raise for less noisy advantages."""
    max_tokens: int = Field(64, ge=1)
    """Tokens of a completion at most; sampling stops there. Raise if many completions are truncated."""
    max_prompt_tokens: int = Field(256, ge=1)
    """Tokens of a prompt at most, for which engines reserve memory; a longer prompt gives rollouts with outcome
    error. Raise for longer prompts."""
    temperature: float = Field(1.0, gt=0)
    """Sampling temperature; the trainer divides its logits by the same value. Lower for less exploration."""
    top_p: float = Field(1.0, gt=0, le=1)
    """Nucleus sampling: probability mass to sample from. Must be 1, because truncation breaks the importance
    ratio."""
    filter_zero_variance: bool = False
    """Replace groups whose rewards are all equal by new groups (DAPO's dynamic sampling; as there, rewards are
    compared without the penalty of reward.overlong_tokens). Set if many prompts are always or never solved; not with
    a value head, a KL term or an entropy bonus, whose gradient would be lost."""


class WeightsConfig(Section):
    """How weight versions reach the actors."""

    transport: Literal["shm", "object_store", "nccl"] = "shm"
    """shm: shared memory, for one host; object_store: the run's object store, any number of hosts; nccl: one
    broadcast from the trainer's memory to vLLM's workers (over gloo on hosts without a GPU)."""
    broadcast_seconds: float = Field(60.0, gt=0)
    """nccl: seconds to wait for the receivers of a broadcast; then the version goes through the object store. Raise
    for large models."""
    broadcast_host: str = ""
    """nccl: address at which actors reach the trainer; empty: loopback, or the host's name with
    placement.kind=work_pools. Set if other hosts cannot resolve the name."""
    content: Literal["merged", "adapters"] = "merged"
    """Content of a published version with learner.lora_rank. merged: all weights; adapters: the LoRA adapters only,
    which each reader merges into model.path (the same model on every host). Set adapters to send fewer bytes."""
    publish_every: int = Field(1, ge=1)
    """Publish the weights of every k-th step; versions keep their step numbers. Raise if swaps cost too much time;
    raises the lag."""
    durable_every: int = Field(1, ge=1)
    """Store every k-th version (or the next published version) in the object store; with weights.publish_every or
    schedule.steps_per_phase above 1, all. With transport=object_store and model.dtype=bfloat16 the other versions are
    stored as their differences from an earlier version, if these are smaller. Raise to write less."""
    keep: int = Field(20, ge=0)
    """Number of stored versions that stay in the object store, newest first, beside the first and the last version;
    0: all versions. Versions stored with a checkpoint do not count against the versions of durable_every. Raise to
    evaluate or export more old versions; lower for a large model."""

    @property
    def uses_shared_memory(self) -> bool:
        """Versions lie in the shared memory of one host."""
        return self.transport == "shm"

    @property
    def may_use_deltas(self) -> bool:
        """Whole versions that need not be durable go through the object store."""
        is_stored = self.transport == "object_store" and self.content == "merged"
        return is_stored and self.durable_every > 1 and self.publish_every == 1

    @property
    def is_broadcast(self) -> bool:
        """Versions go from the trainer's memory to the workers of engines, which load them without merging."""
        return self.transport == "nccl"


class CheckpointConfig(Section):
    """When the trainer writes checkpoints, and which it keeps."""

    every_seconds: float = Field(15.0, gt=0)
    """Seconds between checkpoints of model and optimizer, which bounds the work that is repeated after a crash. The
    trainer lengthens the interval if checkpoints would take more than 5% of the time."""
    keep_every: int = Field(0, ge=0)
    """Keep the first checkpoint of every N steps, beside step 0 and the newest two; 0: no others. Each has 12 bytes a
    parameter. Set to replay steps of a long run, or to export versions that are not stored, without training from
    step 0."""


class EvalConfig(Section):
    """Evaluation on held-out prompts: the mean reward before, during and after training (docs/evaluation.md)."""

    num_prompts: int = Field(1000, ge=0)
    """Held-out prompts of the first and the last evaluation, at most; 0: no evaluation at all. Raise for a narrower
    confidence interval."""
    max_seconds: float = Field(120.0, gt=0)
    """Seconds after which the first evaluation takes no further prompts, so that a slow model evaluates fewer; the
    later evaluations take at most these prompts. Raise for a narrower confidence interval."""
    every_steps: int = Field(0, ge=0)
    """Optimizer steps between two evaluations during training; 0: a tenth of trainer.steps (runs of fewer than 20
    steps: none)."""
    subset: int = Field(128, ge=0)
    """Held-out prompts of each evaluation during training; 0: evaluate only before and after training."""
    on: Literal["auto", "own", "actors"] = "auto"
    """Engine of the evaluations during training. own: a further engine at low priority, which samples all tokens with
    one version; actors: an actor's engine, up to an eighth of its slots, without pinning the version; auto: own for
    the embedded engine with placement.kind=local and without share_gpu=turns, else actors."""
    samples: int = Field(1, ge=1, le=1024)
    """Sampled completions per prompt. Raise for a narrower confidence interval and for pass@k."""
    temperature: Auto | Annotated[float, Field(ge=0)] = "auto"
    """Temperature of the sampled completions, at least 0; auto: rollouts.temperature. Set to compare with figures
    that were measured at another temperature."""
    top_p: float = Field(1.0, gt=0, le=1)
    """Nucleus sampling of the sampled completions: probability mass to sample from; 1: all tokens, as in
    training."""
    max_tokens: int = Field(0, ge=0)
    """Tokens of a completion of an evaluation at most; 0: as in training. Set if completions may be longer than in
    training; engines reserve memory for them."""
    greedy: bool = False
    """Sample one more completion per prompt greedily, at temperature 0."""
    sets: dict[str, dict[str, Any]] = Field({})
    """Further sets of held-out prompts by name: keys of `prompts` that differ. Example:
    eval.sets.long.lengths=[8,20]."""


class PlacementConfig(Section):
    """Where the roles run, and how they are supervised."""

    kind: Literal["local", "work_pools"] = "local"
    """local: child processes of the flow on one host; work_pools: actors and trainer are Prefect deployments, each on
    its own work pool. Set work_pools for several hosts."""
    actors: int = Field(1, ge=1)
    """Number of actors, each with one engine. Raise to use more hosts or GPUs for generation."""
    gpus_per_actor: int = Field(0, ge=0)
    """GPUs that are assigned to each actor; 0: engine.tensor_parallel * engine.data_parallel. Each rank of the
    trainer gets one GPU. Without GPUs on the host, nothing is assigned (docs/gpus.md)."""
    share_gpu: bool | Literal["turns"] = False
    """One GPU for actor and trainer together. true: each has a share of its memory (engine.memory_share), and both
    compute at the same time; turns: the engine gives the memory of its keys and values back while the trainer
    computes a step, and masters and moments are in host memory meanwhile. Set on a host with one GPU."""
    gpu: str = Field("", coerce_numbers_to_str=True)
    """GPU of the hosts that run actors and trainer, for the check that the run fits: a name such as H100, A100-40GB
    or L4, or its memory in GB, such as 80; empty: the GPUs of the host that starts the run. Set with
    kind=work_pools."""
    start_seconds: float = Field(0, ge=0)
    """Seconds for the trainer to load the model and to publish the starting weights; 0: ten minutes, and half a
    minute more per GB of the model. Raise for slow disks or networks."""
    threads: int = Field(1, ge=1)
    """Compute threads of each role. Raise up to cores / (actors + 1); more threads than cores slow all roles down."""
    cores: Literal["shared", "own"] = "shared"
    """shared: the operating system schedules the roles, and engines that the schedule stops leave their threads to
    the trainer; own: trainer and actors are pinned to separate cores (Linux). Set own to measure without
    interference."""
    trainer_nodes: int = Field(1, ge=1)
    """work_pools: number of hosts for the trainer's ranks; each host is a flow run on the trainer's work pool."""
    trainer_host: str = ""
    """Address at which ranks on other hosts reach rank 0; empty: the name of rank 0's host. Set if other hosts cannot
    resolve the name."""
    hub_host: str = "127.0.0.1"
    """Address that the hub binds to. Set an address of the hub's host if actors or trainer run on other hosts."""
    hub_port: int = Field(0, ge=0, le=65535)
    """Port of the hub; 0: any free port. Set if a firewall opens a fixed port."""
    hub_tls: bool = False
    """Encrypt the channel with TLS; the hub creates its certificate and publishes the certificate in hub.json. Set if
    the hub listens beyond loopback."""
    hub_bytes: int = Field(1 << 30, ge=1 << 20)
    """Bytes of rows that the hub keeps in memory; beyond the limit, the hub reads sealed rows back from their
    segments, and rows that are not sealed wait. A waiting trainer gets one more group at a time beyond it. Lower
    on a host with little memory."""
    lease_seconds: float = Field(10.0, gt=0)
    """Seconds after which the leases of an actor that sends no requests go to another actor. Raise on slow
    networks."""
    metrics_host: str = "127.0.0.1"
    """Address at which each role serves /healthz, /readyz and /metrics, without authentication; empty: roles do not
    serve. Set an address of the host for monitoring from outside."""
    metrics_port: int = Field(0, ge=0, le=65535)
    """First port to try for /healthz, /readyz and /metrics; a role takes the next free port, which roles/*.json and
    /targets.json name; 0: any free port."""
    healthy_seconds: float = Field(300.0, gt=0)
    """Seconds without an iteration of a role's main loop after which /healthz reports the role as unhealthy. Must
    exceed the longest optimizer step."""
    max_restarts: int = Field(5, ge=0)
    """Restarts of a role in a row before the run fails; a process that runs for ten minutes (trainer: half an hour)
    resets the count. Raise on unreliable hosts."""
    max_resumes: int = Field(5, ge=0)
    """Restarts of one Prefect flow run in a row without a new commit before the flow run fails. Raise on preemptible
    hosts."""


class TrackingConfig(Section):
    """Where runs are recorded."""

    mlflow_uri: str = ""
    """MLflow tracking URI; empty: $MLFLOW_TRACKING_URI, or else a SQLite file under the root (for a root on S3,
    or if another user owns that file: ~/.local/share/pipelinerl/mlflow.db); `none`: no MLflow. A server's login
    belongs in MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD; it is split off a URI."""
    experiment: str = "pipelinerl"
    """Name of the MLflow experiment that lists the runs. Set to separate studies."""
    register_as: str = Field("", max_length=100, pattern=r"^[^/:.%\"']*$")
    """Name of a registered model in MLflow. At its end, the run copies its best evaluated version (all weights) to
    MLflow and moves the alias `champion` if the version is better than the champion. Set where MLflow has room for a
    model of each run."""
    name: str = Field("", max_length=100)
    """Name of the run: the run id begins with the name instead of the preset's. `train --name` sets it."""
    tags: tuple[str, ...] = ()
    """Labels to find runs by, in `runs --tag`, MLflow and Prefect, for example `team:alice` or `exp42`; in MLflow
    `tag.team` is the key and `alice` the value. `train --tags` sets them."""
    notes: str = Field("", max_length=5000)
    """Why the run exists; MLflow shows the notes as the description of the run. `train --notes` sets them."""
    owner: str = Field("", max_length=100)
    """Whose run this is, in `runs --owner`; empty: user@host of the process that starts the run. Set in deployments,
    whose workers run as one user."""
    alarm_query: str = Field("", max_length=5000)
    """A statement in SQL on the views of the run (`pipelinerl sql`). If it has a row, the first row is an alarm: a
    warning in the log, and with `deploy --notify` a message. It may take 5 s, and 5 % of the time."""
    wandb: bool = False
    """Log also to Weights & Biases (package wandb), in the project that `experiment` names. WANDB_API_KEY and the
    other variables of wandb apply."""
    log_format: Literal["text", "json"] = "text"
    """Format of the roles' logs. text: lines for human readers; json: one JSON object per line, with run, role, name,
    version and step. Set json for log collectors."""
    log_bytes: int = Field(64 << 20, ge=1 << 16)
    """Bytes of one role's log at most, in two files: the older half has the suffix .1. Raise to keep more history."""
    traces: Literal["none", "file", "otlp"] = "none"
    """OpenTelemetry spans from lease to optimizer step. file: JSON lines next to the logs; otlp: to the collector in
    the variables OTEL_EXPORTER_OTLP_*; none: no spans."""
    trace_share: float = Field(0.01, ge=0, le=1)
    """Share of the groups that are traced, the same groups in every role; all steps are traced. Lower if traces grow
    too large."""

    _split_login = field_validator("mlflow_uri")(take_login)

    @property
    def chosen_uri(self) -> str:
        """mlflow_uri, or else $MLFLOW_TRACKING_URI; may be empty. Without login (see `take_login`)."""
        return self.mlflow_uri or take_login(os.environ.get(MLFLOW_VARIABLE, ""))


class StoreConfig(Section):
    """The object store of a run."""

    segment_seconds: float = Field(1.0, gt=0)
    """Seconds that finished groups wait at most before an actor seals them as a segment. Raise for fewer, larger
    objects; groups then reach the trainer later."""
    segment_bytes: int = Field(16_000_000, gt=0)
    """Bytes of waiting groups at which an actor seals a segment at once. Raise for fewer, larger objects."""
    partial_log: bool = True
    """Log the tokens of unfinished groups, so that another actor can continue the groups. Unset to write less."""
    partial_seconds: float = Field(0, ge=0)
    """Seconds between two writes of the log of unfinished groups: the work that a crash of an actor can lose; 0: 1 s
    on a local disk, 5 s on object storage."""

    keep_rows: int = Field(0, ge=0)
    """Steps, newest first, whose rollouts stay in the store; 0: all. The trainer removes older rows that no start
    needs; their steps can then neither be replayed nor checked by the audit. Set for long runs."""
    trainer_logprobs: bool = False
    """Store the trainer's log-probability of every trained token beside the engine's: importance ratios by token in
    `pipelinerl sql`, `trace` and the browser of rollouts. Costs 4 bytes per token, and the rows of a step are written
    after its computation instead of during it."""

    def log_seconds(self, url: str) -> float:
        """Seconds between two writes of the log of open groups in the store at a URL; 0: no log."""
        if not self.partial_log:
            return 0.0
        return self.partial_seconds or (5.0 if url.startswith("s3:") else 1.0)


class EmulationConfig(Section):
    """Emulated accelerators: decode and optimizer steps on the CPU last at least as long as on the emulated hardware.

    For studies of schedules only; the CPU must be faster than the emulated hardware (docs/scheduling.md).
    """

    accelerators: int = Field(0, ge=0)
    """Total number of emulated accelerators; 0: no emulation. Set for studies of schedules only."""
    generators: int = Field(1, ge=1)
    """schedule.kind=pipeline: number of emulated accelerators that generate; the others train. Other schedules use
    all accelerators for both, in turn."""
    token_seconds: float = Field(4.5e-4, gt=0)
    """Seconds per sampled token on one fully used accelerator: a decode step of h sequences takes
    token_seconds * h / U(h) (see saturation)."""
    saturation: int = Field(200, ge=1)
    """Sequences that use one accelerator fully; the utilization with h sequences is U(h) = min(1, h / saturation)."""
    train_token_seconds: float = Field(2e-4, gt=0)
    """Seconds per token (prompt tokens included) of an optimizer step on one accelerator."""
