"""The interfaces between folders; docs/architecture.md follows one rollout and one weight version through them."""

from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol, runtime_checkable

from pipelinerl_core.types import (
    Chunk,
    Completion,
    EngineRequest,
    EngineStats,
    FinishReason,
    Float32Array,
    Int32Array,
    LoggedStep,
    Message,
    Played,
    Prompt,
    Reply,
    Rollout,
    Score,
    SwapReport,
    TrainingRow,
    Transcript,
    WeightManifest,
)

if TYPE_CHECKING:
    import pyarrow as pa
    import torch

    from pipelinerl_core.algo.adapters import AdapterNote
    from pipelinerl_core.messages import Answer, Group, Request
    from pipelinerl_core.training.live_state import LiveState


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class WeightUpdate:
    """Verified weights, staged in this process, ready to be copied into an engine."""

    version: int
    tensors: "Mapping[str, torch.Tensor]"
    """Parameter name of the model -> tensor of the model's shape and dtype."""
    num_bytes: int
    """Number of bytes that were fetched."""
    is_partial: bool = False
    """True: weights without a tensor keep their values. False: `tensors` contains all weights."""
    path: str | None = None
    """The safetensors file on this host that the tensors are views of; it does not change while they exist."""
    inode: int = 0
    """Of this file: another file may have its name by now."""
    group: int = 0
    """Number of the broadcast group from which the engine receives the weights (`tensors` is empty); 0: none."""
    broadcast_index: int = 0
    """Index of the broadcast within the group, from 1 on."""


class TensorMeta(NamedTuple):
    """Name, type and shape of one weight."""

    name: str
    dtype: str
    """torch's name without "torch."."""
    shape: tuple[int, ...]


class WeightLayout(NamedTuple):
    """What a learner publishes, known before the first step."""

    metas: tuple[TensorMeta, ...]
    note: "AdapterNote | None" = None
    """Of adapters; None: all weights."""


GO = "go"
"""Set by the trainer when every receiver is there: only then the members connect."""


def member_key(state: Literal["here", "joined", "failed"], rank: int) -> str:
    """The key that a receiver sets before it connects to the others, when it has, or when it could not."""
    return f"{state}/{rank}"


@dataclass(frozen=True, slots=True, kw_only=True)
class BroadcastGroup:
    """A trainer and the engine workers that receive the trainer's weights, in one collective."""

    number: int
    """Unique within a run, never 0."""
    host: str
    port: int
    """Where the members meet: a TCPStore of the trainer with the keys `member_key` and `GO`."""
    nccl_id: str
    """Base64 of NCCL's unique id; empty for a group over gloo."""
    world_size: int
    """Number of members: the trainer (rank 0) and every worker of every actor."""
    first_ranks: dict[str, int]
    """Actor -> rank of the actor's first worker."""
    deadline_seconds: float
    """Limit of every wait for other members."""
    layout: tuple[TensorMeta, ...]
    """The weights of every broadcast, in order."""

    def actor_of(self, rank: int) -> str:
        return max((first, actor) for actor, first in self.first_ranks.items() if first <= rank)[1]


class Engine(Protocol):
    """Generates sequences and records the weight version of each token. All methods run on one event loop."""

    def generate(self, request: EngineRequest) -> AsyncIterator[Chunk]:
        """Chunks of one sequence as they are sampled; the last chunk contains the whole completion.

        Raises EngineError at once for an empty prompt, max_tokens of 0, or a prompt longer than the engine's limit.
        Closing the iterator early cancels the sequence.
        """

    async def swap(self, update: WeightUpdate) -> SwapReport:
        """Sample all later tokens with the weights of `update`. After a SwapError the old weights stay in use."""

    def flush(self) -> None:
        """Send all tokens that were sampled, but not sent yet, as chunks now."""

    def stats(self) -> EngineStats:
        """Current counts and rates; cheap."""

    @property
    def weight_version(self) -> int:
        """Version that samples the next token."""

    def set_pace(self, delay_seconds: float) -> None:
        """Pause this long after each decode step; 0: full speed. Engines without this ability ignore the call."""

    def set_paused(self, is_paused: bool) -> None:
        """Pause or continue decoding. Requests keep their slot and KV cache; swaps work during a pause.

        Idempotent. A pause counts as idle in `running_seconds`.
        """

    def resting(self) -> AbstractAsyncContextManager[None]:
        """In the block the engine samples nothing, swaps wait, and the memory of keys and values is free.

        After the block the engine computes the keys and values of running sequences again, under the current weights;
        after an exception it can only be closed. A rest counts as idle in `running_seconds`.
        """

    async def close(self) -> None:
        """Stop generating and release memory; running generators end with EngineError."""


