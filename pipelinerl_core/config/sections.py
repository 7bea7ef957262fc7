"""One frozen section per stage. A default lives on its field and nowhere else; the text below a field is its help."""

import os
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Field, TypeAdapter, field_validator, model_validator

from pipelinerl_core.config.dtype import Dtype
from pipelinerl_core.config.interleave import Interleave
from pipelinerl_core.config.kinds import ENGINE_TRAITS, SCHEDULE_TRAITS, EngineTraits, ScheduleTraits
from pipelinerl_core.config.losses import LossConfig, ReinforceLoss
from pipelinerl_core.config.mixture import MixturePart
from pipelinerl_core.config.mlflow_login import take_login
from pipelinerl_core.config.rules import first_problem
from pipelinerl_core.config.section import Auto, Section
from pipelinerl_core.config.training import LearnerConfig, TrainerConfig

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


class PromptsSection(Section):
    """The keys that every kind of prompts has."""

    system: str = Field("default", min_length=1)
    """System message before each prompt, with model.chat_template. default: whatever the chat template inserts by
    itself; none: no system turn, also where the chat template would insert one; any other text: the message."""


class SumsPrompts(PromptsSection):
    """Sums of one-digit numbers, "3+4+8=", of 2 to 16 summands: the quickstart's task."""

    kind: Literal["sums"] = "sums"
    """Source of the prompts. sums: one-digit sums; reasoning_gym: procedural tasks; environment: the tasks of
    environment.path itself; file: a JSON, CSV or Parquet file; huggingface: a data set of the Hugging Face hub or of
    a local directory."""
    lengths: tuple[int, ...] = Field((2, 2, 2, 2, 3, 3, 3, 3, 4, 4, 5, 5, 6, 6, 8, 20), min_length=1)
    """Numbers of summands, drawn uniformly; repeat a number to draw it more often. The long sums in the default make
    the long tail of the rollout lengths."""


class LargestNumberPrompts(PromptsSection):
    """Prompts such as "Pick the largest number: 46, 56, 59", with three numbers from 10 to 99: the task of the preset
    smollm2."""

    kind: Literal["largest_number"] = "largest_number"


class ReasoningGymPrompts(PromptsSection):
    """Procedural tasks of the reasoning-gym library, scored by its own verifiers."""

    kind: Literal["reasoning_gym"] = "reasoning_gym"
    tasks: tuple[str, ...] = Field(("chain_sum",), min_length=1)
    """Names of reasoning-gym tasks (docs/gym_tasks.md), drawn uniformly."""
    options: dict[str, dict[str, Any]] = Field({})
    """Options of tasks, by task; docs/gym_tasks.md lists them. Example: prompts.options.chain_sum.max_terms=4."""
    levels: dict[str, int] = Field({})
    """Level of difficulty of tasks, by task, from 0: the library's curriculum sets the options of the task, and
    prompts.options replaces single ones. Example: prompts.levels.chain_sum=3."""


class EnvironmentPrompts(PromptsSection):
    """The tasks of the environment itself: its methods `task` and `held_out` (environment.path)."""

    kind: Literal["environment"] = "environment"


class RowPrompts(PromptsSection):
    """The keys of prompts that are rows of a table."""

    path: str
    """kind=file: a .jsonl, .json, .csv, .tsv or .parquet file; kind=huggingface: name on the hub, a directory written
    by `save_to_disk`, or a directory of data files."""
    prompt_column: str = "prompt"
    """Column with the text shown to the model."""
    answer_column: str = "answer"
    """Column with the right answer."""
    template: str = ""
    """Text shown to the model, with columns of the row in braces, for example "{question}\\nAnswer with a number."
    Write {{ and }} for braces. Empty: the text of prompt_column."""
    held_out_share: float = Field(0, ge=0, lt=1)
    """Share of the different prompts that is held out from training, at least one prompt; not used with a held-out
    set of one's own. 0: a twentieth, but at least 16 prompts, or a fifth of fewer than 80."""


FILE_SUFFIXES = (".jsonl", ".json", ".csv", ".tsv", ".parquet")
"""Endings of the name of a file of rows."""


