"""One frozen section per stage. A default lives on its field and nowhere else; the text below a field is its help."""

import os
from typing import Annotated, Literal

from pydantic import Field, model_validator

from pipelinerl_core.config.losses import LossConfig, ReinforceLoss
from pipelinerl_core.config.rules import first_problem
from pipelinerl_core.config.section import Section
from pipelinerl_core.config.training import LearnerConfig, TrainerConfig

MLFLOW_VARIABLE = "MLFLOW_TRACKING_URI"


class ModelConfig(Section):
    """The model that learns."""

    path: str = "builtin:sums"
    """Directory of a Hugging Face model and tokenizer, or builtin:sums (built by `pipelinerl prepare`);
    builtin:sums?seed=1 is the same with other initial weights."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Type of the weights in engine and trainer; the head is computed in float32 on both sides."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where the learner and the embedded engine compute; auto: on a GPU if engine.kind=vllm and there is one. vLLM
    itself takes what it was built for."""
    chat_template: bool = False
    """Wrap each prompt as a user message with the tokenizer's chat template."""


class SumsPrompts(Section):
    """Sums of one-digit numbers, "3+4+8=", of 2 to 16 summands: the quickstart's task."""

    kind: Literal["sums"] = "sums"
    lengths: tuple[int, ...] = Field((2, 2, 2, 2, 3, 3, 3, 3, 4, 4, 5, 5, 6, 6, 8, 20), min_length=1)
    """Numbers of summands, drawn uniformly; repeat one to make it likelier. The rare long ones are the tail."""


class ReasoningGymPrompts(Section):
    """Procedural tasks of the reasoning-gym library, scored by its own verifiers."""

    kind: Literal["reasoning_gym"] = "reasoning_gym"
    tasks: tuple[str, ...] = Field(("chain_sum",), min_length=1)
    """Task names, see `reasoning_gym.factory`; drawn uniformly."""


class FilePrompts(Section):
    """Rows of a JSON-lines or Parquet file."""

    kind: Literal["file"] = "file"
    path: str
    """A .jsonl or .parquet file."""
    prompt_column: str = "prompt"
    """Column with the text shown to the model."""
    answer_column: str = "answer"
    """Column with the right answer."""


class HuggingFacePrompts(Section):
    """A data set of the Hugging Face hub by name, or a local one by path."""

    kind: Literal["huggingface"] = "huggingface"
    path: str
    """Name on the hub, or a directory written by `save_to_disk`, or a directory of data files."""
    split: str = "train"
    """Split to read."""
    prompt_column: str = "prompt"
    """Column with the text shown to the model."""
    answer_column: str = "answer"
    """Column with the right answer."""


PromptsConfig = Annotated[
    SumsPrompts | ReasoningGymPrompts | FilePrompts | HuggingFacePrompts, Field(discriminator="kind")
]


class RewardConfig(Section):
    """How completions are scored: in child processes, with hard limits."""

    kind: Literal["auto", "exact_match", "sums", "reasoning_gym"] = "auto"
    """Verifier; auto takes the one that belongs to the prompts (exact_match for files and data sets)."""
    workers: int = Field(1, ge=1)
    """Child processes per actor."""
    timeout_seconds: float = Field(5.0, gt=0)
    """Limit of one scoring; beyond it the process is killed, and the completion counts as a wrong answer."""
    isolation: Literal["auto", "none"] = "auto"
    """auto: scoring processes give up files, network and other processes, as far as the host can (Landlock, seccomp);
    tasks whose scorers evaluate what a model writes need all of it. none: limits of time and memory alone."""
    overlong_tokens: int = Field(0, ge=0)
    """Soft overlong penalty: a completion that comes within so many tokens of rollouts.max_tokens loses up to 1 of
    its reward, before the advantage is computed; 0: none."""


