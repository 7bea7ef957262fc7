"""A whole run on a manual clock: the real ledger and schedule, and engines and a trainer that follow a script.

Time has whole units, which are seconds of the ledger's clock. In every unit, in this order:

    1. leases of silent actors expire
    2. computed steps whose commit is due are committed and announced
    3. finished groups arrive
    4. if the trainer is free, the trainer requests the next step
    5. actors sync in order of names: stop leases, pause or continue, take leases and swap; after a swap, sync again
    6. engines that are not paused sample for one unit: one token for every rollout in a slot

`ScriptedRun.log` has one line per event, for example

    t=3 lease 4,5 -> a v1        actor a, whose engine has version 1, receives groups 4 and 5
    t=5 swap a v2 (1 running)    one group is unfinished
    t=6 step 2 trains 1,3
    t=8 commit 2 v2              version 2 is announced; without "v2" the commit has no version
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from pipelinerl_core.config import RunConfig
from pipelinerl_core.errors import StaleLease
from pipelinerl_core.ledger import ActorKey, Arrival, Grant, GroupSummary, Ledger
from pipelinerl_core.ledger.schedules import Schedule
from pipelinerl_core.messages import FateRecord, Reserved, Sync
from pipelinerl_core.types import GroupRef, WeightManifest

# As in roles/trainer/committer.py: while one step is committed, the next step is computed.
_MAX_UNCOMMITTED = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Script:
    """Durations in units, and rewards."""

    group_units: Callable[[int], int]
    """group_id -> units of sampling, at least 1."""
    step_units: Callable[[int], int] = lambda step: 1
    """step -> units of computation, at least 1."""
    commit_units: Callable[[int], int] = lambda step: 0
    """step -> units from the end of the computation to the commit; the trainer computes the next step meanwhile."""
    swap_units: Callable[[str, int], int] = lambda actor, version: 0
    """Actor, version -> units from the announcement of a version to the swap."""
    send_units: Callable[[int], int] = lambda group_id: 0
    """group_id -> units from the end of sampling to the arrival at the hub."""
    rewards: Callable[[int], tuple[float, ...]] = lambda group_id: (0.0, 1.0)
    """group_id -> rewards of the scored rollouts. Equal rewards: filtered; fewer than two: failed."""


@dataclass(slots=True, eq=False)
class Work:
    """A lease in progress."""

    grant: Grant
    units_left: int
    arrives_at: int | None = None
    """None until sampling has finished."""
    units_by_version: dict[int, int] = field(default_factory=dict)


@dataclass(slots=True, eq=False)
class ScriptedActor:
    """One epoch of an actor; the engine samples `slots` whole groups, other groups wait."""

    key: ActorKey
    slots: int
    version: int = 0
    is_paused: bool = False
    silent_until: int = 0
    """Until this time the actor samples, but neither syncs nor sends."""
    num_tokens: int = 0
    works: dict[str, Work] = field(default_factory=dict)
    fetching: tuple[int, int] | None = None
    """(version in transfer, time of its swap)."""

    @property
    def unfinished(self) -> list[Work]:
        """Leases that need more sampling, in order of arrival."""
        return [work for work in self.works.values() if work.units_left]

    @property
    def running(self) -> list[Work]:
        """Leases in slots."""
        return self.unfinished[: self.slots]


class ScriptedRun:
    """Hub, trainer and actors of one run; `tick` is one unit of time."""

    def __init__(
        self,
        config: RunConfig,
        script: Script,
        *,
        schedule: Schedule | None = None,
        on_change: Callable[["ScriptedRun"], None] | None = None,
    ) -> None:
        """`on_change` is called after every call of the ledger. The run has initial weights and no actor."""
        self.now = 0
        self.log: list[str] = []
        self.actors: dict[str, ScriptedActor] = {}
        self.fates: list[tuple[int, str]] = []
        """(group_id, fate) in order, as the hub decided them."""
        self.recorded_fates: list[FateRecord] = []
        """The fates of all commits."""
        self.trained: list[tuple[int, GroupSummary]] = []
        """(step, group) of every committed step."""
        self.ready_since: dict[int, int] = {}
        """Ready groups without a fate: group_id -> the first step that could take the group."""
        self._config = config
        self._script = script
        self._on_change = on_change
        self._summaries: dict[tuple[int, int], GroupSummary] = {}
        self._computing: tuple[Reserved, int] | None = None  # (groups of the step, time of the end)
        self._computed: list[tuple[Reserved, int]] = []  # (groups of a step, time of the commit)
        self._epochs: dict[str, int] = {}  # of actors
        self._trainer_epoch = 1
        self._reason = ""
        self.ledger = Ledger(config, clock=lambda: float(self.now), schedule=schedule)
        self.ledger.committed(0, (), _manifest(0))

    @property
    def next_step(self) -> int:
        """The step that the trainer requests next."""
        return self.ledger.committed_step + 1 + len(self._computed) + (self._computing is not None)

    def run(self, max_units: int) -> bool:
        """Run until the last step is committed, `max_units` at most; returns whether the last step is committed."""
        until = self.now + max_units
        while self.now < until and not self.ledger.is_done:
            self.tick()
        return self.ledger.is_done

    def tick(self) -> None:
        """One unit of time; the last commit ends the unit early."""
        expired = self.ledger.expire()
        if expired:
            self._note(f"expired {_names(expired)}")
        self._commit_due()
        if self.ledger.is_done:
            return
        for actor in self._present():
            self._send_finished(actor)
        self._request_step()
        for actor in self._present():
            self._sync(actor)
        for actor in self.actors.values():
            self._sample(actor)
        self.now += 1

    # ---- start and end of processes ------------------------------------------------------------------------------

    def join(self, name: str) -> None:
        """Start a new epoch of an actor with the initial weights."""
        self._epochs[name] = self._epochs.get(name, 0) + 1
        slots = self._config.engine.concurrency // self._config.rollouts.group_size
        self.actors[name] = ScriptedActor(ActorKey(name, self._epochs[name]), slots)
        self.ledger.register_actor(self.actors[name].key)
        self._changed()

    def leave(self, name: str) -> None:
        """End an actor with a Bye; unsent groups are lost."""
        self.ledger.bye(self.actors.pop(name).key)
        self._changed()

    def die(self, name: str) -> None:
        """End an actor without a message; the leases expire."""
        del self.actors[name]

    def silence(self, name: str, units: int) -> None:
        """Disconnect an actor for some units."""
        self.actors[name].silent_until = self.now + units

    def restart_trainer(self) -> None:
        """Start the next epoch of the trainer, which computes all uncommitted steps again."""
        self._trainer_epoch += 1
        self._computing, self._computed = None, []
        self.ledger.register_trainer(self._trainer_epoch)
        self._changed()

    def _present(self) -> list[ScriptedActor]:
        return [actor for _, actor in sorted(self.actors.items()) if actor.silent_until <= self.now]

    # ---- the trainer -----------------------------------------------------------------------------------------

    def _commit_due(self) -> None:
        if self._computing is not None and self._computing[1] <= self.now:
            answer, _ = self._computing
            due = self.now + self._script.commit_units(self.next_step - 1)
            self._computed.append((answer, due))
            self._computing = None
        while self._computed and self._computed[0][1] <= self.now:
            self._commit(self._computed.pop(0)[0])

    def _commit(self, answer: Reserved) -> None:
        step = self.ledger.committed_step + 1
        masked = self.ledger.tokens()["masked_stale"]
        version = f" v{step}" if self._config.publishes(step) else ""
        self.ledger.committed(step, answer.decided, _manifest(step) if version else None)
        for ref in answer.groups:
            self.ready_since.pop(ref.group_id)
            self.fates.append((ref.group_id, "trained"))
            self.trained.append((step, self._summaries[ref.group_id, ref.attempt]))
        self.recorded_fates.extend(answer.fates)
        masked = self.ledger.tokens()["masked_stale"] - masked
        self._note(f"commit {step}{version}" + (f", {masked} tokens masked" if masked else ""))

    def _request_step(self) -> None:
        step = self.next_step
        is_free = self._computing is None and len(self._computed) < _MAX_UNCOMMITTED
        if not is_free or step > self._config.trainer.steps:
            return
        answer = self.ledger.reserve(step, self._trainer_epoch)
        dropped = [group_id for group_id in self.ready_since if not self.ledger.is_open(group_id)]
        for group_id in dropped:
            del self.ready_since[group_id]
            self.fates.append((group_id, "dropped_stale"))
            self._note(f"drop {group_id}")
        if answer.is_ready:
            self._computing = (answer, self.now + self._script.step_units(step))
            self._note(f"step {step} trains {_names(ref.group_id for ref in answer.groups)}")
        elif "stale" in answer.reason and answer.reason != self._reason:
            self._note(f"step {step} waits: {answer.reason}")
        self._reason = answer.reason

    # ---- the actors ------------------------------------------------------------------------------------------

    def _send_finished(self, actor: ScriptedActor) -> None:
        for lease_id, work in list(actor.works.items()):
            if work.arrives_at is not None and work.arrives_at <= self.now:
                del actor.works[lease_id]
                self._send(actor, work)

    def _send(self, actor: ScriptedActor, work: Work) -> None:
        group_id = work.grant.group_id
        summary = self._summary(actor, work)
        try:
            arrival = self.ledger.add_group(summary, work.grant.lease_id)
        except StaleLease:
            self._note(f"refused {group_id}")
            return
        if arrival is Arrival.READY:
            self.ready_since[group_id] = self.next_step
            self._summaries[group_id, work.grant.attempt] = summary
        else:
            self.fates.append((group_id, arrival.value))
        self._note(f"{arrival.value} {group_id}")

    def _summary(self, actor: ScriptedActor, work: Work) -> GroupSummary:
        rewards, group_size = self._script.rewards(work.grant.group_id), self._config.rollouts.group_size
        ref = GroupRef(
            group_id=work.grant.group_id,
            attempt=work.grant.attempt,
            actor=actor.key.name,
            actor_epoch=actor.key.epoch,
            num_rollouts=group_size,
            num_tokens=group_size * sum(work.units_by_version.values()),
        )
        scored = {version: units * len(rewards) for version, units in work.units_by_version.items() if rewards}
        return GroupSummary(ref=ref, rewards=rewards, tokens_by_version=scored)

    def _sync(self, actor: ScriptedActor) -> None:
        self._exchange(actor)
        if actor.fetching is not None and actor.fetching[1] <= self.now:
            actor.version, actor.fetching = actor.fetching[0], None
            self._note(f"swap {actor.key.name} v{actor.version} ({len(actor.running)} running)")
            self._exchange(actor)

    def _exchange(self, actor: ScriptedActor) -> None:
        name, group_size = actor.key.name, self._config.rollouts.group_size
        unfinished, running = len(actor.unfinished), len(actor.running)
        message = Sync(
            boot_id="0",
            engine_version=actor.version,
            running=running * group_size,
            waiting=(unfinished - running) * group_size,
            concurrency=actor.slots * group_size,
            want=max(0, actor.slots - unfinished),
            leases=tuple(actor.works),
            num_tokens=actor.num_tokens,
            running_seconds=0.0,
        )
        result = self.ledger.sync(actor.key, message)
        newest = self.ledger.newest_version
        if newest > actor.version and actor.fetching is None:
            actor.fetching = (newest, self.now + self._script.swap_units(name, newest))
        for lease_id in result.stop_leases:
            self._note(f"stop {actor.works.pop(lease_id).grant.group_id} at {name}")
        self._set_paused(actor, self.ledger.must_pause(actor.version))
        if result.leases:
            self._note(f"lease {_grant_names(result.leases)} -> {name} v{actor.version}")
        for grant in result.leases:
            actor.works[grant.lease_id] = Work(grant, self._script.group_units(grant.group_id))

    def _set_paused(self, actor: ScriptedActor, is_paused: bool) -> None:
        if is_paused == actor.is_paused:
            return
        actor.is_paused = is_paused
        held = _names(work.grant.group_id for work in actor.running)
        verb, version = ("pause", "") if is_paused else ("continue", f" v{actor.version}")
        self._note(f"{verb} {actor.key.name} {held}".rstrip() + version)

    def _sample(self, actor: ScriptedActor) -> None:
        for work in [] if actor.is_paused else actor.running:
            work.units_by_version[actor.version] = work.units_by_version.get(actor.version, 0) + 1
            actor.num_tokens += self._config.rollouts.group_size
            work.units_left -= 1
            if not work.units_left:
                work.arrives_at = self.now + 1 + self._script.send_units(work.grant.group_id)

    # ---- log ----------------------------------------------------------------------------------------

    def _note(self, text: str) -> None:
        self.log.append(f"t={self.now} {text}")
        self._changed()

    def _changed(self) -> None:
        if self._on_change is not None:
            self._on_change(self)


def _manifest(version: int) -> WeightManifest:
    return WeightManifest(version=version, epoch=1, files=(), key=None, shm=None, host="", published_at=0.0)


def _names(names: Iterable[object]) -> str:
    return ",".join(map(str, names))


def _grant_names(grants: Iterable[Grant]) -> str:
    """group_id, or group_id.attempt for attempts after the first."""
    return _names(f"{g.group_id}.{g.attempt}" if g.attempt else g.group_id for g in grants)
