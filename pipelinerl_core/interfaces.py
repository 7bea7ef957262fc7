"""Every seam between rooms, owned by the side that uses it. The way of one rollout and one weight version:

lease   = hub sync                               # Lease with its Prompt
request = EngineRequest(tokens of the prompt)    # actor
async for chunk in engine.generate(request): ... # tokens, log-probabilities, versions
reward  = await scorer.score(prompt, text)       # a child process, with a deadline
channel.send_group(rollouts); segments.append(rollouts)
rows    = channel.reserve(step), channel.rows()  # trainer
stats   = learner.step(packs)                    # one optimizer step
manifest = publisher.publish(version, ...)       # then commit, then announce
update  = subscriber.fetch(manifest)             # actor, outside the pause
report  = await engine.swap(update)              # between two decode steps
"""

from collections.abc import AsyncIterator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, runtime_checkable

from pipelinerl_core.types import (
    Chunk,
    Completion,
    EngineRequest,
    EngineStats,
    Float32Array,
    Prompt,
    Rollout,
    Score,
    SwapReport,
    TrainingRow,
    WeightManifest,
)

if TYPE_CHECKING:
    import pyarrow as pa
    import torch

    from pipelinerl_core.messages import Answer, Group, Request


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class WeightUpdate:
    """Verified weights, staged in this process, ready to be copied into an engine."""

    version: int
    tensors: "Mapping[str, torch.Tensor]"
    """Parameter name of the model -> tensor of the model's shape and dtype."""
    num_bytes: int
    """What was fetched."""
    is_partial: bool = False
    """Weights that are not among the tensors stay as they are; else all are there."""
    path: str | None = None
    """The safetensors file on this host that the tensors were read from; it may vanish, it never changes."""
    group: int = 0
    """Broadcast group that the engine receives the tensors from, which are then empty here; 0: none."""
    broadcast_index: int = 0
    """Which of the group's broadcasts holds them, from 1 on."""


class TensorMeta(NamedTuple):
    """One weight on its way."""

    name: str
    dtype: str
    """As torch calls it, without "torch."."""
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class BroadcastGroup:
    """A trainer and the engine workers that receive weights from it, in one collective."""

    number: int
    """Unique within a run, never 0."""
    ticket: str
    """What a member needs to meet the others: gloo:<host>:<port>, or nccl:<base64 of the unique id>."""
    world_size: int
    """Members: the trainer, rank 0, and every worker of every actor."""
    first_ranks: dict[str, int]
    """Actor -> rank of the first of its workers."""
    deadline_seconds: float
    """Of every wait for the others."""
    layout: tuple[TensorMeta, ...]
    """What every broadcast holds, in its order."""


class Engine(Protocol):
    """Generates sequences; the only one that stamps weight versions. All methods run on one event loop."""

    def generate(self, request: EngineRequest) -> AsyncIterator[Chunk]:
        """Chunks of one sequence as they are sampled; the last one carries the whole completion.

        Raises EngineError at once for an empty prompt, an empty budget, or a prompt longer than the engine's limit.
        Closing the iterator early gives up the sequence.
        """
        ...

    async def swap(self, update: WeightUpdate) -> SwapReport:
        """Make `update` the weights of every token sampled from now on. Raises SwapError and keeps the old ones."""
        ...

    async def abort(self, request_ids: Iterable[str]) -> dict[str, Completion]:
        """Take sequences back: what each has sampled, finish_reason ABORT. Unknown ids are left out.

        The generators of these requests end with a chunk that carries the same completion.
        """
        ...

    def flush(self) -> None:
        """Send what has been sampled as chunks now, whatever the engine's own rhythm is."""
        ...

    def stats(self) -> EngineStats:
        """A glance at the engine, cheap."""
        ...

    @property
    def weight_version(self) -> int:
        """Version that samples the next token."""
        ...

    def set_pace(self, delay_seconds: float) -> None:
        """Pause this long after each decode step; 0 is full speed. An engine that cannot pace itself ignores it."""
        ...

    def set_paused(self, is_paused: bool) -> None:
        """Stand still, or go on. Requests keep their place and their KV cache; swaps and aborts go on as ever.

        Level-triggered: the same word twice changes nothing. A pause counts as idle in `running_seconds`.
        """
        ...

    async def close(self) -> None:
        """Stop generating and release memory; running generators end with EngineError."""
        ...


@runtime_checkable
class BroadcastReceiver(Protocol):
    """An engine that can receive weights from the trainer's memory, without a file between them."""

    async def join(self, group: BroadcastGroup, first_rank: int) -> None:
        """Meet the other members; returns when all are there. Raises EngineError, and is in no group then.

        It must take every broadcast of the group from then on: a swap to a later one than the next is refused.
        """
        ...

    @property
    def group(self) -> int:
        """Number of the group it is in, 0 for none: a broadcast failed or missed, or a restart, leaves a group."""
        ...

    @property
    def needs_weights(self) -> bool:
        """Whether it stands still, with its sequences, until a swap brings weights of `weight_version` or newer."""
        ...