@runtime_checkable
class BroadcastReceiver(Protocol):
    """An engine that can receive weights from the trainer's memory, without a file."""

    async def join(self, group: BroadcastGroup, first_rank: int) -> None:
        """Start to join a broadcast group. Sampling continues; the first broadcast waits until the join has ended.

        After an EngineError `group` is 0.

        The engine must then receive every broadcast of the group: a swap that skips a broadcast is refused.
        """

    @property
    def group(self) -> int:
        """Number of the group joined last; 0: none. A failed or missed broadcast, or a restart, leaves the group."""

    @property
    def needs_weights(self) -> bool:
        """Whether decoding is stopped, with open sequences, until a swap to `weight_version` or newer."""


class StepClock(Protocol):
    """Decides when an engine's next decode step starts; without a clock the next step starts at once."""

    @property
    def overrun_seconds(self) -> float:
        """Total time by which decode steps exceeded the duration that the clock allows."""

    def start(self) -> None:
        """Called when decoding begins after an idle time or a pause."""

    def rest_seconds(self, num_running: int, delay_seconds: float) -> float:
        """Called after a decode step of `num_running` sequences: time until the next step, the pace included."""

    def extend(self, seconds: float) -> None:
        """Called after a swap that took `seconds`, which are not part of a decode step."""


class Rescorer(Protocol):
    """A learner's process that scores rollouts under other weights, without the other ranks."""

    def trained_weights(self, published: "Mapping[str, torch.Tensor]") -> "dict[str, torch.Tensor]":
        """The weights that training changes, by name, for `set_trained_weights`; adapters alone if there are any.

        published: the weights that were published last; tensors of the result may be shared with them.
        """

    def set_trained_weights(self, weights: "Mapping[str, torch.Tensor]") -> None:
        """Replace the values of the trained weights in place; optimizer, gradients and version stay."""

    def logprobs_of(self, rollouts: Sequence[Rollout]) -> list[Float32Array]:
        """See `Learner`."""


class Learner(Protocol):
    """Owns the trained weights and the optimizer."""

    @property
    def version(self) -> int:
        """Optimizer steps inside the weights."""

    @property
    def trainer_logprobs(self) -> list[Float32Array | None] | None:
        """[C] of each row of the newest step, in their order: `TrainingRow.trainer_logprobs`; None for a row that was
        not computed. None without store.trainer_logprobs."""

    @property
    def rescorer(self) -> Rescorer | None:
        """Scores rollouts under earlier weights; None if no process has all weights of the learner."""

    def step(self, rows: Sequence[TrainingRow]) -> dict[str, float]:
        """One optimizer step on exactly these rows, in this order; increments `version`. Returns metrics by name.

        telemetry/metrics.py declares the names; a metric without a value is left out. Raises TrainingDiverged if loss
        or gradient is not finite; the state is as before the step then.
        """

    def logprobs_of(self, rollouts: Sequence[Rollout]) -> list[Float32Array]:
        """Log-probability under the current weights of every completion token, one array per rollout."""

    def layout(self) -> WeightLayout:
        """Names, types and shapes of the weights. With several ranks, this and `weights` are for rank 0 only."""

    def weights(self, targets: "Mapping[str, torch.Tensor]") -> None:
        """Copy every weight of the layout into the tensor of its name, on the CPU."""

    def state(self) -> "LiveState":
        """The state for a checkpoint, which has to be written. It keeps its values while the learner takes further
        steps."""

    def load_state(self, files: "Iterable[Mapping[str, torch.Tensor]]", values: Mapping[str, Any]) -> None:
        """The inverse of `state`. files: the tensors of each file of the checkpoint."""

    def adopt_weights(self, files: "Iterable[Mapping[str, torch.Tensor]]") -> None:
        """Take these weights, by name, instead of the learner's own. A float32 master that rounds to its
        weight stays, and so do the moments. Raises MissingObject if the learner trains no weight of a name."""