class RolloutsConfig(Section):
    """What is sampled."""

    group_size: int = Field(8, ge=2)
    """Rollouts of one prompt; the others are the baseline of each."""
    max_tokens: int = Field(64, ge=1)
    """Limit of a completion."""
    max_prompt_tokens: int = Field(256, ge=1)
    """Longest prompt an engine makes room for; a longer one is a rollout with outcome error."""
    temperature: float = Field(1.0, gt=0)
    """Sampling temperature; the trainer divides its logits by the same."""
    top_p: float = Field(1.0, gt=0, le=1)
    """Nucleus; must stay 1 for training, because truncation breaks the importance ratio."""
    filter_zero_variance: bool = False
    """Leave out groups whose rewards are all equal (they carry no gradient) and refill their places."""


class EngineConfig(Section):
    """The engine inside each actor."""

    kind: Literal["embedded", "vllm"] = "embedded"
    """embedded: ours, CPU, any decoder of transformers with full attention; vllm: vLLM, on GPUs or a CPU."""
    concurrency: int = Field(64, ge=1)
    """Sequences in flight per actor at all times."""
    kv: Literal["keep", "recompute", "drain"] = "keep"
    """KV cache of running sequences at a swap: keep it, recompute it under the new weights, or finish them first."""
    pace: bool = True
    """embedded: slow down while more than a step's worth of groups waits for the trainer: full slots, less lag."""
    deterministic: bool = False
    """Fix every tensor shape so that tokens do not depend on what else is in the batch (slower; float32 only)."""
    tensor_parallel: int = Field(1, ge=1)
    """vllm: accelerators that share one copy of the model."""
    data_parallel: int = Field(1, ge=1)
    """vllm: copies of the model behind one actor."""
    kv_gigabytes: float = Field(0, ge=0)
    """vllm: memory of the KV cache in GiB; 0: what vLLM finds free on a GPU, 1 on a CPU."""
    compile: Literal["auto", "always", "never"] = "auto"
    """vllm: compile the model and capture CUDA graphs, which takes minutes at the start; auto: not on a CPU."""
    stream_interval: int = Field(16, ge=1)
    """vllm: tokens of a sequence between two of its outputs: what a crash of the engine core can cost it."""


class ScheduleConfig(Section):
    """When groups are leased, trained and given up (docs/scheduling.md)."""

    kind: Literal["pipeline", "conventional", "april"] = "pipeline"
    """pipeline: generation and training never wait for each other; conventional: they take turns, steps_per_phase
    steps at a time; april: they take turns, more groups are in flight than a step needs, and the rest goes on."""
    max_lag: int = Field(4, ge=0)
    """Oldest token that is trained, in optimizer steps; 0 is synchronous training."""
    stale: Literal["mask", "drop", "wait"] = "mask"
    """Tokens beyond max_lag: mask them out of the loss, drop their whole group, or let the trainer wait for groups
    that would grow stale (for wait_seconds at most, then mask)."""
    wait_seconds: float = Field(5.0, gt=0)
    """stale=wait: how long one step waits at most."""
    alpha: float = Field(1.5, ge=1)
    """april: groups in flight or ready after each step, as a multiple of groups_per_step; at most max_lag + 1."""
    steps_per_phase: int = Field(1, ge=1)
    """conventional: optimizer steps per phase of generation; at most max_lag + 1."""


class WeightsConfig(Section):
    """How weight versions reach the actors."""

    transport: Literal["shm", "object_store", "nccl"] = "shm"
    """shm: shared memory of one host; object_store: through the run's store, any number of hosts; nccl: from the
    trainer's memory to the workers of vLLM in one broadcast (over gloo where there is no GPU)."""
    broadcast_seconds: float = Field(60.0, gt=0)
    """nccl: longest wait for the members of a broadcast; beyond it the version goes through the store."""
    broadcast_host: str = ""
    """nccl: address at which actors reach the trainer; empty: loopback, or the host's name with work pools."""
    content: Literal["merged", "adapters"] = "merged"
    """What a version holds with learner.lora_rank: merged: all weights of the model; adapters: those alone, which
    whoever takes the version merges into the model in model.path, the same on every host."""
    publish_every: int = Field(1, ge=1)
    """Publish every k-th version; versions keep their step numbers."""
    durable_every: int = Field(1, ge=1)
    """Keep every k-th version in the object store too, or the next one published; replay rebuilds the others."""