class StepClock(Protocol):
    """Says when an engine's next decode step is due; an engine without a clock goes on at once."""

    @property
    def overrun_seconds(self) -> float:
        """Time by which decode steps took longer than the clock gave them, since the start."""
        ...

    def start(self) -> None:
        """Decoding begins after the engine had nothing to do or was paused."""
        ...

    def rest_seconds(self, num_running: int, delay_seconds: float) -> float:
        """Called after a decode step of `num_running` sequences: time until the next step, the pace included."""
        ...

    def extend(self, seconds: float) -> None:
        """The engine stood still for this long, for a swap: no part of a decode step."""
        ...


class Learner(Protocol):
    """Owns the trained weights and the optimizer."""

    version: int
    """Optimizer steps inside the weights."""

    def step(self, rows: Sequence[TrainingRow]) -> dict[str, float]:
        """One optimizer step on exactly these rows, in this order; version grows by one. Returns metrics by name.

        The names are those of telemetry/metrics.py; what has no value is left out.
        """
        ...

    def logprobs_of(self, rollouts: Sequence[Rollout]) -> list[Float32Array]:
        """trainer_logprobs of every completion token of each rollout, under the current weights."""
        ...

    def weights(self) -> "dict[str, torch.Tensor]":
        """A snapshot (own memory, CPU) of the weights by parameter name."""
        ...

    def state(self) -> "tuple[dict[str, torch.Tensor], dict[str, Any]]":
        """Snapshot of everything a checkpoint needs: tensors, and JSON values."""
        ...

    def load_state(self, tensors: "Mapping[str, torch.Tensor]", values: Mapping[str, Any]) -> None:
        """The inverse of `state`."""
        ...


class PromptSource(Protocol):
    """A deterministic sequence of prompts: the same index gives the same prompt, in every process."""

    name: str

    def prompt(self, index: int) -> Prompt:
        """The prompt at a position of the endless training sequence; never a held-out one."""
        ...

    def held_out(self, count: int) -> list[Prompt]:
        """`count` prompts whose prompt_id never occurs in the training sequence."""
        ...


class Scorer(Protocol):
    """Scores completions in child processes with hard limits."""

    async def score(self, prompt: Prompt, text: str, completion: Completion | None = None) -> Score:
        """The reward. Raises RewardError with one line that says why there is none.

        text: the decoded completion. completion: its tokens, for a user's reward function.
        """
        ...

    async def close(self) -> None:
        """End the child processes."""
        ...


class ObjectStore(Protocol):
    """Objects under one prefix (a root or one run). Keys are relative, use "/", are checked against traversal."""

    url: str

    def put(self, key: str, data: "bytes | memoryview", *, create_only: bool = False) -> None:
        """Write an object whole. With create_only an existing key raises FileExistsError."""
        ...

    def get(self, key: str) -> bytes:
        """The whole object; MissingObject if there is none."""
        ...

    def exists(self, key: str) -> bool:
        """Whether the key is there now (never from a cache)."""
        ...

    def list(self, prefix: str) -> list[str]:
        """Keys under a prefix, sorted, at any depth (never from a cache)."""
        ...

    def delete(self, keys: Iterable[str]) -> None:
        """Remove objects; missing ones are no error."""
        ...

    def child(self, prefix: str) -> "ObjectStore":
        """The store below a prefix."""
        ...


class HubService(Protocol):
    """What the hub does with a request; the Flight server knows nothing of ledgers."""

    def handle(
        self, peer: str, request: "Request", rows: "pa.RecordBatch | None"
    ) -> "Iterator[tuple[Answer, pa.RecordBatch | None]]":
        """Answers in order. May block up to the wait the request names; called from one thread per peer."""
        ...

    def handle_groups(
        self, peer: str, groups: "Sequence[Group]", rows: "pa.RecordBatch"
    ) -> "Sequence[Answer | Exception]":
        """Several groups of one write, whose rows are checked: what `handle` would yield for each, or raise."""
        ...

    def connected(self, peer: str, credit_sink: "CreditSink") -> None:
        """A peer's exchange has opened; `credit_sink` returns credit to it."""
        ...

    def disconnected(self, peer: str) -> None:
        """A peer's exchange is gone, cleanly or not."""
        ...


class CreditSink(Protocol):
    """Returns credit to one actor; calling it for a peer that is gone does nothing."""

    def __call__(self, num_groups: int) -> None:
        """Give back `num_groups`; 0 only tells the actor to sync now."""
        ...


class Publisher(Protocol):
    """Trainer side of the weights."""

    def publish(self, version: int, tensors: "Mapping[str, torch.Tensor]", *, durable: bool) -> WeightManifest:
        """Write the data, then the manifest; returns when both can be read."""
        ...


class Subscriber(Protocol):
    """Actor side of the weights."""

    def fetch(self, manifest: WeightManifest) -> WeightUpdate:
        """Read and verify; raises MissingObject or ChecksumMismatch, touches no engine."""
        ...


class Tracker(Protocol):
    """Where metrics of a run go. Losing it never kills a run."""

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Buffer metrics of one step; never blocks on the network."""
        ...

    def close(self) -> None:
        """Flush and stop."""
        ...