class FilePrompts(RowPrompts):
    """Rows of a JSON, CSV or Parquet file."""

    kind: Literal["file"] = "file"
    held_out_path: str = ""
    """kind=file: a file with held-out prompts of one's own, with the same columns; empty: held_out_share of the rows
    of `path` is held out."""


class HuggingFacePrompts(RowPrompts):
    """A data set of the Hugging Face hub by name, or a local one by path."""

    kind: Literal["huggingface"] = "huggingface"
    split: str = "train"
    """Split of the data set to train on."""
    config_name: str = ""
    """kind=huggingface: configuration of the data set, for example main of openai/gsm8k; empty: its only or default
    configuration."""
    held_out_split: str = ""
    """kind=huggingface: split with held-out prompts, for example test; empty: held_out_share of the rows of `split`
    is held out."""


PromptsConfig = Annotated[
    SumsPrompts | LargestNumberPrompts | ReasoningGymPrompts | EnvironmentPrompts | FilePrompts | HuggingFacePrompts,
    Field(discriminator="kind"),
]


_PROMPTS: TypeAdapter[PromptsConfig] = TypeAdapter(PromptsConfig)
MIN_EVAL_STEPS = 20
"""With eval.every_steps=0, runs of fewer steps are not evaluated during training."""
EVALS_PER_RUN = 10
# Estimate for Qwen2.5 in bfloat16: a token has 3 MB of activations at 1.5B and 7 MB at 7B, of an H100's 80 GB.
LONG_PACK_TOKENS = 8192


class RewardConfig(Section):
    """How completions are scored: in child processes, with hard limits."""

    kind: Literal["auto", "exact_match", "last_number", "sums", "reasoning_gym"] = "auto"
    """Verifier that scores completions. exact_match: the whole answer, or the answer in a box or after ####, equals
    the reference; last_number: the last number of the completion equals the last number of the reference; sums,
    reasoning_gym: for the prompts of these kinds; auto: the verifier of prompts.kind (exact_match for files and data
    sets)."""
    function: str = ""
    """Your own reward function instead of a verifier: FILE.py:FUNCTION, or package.module:FUNCTION (docs/rewards.md).
    The run stores a copy of the file."""
    weights: dict[str, float] = Field({})
    """reward.function: weight of each named component that the function returns; 1 for a component without an entry.
    environment.path: replaces weights of the class by name. Example: reward.weights.correct=2."""
    network: bool = False
    """reward.function may open network connections, for example to a judge. Raise reward.workers too, because each
    scoring process waits for one answer at a time."""
    environment: tuple[str, ...] = ()
    """Names of environment variables that reward.function may read, for example ["JUDGE_KEY"]; set the variables on
    every host that runs actors. Values are not stored."""
    workers: int = Field(1, ge=1)
    """Scoring processes per actor. Raise if completions wait for their rewards."""
    timeout_seconds: float = Field(5.0, gt=0)
    """Seconds that scoring one completion may take; then the scoring process is killed and the completion counts as a
    wrong answer. Raise for slow verifiers."""
    isolation: Literal["auto", "none"] = "auto"
    """auto: scoring processes drop access to files, network and other processes as far as the kernel allows
    (Landlock, seccomp); tasks whose scorers evaluate a model's text require all restrictions. none: limits of time
    and memory only; set if the host supports no isolation."""
    overlong_tokens: int = Field(0, ge=0)
    """Soft overlong penalty (DAPO): a completion in the last overlong_tokens tokens below rollouts.max_tokens loses
    up to 1 of its reward, before the advantage is computed; 0: no penalty. Set if completions grow to the limit."""