class CheckpointConfig(Section):
    """How much is trained again after a crash."""

    every_seconds: float = Field(15.0, gt=0)
    """Time between checkpoints of model and optimizer, which bounds what is trained again after a crash; longer where
    more than a twentieth of it would go into making them."""


class EvalConfig(Section):
    """Held-out accuracy: mean reward of one sample per prompt at temperature 1."""

    num_prompts: int = Field(1000, ge=0)
    """Held-out prompts; 0 switches evaluation off."""


class PlacementConfig(Section):
    """Where the roles run."""

    kind: Literal["local", "work_pools"] = "local"
    """local: children of the flow on this host; work_pools: actor and trainer are deployments on their own pools."""
    actors: int = Field(1, ge=1)
    """Number of actors."""
    threads: int = Field(1, ge=1)
    """Compute threads of each role; more than its share of the cores slows every role down."""
    cores: Literal["shared", "own"] = "shared"
    """shared: the system places the roles, and engines that stand still hand their threads to the trainer; own:
    trainer and actors keep to cores of their own, as on accelerators of their own (Linux)."""
    trainer_nodes: int = Field(1, ge=1)
    """work_pools: hosts among which the trainer's ranks are shared out, each a flow run on the pool of trainers."""
    trainer_host: str = ""
    """Address at which ranks on other hosts reach rank 0; empty: the name of its host."""
    hub_host: str = "127.0.0.1"
    """Address the hub binds to; loopback unless actors live on other hosts."""
    hub_port: int = Field(0, ge=0, le=65535)
    """Port of the hub, 0 for any free one."""
    hub_tls: bool = False
    """Encrypt the channel; the hub makes its certificate itself, and the roles find it in hub.json."""
    hub_bytes: int = Field(1 << 30, ge=1 << 20)
    """Rows that the hub keeps in memory; beyond it sealed ones are read back from their segments, others wait."""
    lease_seconds: float = Field(10.0, gt=0)
    """Time after which the leases of a silent actor go to another."""
    metrics_host: str = "127.0.0.1"
    """Address at which each role serves /healthz, /readyz and /metrics, without a password; empty: it does not."""
    metrics_port: int = Field(0, ge=0, le=65535)
    """Port of that: the first free one from here on, 0 for any; roles/*.json and /targets.json say which."""
    healthy_seconds: float = Field(300.0, gt=0)
    """A role whose main loop has not turned for so long is unhealthy; longer than the longest optimizer step."""
    max_restarts: int = Field(5, ge=0)
    """Restarts of each role in a row before the run fails; a life of ten minutes (trainer: half an hour) starts the
    count again."""
    max_resumes: int = Field(5, ge=0)
    """Times in a row that one Prefect flow run may be started again without a new commit, before it fails."""


class TrackingConfig(Section):
    """Where runs are recorded."""

    mlflow_uri: str = ""
    """MLflow tracking URI; empty means $MLFLOW_TRACKING_URI, or else a SQLite file under the root; `none` switches
    MLflow off."""
    experiment: str = "pipelinerl"
    """MLflow experiment."""
    log_format: Literal["text", "json"] = "text"
    """Lines of the roles' logs: text for people, or one JSON object each, with run, role, name, version and step."""
    log_bytes: int = Field(64 << 20, ge=1 << 16)
    """Largest size of the log of one role; its older half is in a file .1 beside it."""
    traces: Literal["none", "file", "otlp"] = "none"
    """OpenTelemetry spans from lease to optimizer step: file: JSON lines beside the logs; otlp: to the collector that
    the variables OTEL_EXPORTER_OTLP_* name."""
    trace_share: float = Field(0.01, ge=0, le=1)
    """Share of the groups that is traced, the same ones in every role; steps are traced all."""

    @property
    def chosen_uri(self) -> str:
        """mlflow_uri, or what the environment says; may be empty."""
        return self.mlflow_uri or os.environ.get(MLFLOW_VARIABLE, "")


