"""The hub protocol (docs/protocol.md): JSON messages of the Flight exchange, one class per kind.

Every message is idempotent: a client repeats a message until it is answered, and a repeat changes nothing. Rows are
sent as Arrow record batches with the messages that name them. The `re` of an answer is the `id` of its request.
"""

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter

from pipelinerl_core.ranges import Attempt, Count, Finite, Number, Seconds, Step, StepOrNone, Total
from pipelinerl_core.types import GroupRef, LengthTotals, PreviousHolder, Prompt, WeightManifest


class Frozen(BaseModel):
    """A value of messages and of commits. NaN is refused: commits with NaN could not be read back."""

    model_config = ConfigDict(frozen=True, allow_inf_nan=False)


class Message(Frozen):
    """JSON only, without extra fields."""

    model_config = ConfigDict(extra="forbid")


# Names become parts of object keys and log lines; ranges.py bounds the numbers.
Name = Annotated[str, Field(pattern=r"^[^\p{C}/\\.][^\p{C}/\\]*$", max_length=100)]
LeaseId = Annotated[str, Field(pattern=r"^[!-~]+$", max_length=200)]


class Introduction(Message):
    """Role and name of a peer: the command of the descriptor that opens its exchange."""

    role: Literal["actor", "trainer"]
    name: Name

    def __str__(self) -> str:
        """The form of log lines: "<role>/<name>"."""
        return f"{self.role}/{self.name}"


class Lease(Message):
    """The right and duty of one actor to produce one attempt of one group."""

    group_id: Count
    attempt: Attempt
    lease_id: str
    deadline_seconds: Seconds
    """Unix seconds at which it expires unless renewed by a sync."""
    group_size: Count
    prompt: Prompt
    holders: tuple[PreviousHolder, ...] = ()
    """Previous holders of the group, newest first; their logs may hold tokens to continue from."""


class LeaseRef(Message):
    """Names one lease that an actor holds."""

    group_id: Count
    attempt: Attempt
    lease_id: LeaseId


class FateRecord(Message):
    """A group that left the ledger without being trained, or its training in a commit."""

    group_id: Count
    attempt: Attempt
    fate: Literal["trained", "filtered", "dropped_stale", "failed", "quarantined"]
    num_tokens: Count


class Counters(Frozen):
    """Counters of an actor epoch since its start, or values at the time of the message (now)."""

    cpu_seconds: Number = 0.0
    rss_bytes: Number = 0
    """Now."""
    reward_errors: Count = 0
    unsent_groups: Count = 0
    """Now."""
    step_delay_seconds: Number = 0.0
    """Pause after each decode step, now."""
    paced_seconds: Number = 0.0
    """Sum of these pauses over the running sequences."""
    emulation_overrun_seconds: Number = 0.0
    unreadable_version: StepOrNone = -1
    """Weight version that the actor could not read, now; -1 for none."""
    broadcast_group: Count = 0
    """Number of the broadcast group that the actor has joined; 0 for none."""
    environment_given_tokens: Count | None = None
    """Of episodes: tokens that were not sampled; None without an environment."""
    environment_replayed_tokens: Count | None = None
    """Of episodes: sampled tokens of earlier plays that were used again."""
    environment_dropped_tokens: Count | None = None
    """Of episodes: tokens of earlier plays that were dropped."""
    settled_tokens: Count = 0
    """Set by the hub at a reservation: decided tokens of the actor epoch."""
    refused_tokens: Count = 0
    """Set by the hub at a reservation: tokens of its attempts that other attempts supersede."""
    swap_version: StepOrNone = -1
    """Set by the hub at a reservation: newest version whose swap was reported."""


class SwapRecord(Frozen):
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
    """Tokens that the actor epoch had sampled at the time of the swap."""


class ActorSample(Frozen):
    """State of an actor at its newest sync before a step was reserved."""

    at: Seconds
    engine_version: StepOrNone
    running: Count
    waiting: Count
    concurrency: Count
    num_tokens: Count
    """Sampled, or given by environments."""
    running_seconds: Number
    counters: Counters = Counters()

    @property
    def num_sampled(self) -> int:
        """Tokens that the engine has sampled."""
        return self.num_tokens - (self.counters.environment_given_tokens or 0)


class Register(Message):
    """First message of every peer, and again whenever the hub answers with an unknown boot_id."""

    kind: Literal["register"] = "register"
    id: Count = 0
    role: Literal["actor", "trainer"]
    name: Name
    epoch: Count
    tokens: dict[Name, Annotated[str, Field(max_length=64)]] = Field(default_factory=dict, max_length=10)
    """Digests of what makes a text the input of the model; the hub refuses an actor that differs from the trainer."""
    leases: tuple[LeaseRef, ...] = ()
    """Leases an actor still works on."""
    step: Step | None = None
    """Trainer: the step whose reservation it holds."""
    reservation: tuple[GroupRef, ...] = ()
    """Trainer: the groups of that reservation."""
    quarantined: tuple[GroupRef, ...] = ()
    """Trainer: groups that it has quarantined at that step."""
    fates: tuple[FateRecord, ...] = ()
    """Trainer: the fates in the answer to that reservation, which its commit records."""
    committed_step: StepOrNone = -1
    """Trainer: its newest commit."""
    manifest: WeightManifest | None = None
    """Trainer: the weights of that commit, announced if they were not announced before."""