class PromptSource(Protocol):
    """A deterministic sequence of prompts: the same index gives the same prompt, in every process."""

    name: str

    def prompt(self, index: int) -> Prompt:
        """The prompt at an index of the infinite training sequence; never a held-out prompt."""

    def held_out(self, count: int) -> list[Prompt]:
        """At most `count` prompts whose prompt_id never occurs in the training sequence; fewer if there are fewer."""


class Scorer(Protocol):
    """Scores completions in child processes with hard limits."""

    async def score(self, prompt: Prompt, text: str, completion: Completion | None = None) -> Score:
        """The reward. Raises RewardError with a one-line reason if the text cannot be scored.

        text: the decoded completion. completion: its tokens, for a user's reward function.
        """

    async def close(self) -> None:
        """End the child processes."""


class ChatCodec(Protocol):
    """Tokens of a conversation. Sampled tokens are never rendered again: each turn extends the tokens before it.

    Methods raise EnvironmentFailed, one line, if the chat template cannot write these messages as new tokens.
    """

    def first(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] = ()) -> Int32Array:
        """[P] tokens of the first messages, up to where the model's turn begins."""

    def following(
        self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]], last_token: int
    ) -> Int32Array:
        """Tokens between a turn of the model, which ended with last_token, and its next turn.

        messages: the new messages only. If the turn was cut off, its end token comes first.
        """

    def reply(self, token_ids: Int32Array, finish_reason: FinishReason) -> Reply:
        """The text of a turn; tokens_left is 0."""


class EpisodeHost(Protocol):
    """What an environment asks for during one episode; the actor's side of the episode. All on one event loop."""

    @property
    def once(self) -> Mapping[str, Any]:
        """Values that the environment has recorded, JSON values by key."""

    async def ask(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]], after: int) -> Reply | None:
        """The model's next turn after these new messages; None if the budget of tokens, turns or branches is used up.

        after: index of the turn that the messages follow; -1: they begin a history of their own. Any turn but the
        last begins a branch. Raises EnvironmentFailed or EngineError; the episode then has no result.
        """

    def record(self, key: str, value: Any) -> None:
        """Record a value that must not be computed twice."""

    def describe(self, task: Any) -> None:
        """The environment's own task, a JSON value, for readers of the rollout's row; called before the first ask."""

    def restart(self) -> None:
        """The environment plays the episode again from the start: the next ask is the first one."""


class Environments(Protocol):
    """Plays episodes of the run's environment in its processes."""

    async def check(self) -> Any:
        """Start a process and load the environment. Raises EnvironmentFailed."""

    async def play(self, task: Mapping[str, Any], seed: int, host: EpisodeHost) -> Played | Transcript:
        """Play and score one episode. Raises EnvironmentFailed with one line that names file and line if known.

        If the environment scores groups, the episode is not scored: the result is its transcript. If the process of
        the environment dies, the episode is played again from the start: `host.restart()` is called, and the host
        answers turns that it knows. Cancelling the call ends the episode.
        """

    async def score_group(self, task: Mapping[str, Any], transcripts: Sequence[Transcript]) -> list[Played]:
        """Score the episodes of a group together; one result per transcript. Raises EnvironmentFailed."""

    async def close(self) -> None:
        """End the processes."""