class StoreConfig(Section):
    """The object store of a run."""

    segment_seconds: float = Field(1.0, gt=0)
    """Longest time finished groups wait before they are sealed as a segment."""
    segment_bytes: int = Field(16_000_000, gt=0)
    """Size at which waiting groups are sealed at once."""
    partial_log: bool = True
    """Log the tokens of unfinished groups, so that another actor can take them over."""
    partial_seconds: float = Field(0, ge=0)
    """Time between two writes of that log: what a dead actor can cost; 0: 1 on a local disk, 5 on object storage."""

    def log_seconds(self, url: str) -> float:
        """Time between two writes of the log of open groups in the store at a URL; 0: there is none."""
        if not self.partial_log:
            return 0.0
        return self.partial_seconds or (5.0 if url.startswith("s3:") else 1.0)


class EmulationConfig(Section):
    """Accelerators that are not there: a decode step and an optimizer step last at least as long as theirs would.

    For studies of schedules only; real work on the CPU must be faster than what it emulates (docs/scheduling.md).
    """

    accelerators: int = Field(0, ge=0)
    """Emulated accelerators in all; 0 switches emulation off."""
    generators: int = Field(1, ge=1)
    """schedule.kind=pipeline: those that generate, the others train; other schedules use all for both, in turn."""
    token_seconds: float = Field(4.5e-4, gt=0)
    """Time of one sampled token on one fully used accelerator: a decode step of h sequences takes this * h / U(h)."""
    saturation: int = Field(200, ge=1)
    """Sequences on one accelerator from which it is fully used: U(h) = min(1, h / saturation)."""
    train_token_seconds: float = Field(2e-4, gt=0)
    """Time of one token, prompt tokens included, in an optimizer step on one accelerator."""


class RunConfig(Section):
    """Everything that defines a run."""

    seed: int = 0
    """Seed of prompts, sampling and everything else that draws numbers."""
    model: ModelConfig = ModelConfig()
    prompts: PromptsConfig = SumsPrompts()
    reward: RewardConfig = RewardConfig()
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
        """Whether engines stand still while the trainer steps."""
        return self.schedule.kind != "pipeline"

    @property
    def paces_engines(self) -> bool:
        """Whether engines slow down for the trainer; vLLM cannot."""
        return self.engine.pace and self.engine.kind == "embedded" and not self.takes_turns

    @property
    def trainer_threads(self) -> int:
        """Packs that the trainer computes at once; with the engines' threads where these stand still meanwhile."""
        if self.trainer.threads:
            return self.trainer.threads
        hands_over = self.takes_turns and self.placement.cores == "shared"
        return self.placement.threads * (1 + self.placement.actors if hands_over else 1)

    @property
    def stays_on_cpu(self) -> bool:
        """Whether learner and embedded engine compute on the CPU even where there is a GPU."""
        return self.model.device == "cpu" or (self.model.device == "auto" and self.engine.kind == "embedded")

    @property
    def arithmetic(self) -> dict[str, str | int]:
        """What the trainer's rounding depends on, beside its machine: equal ones train again to the last bit."""
        learner, trainer = self.learner, self.trainer
        is_padded = learner.attention == "padded" or (learner.attention == "auto" and self.stays_on_cpu)
        # Old runs, which were padded, do not say so, and are to train again to the last bit.
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
        """Last step of the phase of `step` (1, 2, ...): actors hear of the version that it makes, and of no other."""
        every = self.weights.publish_every
        if self.schedule.kind == "conventional":
            every = self.schedule.steps_per_phase
        return min(-(-step // every) * every, self.trainer.steps)

    def publishes(self, step: int) -> bool:
        """Whether the weights after a step are published."""
        return step == 0 or self.phase_end(step) == step

    def keeps(self, step: int) -> bool:
        """Whether a published version is durable: the last, and the first at or after each durable_every-th."""
        if step in (0, self.trainer.steps):
            return True
        before = next(earlier for earlier in range(step - 1, -1, -1) if self.publishes(earlier))
        every = self.weights.durable_every
        return step // every > before // every

    @model_validator(mode="after")
    def _rules_between_sections(self) -> "RunConfig":
        problem = first_problem(self)
        if problem is not None:
            raise ValueError(problem)
        return self