class Sync(Message):
    """An actor's heartbeat: renews leases, requests groups, and receives new versions with the answer."""

    kind: Literal["sync"] = "sync"
    id: Count = 0
    boot_id: str
    engine_version: StepOrNone
    running: Count
    waiting: Count
    concurrency: Count
    want: Count
    """Groups it could start now."""
    leases: tuple[LeaseId, ...]
    """lease_id of every unfinished lease of the actor; the hub sends missing leases again."""
    num_tokens: Count
    """Tokens sampled since this actor epoch began."""
    running_seconds: Number
    """Integral of `running` since this actor epoch began, sequence-seconds."""
    swaps: tuple[SwapRecord, ...] = ()
    """Swaps not yet acknowledged by the hub."""
    counters: Counters = Counters()


class Group(Message):
    """A finished group; its rows are the record batch of the same write."""

    kind: Literal["group"] = "group"
    id: Count = 0
    lease_id: LeaseId
    ref: GroupRef
    seq: Count | None = None
    """Segment that holds the rows, when they are sealed already."""


class Groups(Message):
    """Several finished groups; the record batch of the same write holds their rows, group after group."""

    kind: Literal["groups"] = "groups"
    id: Count = 0
    groups: tuple[Group, ...] = Field(min_length=1)


class Sealed(Message):
    """Rows are durable in rollouts/<actor>/<epoch>/<seq>.arrow: the hub may drop them from memory."""

    kind: Literal["sealed"] = "sealed"
    id: Count = 0
    actor: Name
    epoch: Count
    seq: Count
    groups: tuple[tuple[Count, Attempt], ...]
    """(group_id, attempt) of each group in the segment."""


class Reserve(Message):
    """Trainer rank 0 requests the groups of a step; the answer has the groups, or is_ready=False."""

    kind: Literal["reserve"] = "reserve"
    id: Count = 0
    step: Step
    epoch: Count
    wait_seconds: Seconds = 0.5
    lost: tuple[tuple[Count, Attempt], ...] = ()
    """(group_id, attempt) of reserved groups whose rows cannot be read; these groups are generated again."""
    quarantined: tuple[GroupRef, ...] = ()
    """All groups that the trainer has quarantined at this step: the hub decides them and reserves others."""
    with_rows: bool = False
    """Whether the rows in the hub's memory follow the answer, in the form of answers to `rows`."""
    expelled: tuple[tuple[Name, Count], ...] = ()
    """(actor, epoch) of all actors that must end, because they sample from other weights than their tokens name."""


class Rows(Message):
    """A trainer rank requests the rows of reserved groups."""

    kind: Literal["rows"] = "rows"
    id: Count = 0
    step: Step
    groups: tuple[tuple[Count, Attempt], ...]


class Committed(Message):
    """A step is committed: the hub announces the version and removes the groups."""

    kind: Literal["committed"] = "committed"
    id: Count = 0
    step: Step
    epoch: Count
    manifest: WeightManifest | None
    """None if this version was not published (weights.publish_every > 1)."""
    fates: tuple[FateRecord, ...] = ()
    """All fates that the commit records: of trained groups, and pending fates of the hub."""
    metrics: dict[str, Finite] = Field(default_factory=dict)
    """Step metrics, for the live view and the tracker."""
    is_last: bool = False


class Bye(Message):
    """Clean end of a peer: its leases are released at once."""

    kind: Literal["bye"] = "bye"
    id: Count = 0


Request = Annotated[
    Register | Sync | Group | Groups | Sealed | Reserve | Rows | Committed | Bye, Field(discriminator="kind")
]


class Registered(Message):
    """Answer to register."""

    kind: Literal["registered"] = "registered"
    re: Count
    boot_id: str
    newest_version: StepOrNone
    sync_seconds: Seconds
    credit: Count
    """How many groups the actor may send."""


class SyncReply(Message):
    """Answer to sync."""

    kind: Literal["sync_reply"] = "sync_reply"
    re: Count
    boot_id: str
    leases: tuple[Lease, ...] = ()
    stop_leases: tuple[str, ...] = ()
    """Leases that the actor no longer holds and must abandon."""
    manifest: WeightManifest | None = None
    """Newest announced weights."""
    state: Literal["run", "pause", "drain"] = "run"
    sync_seconds: Seconds = 0.05
    credit: Count = 0
    """How many groups the actor may send. Absolute, so that a lost SyncNow has no lasting effect. The actor
    subtracts its unacknowledged groups."""
    ready_groups: Count = 0
    """Groups that wait for the trainer; input of the engine's pace."""
    swaps_acknowledged: StepOrNone = -1
    """Newest swap version that the actor need not report again."""
    evaluates: bool = False
    """Whether this actor is the one that evaluates (eval.on=actors): the first by name."""