class EnvironmentConfig(Section):
    """Episodes of several turns: a class of your own plays and scores them in processes of its own
    (docs/environments.md)."""

    kind: Literal["class", "code", "command", "verifiers"] = "class"
    """What plays the episodes. class: the class of environment.path; code: the model writes Python programs, which
    run in a sandbox and are scored by tests (docs/code.md); command: an agent program per episode, which speaks chat
    completions (docs/agents.md); verifiers: an environment of the verifiers library (docs/verifiers.md)."""
    path: str = ""
    """Class that plays the episodes: FILE.py:CLASS, package.module:CLASS, or builtin:NAME. The run stores a copy of
    the file. Empty: rollouts of one turn, scored by `reward`."""
    options: dict[str, Any] = Field({})
    """Keyword arguments of the class. Example: environment.options.limit=50."""
    command: tuple[str, ...] = ()
    """kind=command: the program and its arguments, for example ["python", "agent.py", "{prompt}"]. The name of a
    column in braces becomes the column of the task's row. The task is on stdin as JSON."""
    preload: tuple[str, ...] = ()
    """kind=command: Python modules that the interpreter of the command imports once per environment process, for
    example ["openai"]; each episode then runs the command's Python file in a fork. Saves the time of the imports."""
    programs: int = Field(16, ge=1)
    """kind=command: programs that run at once, per actor. Lower if the programs use up the cores; raise if the slots
    of the engine stay empty."""
    id: str = ""
    """kind=verifiers: name of an installed taskset, or of a module in the working directory."""
    python: str = ".venv-verifiers/bin/python"
    """kind=verifiers: the interpreter that has the library and the environment installed."""
    harness: str = ""
    """kind=verifiers: a harness of the library, for example null; empty: the harness of the taskset, or one reply in
    the same process."""
    reward: Literal["answer", "stdout", "posted"] = "answer"
    """kind=command: what is scored. answer, stdout: reward.kind or reward.function scores the last answer of the
    model, or what the program has printed; posted: the program sends its reward to the endpoint."""
    workers: int = Field(1, ge=1)
    """Environment processes per actor; each plays many episodes at once on one core. Raise if the environments
    compute for longer than the model."""
    call_seconds: float = Field(30, gt=0)
    """Seconds that the environment may take between a turn of the model and its next message; then the episode ends
    with timeout_reward. Raise for slow environments."""
    episode_seconds: float = Field(600, gt=0)
    """Seconds that the environment may take during one episode, without the time of the model; then the episode ends
    with timeout_reward."""
    timeout_reward: float = Field(0.0, ge=-1e9, le=1e9)
    """Reward of an episode whose environment takes more than call_seconds or episode_seconds, so that a policy does
    not gain by making the environment hang. Such episodes also count in the rule of 20 % errors. Set below the lowest
    reward of the environment if that is negative."""
    max_turns: int = Field(32, ge=1)
    """Turns of the model per episode at most; then the episode is cut and has reward 0, unless the class handles
    BudgetSpent."""
    turn_tokens: int = Field(0, ge=0)
    """Tokens of one turn at most; 0: no limit below rollouts.max_tokens, which limits the whole episode. Set if one
    turn must not use up the tokens of the episode."""
    network: bool = False
    """The environment may open network connections and start threads. Set if it calls a service."""
    variables: tuple[str, ...] = ()
    """Names of environment variables that the environment may read, for example ["SEARCH_KEY"]; set the variables on
    every host that runs actors. Values are not stored."""
    isolation: Literal["auto", "none"] = "auto"
    """auto: environment processes drop access to files, network and other processes as far as the kernel allows
    (Landlock, seccomp). none: limits of time and memory only; set if the host supports no isolation, or if the
    environment starts programs. With kind=command or verifiers, auto separates each program from other processes, and
    none does not (docs/security.md)."""

    @model_validator(mode="before")
    @classmethod
    def _path_of_kind(cls, given: Any) -> Any:
        """Kinds other than class get a path too, because an empty path means that there is no environment."""
        kind = given.get("kind", "class") if isinstance(given, dict) else "class"
        return given if kind == "class" or given.get("path") else {**given, "path": f"builtin:{kind}"}

    @property
    def is_judged(self) -> bool:
        """reward.kind or reward.function scores the episodes; else the environment does."""
        return self.kind == "command" and self.reward != "posted"


_ENVIRONMENT: TypeAdapter[EnvironmentConfig] = TypeAdapter(EnvironmentConfig)


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