class ObjectStore(Protocol):
    """Objects under one prefix (a root or one run). Keys are relative, use "/", and must not contain ".."."""

    url: str

    def put(self, key: str, data: "bytes | memoryview", *, create_only: bool = False) -> None:
        """Write an object atomically. With create_only an existing key raises FileExistsError."""

    def get(self, key: str) -> bytes:
        """The whole object. Raises MissingObject if the key does not exist."""

    def exists(self, key: str) -> bool:
        """Whether the key exists now (never from a cache)."""

    def children(self) -> list[str]:
        """First parts of the keys that have several parts, sorted: the prefixes directly below this store."""

    def list(self, prefix: str) -> list[str]:
        """Keys under a prefix, sorted, at any depth (never from a cache)."""

    def sizes(self, prefix: str) -> dict[str, int]:
        """Key -> bytes of the objects that `list` names, sorted."""

    def delete(self, keys: Iterable[str]) -> None:
        """Remove objects; missing objects are ignored."""

    def unfinished(self) -> dict[str, int]:
        """Name -> bytes of what killed writers left of unfinished writes; no key, and in no listing. Safe on a live
        run."""

    def discard(self, names: Iterable[str]) -> None:
        """Remove results of `unfinished`."""

    def child(self, prefix: str) -> "ObjectStore":
        """The store below a prefix."""


class RowSlice(NamedTuple):
    """The position of a group's rows in the record batch of their write."""

    batch: "pa.RecordBatch"
    start: int
    num_rows: int

    def rows(self) -> "pa.RecordBatch":
        is_all = self.num_rows == self.batch.num_rows
        return self.batch if is_all else self.batch.slice(self.start, self.num_rows)

    def follows(self, other: "RowSlice") -> bool:
        """Whether the rows directly follow the rows of `other` in the same batch."""
        return self.batch is other.batch and self.start == other.start + other.num_rows


class HubService(Protocol):
    """Handles the requests of peers; independent of the transport."""

    def handle(
        self, peer: str, request: "Request", rows: "pa.RecordBatch | None"
    ) -> "Iterator[tuple[Answer, RowSlice | None]]":
        """Answers in order, with the rows of a group for each RowsHeader.

        May block up to the request's wait_seconds; called from one thread per peer.
        """

    def handle_groups(
        self, peer: str, groups: "Sequence[Group]", rows: "pa.RecordBatch"
    ) -> "Sequence[Answer | Exception]":
        """Handle the groups of one write with checked rows: for each group the answer or the error of `handle`."""

    def connected(self, peer: str, request_sync: Callable[[], None]) -> None:
        """Called when a peer's exchange opens; `request_sync` sends SyncNow to the peer, and has no effect
        after its end."""

    def disconnected(self, peer: str) -> None:
        """Called when a peer's exchange has ended, cleanly or not."""


class Subscriber(Protocol):
    """Reads published weights in an actor."""

    def fetch(self, manifest: WeightManifest) -> WeightUpdate:
        """Read and verify the weights. Raises MissingObject or ChecksumMismatch."""


class Tracker(Protocol):
    """Stores the metrics of a run. A failure of the tracker does not end the run."""

    @property
    def logged(self) -> LoggedStep | None:
        """Newest training step that the tracker has; None while this is not known."""

    @property
    def room(self) -> int:
        """Metrics that the buffer still takes."""

    def log(
        self, step: int, metrics: Mapping[str, float], *, at: float | None = None, weights_digest: str = ""
    ) -> None:
        """Buffer metrics of one step; never blocks on the network.

        at: Unix seconds. weights_digest: of a training step, which is then `logged`.
        """

    def start_over(self, step: int) -> None:
        """Mark what was logged as a lost timeline and begin again. step: newest step of the training run."""