class Ack(Message):
    """A group, sealed, committed or bye message was processed, now or before."""

    kind: Literal["ack"] = "ack"
    re: Count
    note: str = ""


class LedgerSnapshot(BaseModel):
    """The ledger at the reservation of a step: the answer to `reserve` and the commit of the step have its fields."""

    next_group_id: Count = 0
    """Prompt frontier: no group at or beyond it was ever leased."""
    open_groups: tuple[Count, ...] = ()
    """Groups below the frontier without a fate, groups of reservations excluded."""
    low_water: dict[str, Count] = Field(default_factory=dict)
    """"<actor>/<epoch>" -> lowest segment seq that may hold rows of an undecided group."""
    tokens: dict[str, Total] = Field(default_factory=dict)
    """Live token ledger: generated, trained, masked_stale, dropped_stale, filtered, failed, quarantined, superseded,
    ..."""
    lengths: dict[str, LengthTotals] = Field(default_factory=dict)
    """Length-bias meter: the same classes, over the tokens whose rows have arrived."""
    waits: dict[str, Number] = Field(default_factory=dict)
    """Cause -> seconds that trainer and actors have waited since the run began."""
    retired_tokens: dict[str, Total] = Field(default_factory=dict)
    """`generated` and `decided` tokens of all retired actor lives together; empty before the first is retired."""


class Reserved(LedgerSnapshot, Message):
    """Answer to reserve: the groups of the step, or is_ready=False."""

    kind: Literal["reserved"] = "reserved"
    re: Count
    is_ready: bool
    groups: tuple[GroupRef, ...] = ()
    num_following: Count = 0
    """Number of groups whose rows follow directly."""
    fates: tuple[FateRecord, ...] = ()
    """Untrained fates since the last commit: the commit of this step records them."""
    swaps: tuple[SwapRecord, ...] = ()
    """Every swap reported since the last commit."""
    actors: dict[str, ActorSample] = Field(default_factory=dict)
    """"<actor>/<epoch>" -> its sample now."""
    reason: str = ""
    """Why the step is not ready, as text for a log line."""
    ready_groups: Count = 0
    """Ready groups while the step is not ready. A trainer gives up if this number does not grow."""

    @property
    def decided(self) -> tuple[FateRecord, ...]:
        """All fates that the commit of the step records: `fates`, and `trained` for the groups of the step."""
        trained = [
            FateRecord(group_id=ref.group_id, attempt=ref.attempt, fate="trained", num_tokens=ref.num_tokens)
            for ref in self.groups
        ]
        return (*self.fates, *trained)


class RowsHeader(Message):
    """Precedes the record batch of one group; `remaining`: number of groups that follow."""

    kind: Literal["rows_header"] = "rows_header"
    re: Count
    group_id: Count
    attempt: Attempt
    remaining: Count


class RowsBundle(Message):
    """Several groups; the record batch of the same write holds their rows, group after group."""

    kind: Literal["rows_bundle"] = "rows_bundle"
    re: Count
    groups: tuple[tuple[Count, Attempt, Count], ...]
    """(group_id, attempt, number of rows) of each."""
    remaining: Count


class Refused(Message):
    """The request broke a rule.

    `code`: unknown_boot, stale_lease, schema, wrong_peer, config, fenced, expelled, not_reserved, missing_rows,
    store, internal.
    """

    kind: Literal["refused"] = "refused"
    re: Count
    code: str
    detail: str


class Answers(Message):
    """Answer to groups: one answer per group, in their order."""

    kind: Literal["answers"] = "answers"
    re: Count
    answers: tuple[Annotated[Ack | Refused, Field(discriminator="kind")], ...]


class SyncNow(Message):
    """Unsolicited request to sync now: groups of the actor were taken and little credit is left, a version was
    announced, or a pause begins or ends. The answer to the sync has the details."""

    kind: Literal["sync_now"] = "sync_now"


class Goodbye(Message):
    """Unsolicited: the hub is shutting down."""

    kind: Literal["goodbye"] = "goodbye"


Answer = Annotated[
    Registered | SyncReply | Ack | Reserved | RowsHeader | RowsBundle | Refused | Answers | SyncNow | Goodbye,
    Field(discriminator="kind"),
]

REQUEST: TypeAdapter[Request] = TypeAdapter(Request)
ANSWER: TypeAdapter[Answer] = TypeAdapter(Answer)


def encode(message: Message) -> bytes:
    """The encoded message (UTF-8 JSON)."""
    return message.model_dump_json().encode()