class EngineConfig(Section):
    """The engine inside each actor."""

    kind: Literal["embedded", "vllm"] = "embedded"
    """embedded: this project's engine, CPU, any transformers decoder with full attention; vllm: vLLM, GPUs or CPU."""
    concurrency: int = Field(64, ge=1)
    """Sequences that an actor generates at once (its slots). Raise for throughput; more sequences raise the lag."""
    kv: Literal["keep", "recompute", "drain"] = "keep"
    """KV cache of running sequences when new weights arrive. keep: keep the cache, shortest pause; recompute: compute
    the cache with the new weights; drain: finish the running sequences first."""
    pace: bool = True
    """embedded: slow the engine down while more than groups_per_step finished groups wait for the trainer, which
    lowers the lag at full slots. Unset to measure the engine's full speed."""
    deterministic: bool = False
    """embedded: fix all tensor shapes, so that a sequence's tokens do not depend on the other sequences in the batch.
    Set for reproducible rollouts (slower; float32 only)."""
    tensor_parallel: int = Field(1, ge=1)
    """vllm: accelerators over which one copy of the model is sharded. Raise if the model does not fit one GPU."""
    data_parallel: int = Field(1, ge=1)
    """vllm: copies of the model in one actor. Raise to use more GPUs per actor."""
    kv_gigabytes: float = Field(0, ge=0)
    """vllm: size of the KV cache in GiB; 0: what memory_share leaves on a GPU, 1 GiB on a CPU. Raise if a CPU engine
    preempts sequences."""
    memory_share: float = Field(0, ge=0, lt=1)
    """vllm: share of a GPU's memory for weights, KV cache and working memory of the engine; 0: 0.9, or 0.4 with
    placement.share_gpu. Lower if the engine runs out of memory at its start."""
    batched_tokens: int = Field(0, ge=0)
    """vllm: tokens of one engine step at most, prompts included; 0: vLLM chooses. Lower if long prompts delay running
    sequences or use up the working memory, raise for prompt throughput."""
    prefix_cache: bool = True
    """vllm: keep the KV cache of prompts for the other rollouts of a group and for later turns. Unset only to
    measure."""
    compile: Literal["auto", "always", "never"] = "auto"
    """vllm: compile the model and capture CUDA graphs, faster decoding for minutes of start time; auto: only on GPUs.
    Set never for short tests."""
    stream_interval: int = Field(16, ge=1)
    """vllm: tokens between two outputs of a sequence, which are lost if the engine core crashes. Lower to lose less,
    raise for less overhead."""

    @property
    def traits(self) -> EngineTraits:
        """Of the kind."""
        return ENGINE_TRAITS[self.kind]


class ScheduleConfig(Section):
    """When groups are leased, trained and dropped (docs/scheduling.md)."""

    kind: Literal["pipeline", "conventional", "april"] = "pipeline"
    """pipeline: generation and training run at the same time; conventional: they alternate, steps_per_phase optimizer
    steps at a time; april: they alternate, with more groups in flight than a step needs; unfinished groups continue
    after the step."""
    max_lag: int = Field(4, ge=0)
    """Largest lag of a trained token: optimizer steps between its weights and the weights being trained; 0:
    synchronous training. Raise for throughput, lower for more on-policy data."""
    stale: Literal["mask", "drop", "wait"] = "mask"
    """Tokens beyond max_lag. mask: mask the tokens out of the loss; drop: drop the whole group; wait: the trainer
    waits for groups that would become stale, at most wait_seconds per step, then masks."""
    wait_seconds: float = Field(5.0, gt=0)
    """stale=wait: seconds that one optimizer step waits at most."""
    alpha: float = Field(1.5, ge=1)
    """april: groups in flight or ready after each step, as a multiple of groups_per_step; at most max_lag + 1. Raise
    if engines run out of sequences before a step's groups are complete."""
    steps_per_phase: int = Field(1, ge=1)
    """conventional: optimizer steps per generation phase; at most max_lag + 1. Raise for fewer phases, at more
    lag."""

    @property
    def traits(self) -> ScheduleTraits:
        """Of the kind."""
        return SCHEDULE_TRAITS[self.kind]


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
    """Store every k-th version (or the next published version) in the object store; `pipelinerl replay` can compute
    the others again. Raise to write less."""
    keep: int = Field(20, ge=0)
    """Number of stored versions that stay in the object store, newest first, beside the first and the last version;
    0: all versions. Versions stored with a checkpoint do not count against the versions of durable_every. Raise to
    evaluate or export more old versions; lower for a large model."""


class CheckpointConfig(Section):
    """When the trainer writes checkpoints."""

    every_seconds: float = Field(15.0, gt=0)
    """Seconds between checkpoints of model and optimizer, which bounds the work that is repeated after a crash. The
    trainer lengthens the interval if checkpoints would take more than 5% of the time."""


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
    the embedded engine with placement.kind=local, else actors."""
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
    share_gpu: bool = False
    """One GPU for actor and trainer together, each with a share of its memory (engine.memory_share). Set on a host
    with one GPU."""
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
    segments, and rows that are not sealed wait. Lower on a host with little memory."""
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
    """MLflow tracking URI; empty: $MLFLOW_TRACKING_URI, or else a SQLite file under the root (for a root on S3:
    ~/.local/share/pipelinerl/mlflow.db); `none`: no MLflow. A server's login belongs in MLFLOW_TRACKING_USERNAME and
    MLFLOW_TRACKING_PASSWORD; it is split off a URI."""
    experiment: str = "pipelinerl"
    """Name of the MLflow experiment that lists the runs. Set to separate studies."""
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


class RunConfig(Section):
    """All settings of a run."""

    seed: int = 0
    """Seed of all random numbers: prompts, sampling, initial weights. Change to repeat an experiment
    independently."""
    model: ModelConfig = ModelConfig()
    prompts: PromptsConfig = SumsPrompts()
    reward: RewardConfig = RewardConfig()
    environment: EnvironmentConfig = EnvironmentConfig()
    mixture: dict[str, MixturePart] = Field({})
    rollouts: RolloutsConfig = RolloutsConfig()
    engine: EngineConfig = EngineConfig()
    schedule: ScheduleConfig = ScheduleConfig()
    trainer: TrainerConfig = TrainerConfig()
    learner: LearnerConfig = LearnerConfig()
    loss: LossConfig = ReinforceLoss()
    weights: WeightsConfig = WeightsConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    eval: EvalConfig = EvalConfig()
    placement: PlacementConfig = PlacementConfig()
    tracking: TrackingConfig = TrackingConfig()
    store: StoreConfig = StoreConfig()
    emulation: EmulationConfig = EmulationConfig()

    @property
    def window_groups(self) -> int:
        """Admission window W: groups that may be outstanding at once, (max_lag + 1) * groups_per_step."""
        return (self.schedule.max_lag + 1) * self.trainer.groups_per_step

    @property
    def takes_turns(self) -> bool:
        """Whether the engines pause while the trainer steps."""
        return self.schedule.traits.takes_turns

    @property
    def paces_engines(self) -> bool:
        """Whether engines slow down for the trainer."""
        return self.engine.pace and self.engine.traits.has_clock and not self.takes_turns

    @property
    def trainer_threads(self) -> int:
        """Packs that the trainer computes at once; includes the engines' threads if the engines pause meanwhile."""
        if self.trainer.threads:
            return self.trainer.threads
        hands_over = self.takes_turns and self.placement.cores == "shared"
        return self.placement.threads * (1 + self.placement.actors if hands_over else 1)

    @property
    def group_seconds(self) -> float:
        """Longest wait of the trainer for another finished group: a whole rollout at ten tokens per second, the time
        of its environment, and ten minutes."""
        sections = [part.environment for part in self.parts.values()]
        episode = max(section.episode_seconds if section.path else 0.0 for section in sections)
        return 600.0 + self.rollouts.max_tokens / 10.0 + episode

    @property
    def evaluation_seconds(self) -> float:
        """Deadline of one evaluation: half an hour, and several times the limit of the first evaluation per set."""
        group_seconds = self.for_evaluation.group_seconds
        return 1800.0 + group_seconds + 4 * self.eval.max_seconds * (len(self.parts) + len(self.eval.sets))

    @property
    def for_evaluation(self) -> "RunConfig":
        """This configuration with the sampling of an evaluation in place of the sampling of training."""
        chosen, rollouts = self.eval, self.rollouts
        update = {
            "temperature": rollouts.temperature if chosen.temperature == "auto" else chosen.temperature,
            "top_p": chosen.top_p,
            "max_tokens": chosen.max_tokens or rollouts.max_tokens,
        }
        return self.model_copy(update={"rollouts": rollouts.model_copy(update=update)})

    @property
    def longest_completion(self) -> int:
        """Tokens of a completion at most in the engine of an actor, which may evaluate too."""
        return max(self.rollouts.max_tokens, self.eval.max_tokens if self.evaluates_on_actors else 0)

    @property
    def evaluates_on_actors(self) -> bool:
        """Whether the evaluations during training use the engine of an actor."""
        if self.eval.on == "auto":
            return self.engine.traits.has_workers or self.placement.kind == "work_pools"
        return self.eval.on == "actors"

    @property
    def eval_steps(self) -> int:
        """Optimizer steps between two evaluations during training; 0: none."""
        is_off = not self.eval.num_prompts or not self.eval.subset or self.emulation.accelerators
        if is_off or (not self.eval.every_steps and self.trainer.steps < MIN_EVAL_STEPS):
            return 0
        return self.eval.every_steps or -(-self.trainer.steps // EVALS_PER_RUN)

    @property
    def parts(self) -> "Mapping[str, RunConfig]":
        """Part -> its configuration, without a mixture; {"": this configuration} without a mixture. Raises
        ValidationError for keys that a section of a part does not have."""
        return {name: self.with_part(name) for name in self.mixture} or {"": self}

    def with_part(self, name: str) -> "RunConfig":
        """The configuration of one part of the mixture, without a mixture. Raises ValidationError."""
        part, changes = self.mixture[name], dict[str, Any](mixture={})
        if part.prompts:
            own = {"kind": self.prompts.kind, "system": self.prompts.system}
            changes["prompts"] = _PROMPTS.validate_python({**own, **part.prompts})
        if part.reward:
            changes["reward"] = RewardConfig.model_validate(part.reward)
        if part.environment:
            changes["environment"] = _ENVIRONMENT.validate_python(part.environment)
        if part.max_tokens:
            changes["rollouts"] = self.rollouts.model_copy(update={"max_tokens": part.max_tokens})
        return self.model_copy(update=changes)

    def mixture_order(self) -> Interleave:
        """The part of each group of a mixture; keep the object, because it computes the order step by step."""
        return Interleave({name: part.weight for name, part in self.mixture.items()})

    def with_set(self, name: str) -> "RunConfig":
        """This configuration with the prompts of a set of eval.sets; of another kind of prompts only prompts.system
        is kept. Raises ValidationError for keys that these prompts do not have."""
        changes, own = self.eval.sets[name], self.prompts.model_dump()
        kind = changes.get("kind", own["kind"])
        if kind != own["kind"]:
            own = {"system": own["system"]}
        every_row: dict[str, Any] = {}  # another file or split is held out as a whole
        if kind == "file" and "path" in changes:
            every_row = {"held_out_path": changes["path"]}
        elif kind == "huggingface" and changes.keys() & {"path", "config_name", "split"}:
            every_row = {"held_out_split": changes.get("split", own.get("split", "train"))}
        prompts = _PROMPTS.validate_python({**own, **every_row, **changes})
        sets = {"eval": self.eval.model_copy(update={"sets": {}})}
        return self.model_copy(update={"prompts": prompts, "mixture": {}, **sets})

    @property
    def other_term(self) -> str:
        """The setting of a term of the loss that is no multiple of the advantage: such a term has a gradient also in
        rollouts of equal rewards. Empty without such a term."""
        loss = self.loss
        if not getattr(loss, "skips_zero_advantage", True):
            return "loss.skips_zero_advantage=false"
        if loss.advantage == "value":
            return "loss.advantage=value"
        if loss.teacher:
            return f"loss.teacher={loss.teacher}"
        if loss.kl_coefficient:
            return f"loss.kl_coefficient={loss.kl_coefficient:g}"
        return f"loss.entropy_bonus={loss.entropy_bonus:g}" if loss.entropy_bonus else ""

    @property
    def skips_backward(self) -> bool:
        """Whether rollouts whose advantage is 0 are computed without a backward pass."""
        return self.trainer.skip_zero_advantage and self.learner.traits.plans_packs and not self.other_term

    @property
    def stays_on_cpu(self) -> bool:
        """Whether learner and embedded engine compute on the CPU even where there is a GPU."""
        return self.model.device == "cpu" or (self.model.device == "auto" and not self.engine.traits.has_workers)

    def checkpoints_activations(self, device_type: str) -> bool:
        """Whether the learner on a device ("cpu", "cuda") recomputes activations instead of storing them."""
        chosen = self.learner.activation_checkpointing
        if chosen != "auto":
            return chosen
        longest = self.rollouts.max_prompt_tokens + self.rollouts.max_tokens
        return device_type == "cuda" and max(self.trainer.pack_tokens, longest) >= LONG_PACK_TOKENS

    @property
    def dtype(self) -> Dtype:
        """model.dtype; `build_config` has replaced auto."""
        assert self.model.dtype != "auto"
        return self.model.dtype

    @property
    def arithmetic(self) -> dict[str, str | int]:
        """Settings on which the trainer's rounding depends: with equal settings, one machine repeats steps bit by
        bit."""
        learner, trainer = self.learner, self.trainer
        is_auto = learner.attention == "auto" and self.stays_on_cpu and self.model.dtype == "float32"
        is_padded = learner.attention == "padded" or is_auto
        # Stored runs from before learner.attention were padded and have no such entry; the comparison must hold.
        attention = {} if is_padded else {"attention": learner.attention}
        return {
            "kind": learner.kind,
            "zero_stage": learner.zero_stage,
            "offload": learner.offload,
            "ranks": trainer.ranks,
            "pack_tokens": trainer.pack_tokens,
            "packing": trainer.packing,
            "device": self.model.device,
            **attention,
        }

    def phase_end(self, step: int) -> int:
        """Last step of the phase of `step` (1, 2, ...); a phase publishes only the version of its last step."""
        every = self.weights.publish_every
        if self.schedule.traits.has_phases:
            every = self.schedule.steps_per_phase
        return min(-(-step // every) * every, self.trainer.steps)

    def publishes(self, step: int) -> bool:
        """Whether the weights after a step are published."""
        return step == 0 or self.phase_end(step) == step

    def evaluates(self, step: int) -> bool:
        """Whether a published version is due for an evaluation during training: the first at or after each
        eval_steps-th, without the last."""
        return 0 < step < self.trainer.steps and self._is_first_after(step, self.eval_steps)

    def due_evaluation(self, version: int) -> int:
        """Newest version up to `version` that is due for an evaluation during training; 0: none."""
        return next((step for step in range(version, 0, -1) if self.evaluates(step)), 0)

    def keeps(self, step: int) -> bool:
        """Whether a published version is durable: the first, the last, the first at or after each durable_every-th,
        and each that an evaluator's own engine reads."""
        if step in (0, self.trainer.steps):
            return True
        is_read = self.evaluates(step) and not self.evaluates_on_actors
        return is_read or self._is_first_after(step, self.weights.durable_every)

    def _is_first_after(self, step: int, every: int) -> bool:
        """Whether `step`, above 0, is the first published version at or after a multiple of `every`; 0: never."""
        before = next(earlier for earlier in range(step - 1, -1, -1) if self.publishes(earlier))
        return every > 0 and self.publishes(step) and step // every > before // every

    @model_validator(mode="after")
    def _rules_between_sections(self) -> "RunConfig":
        problem = first_problem(self)
        if problem is not None:
            raise ValueError(problem)
        return self
