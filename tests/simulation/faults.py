"""Faults of a simulation: each has a time, a kind and a seed of its own, so that a run can leave out some of them."""

import random
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from pipelinerl_core.errors import ConfigError, Fenced, StoreUnavailable
from pipelinerl_core.run.drain import ask_to_drain
from pipelinerl_core.run.history import accept_lost_commits
from pipelinerl_core.run.hub_status import HubWatch
from pipelinerl_core.run.records import parse_step_key
from pipelinerl_core.tools.gc import collect
from tests.simulation.network import NETWORK
from tests.simulation.store import SimulatedStore

if TYPE_CHECKING:
    from tests.simulation.run import Simulation

REQUESTS = ("put", "get", "exists", "list", "delete")


class Fault(NamedTuple):
    """Something that happens to a process, the network or the store."""

    when: float
    """Simulated seconds, from the start or from the first commit of `step`."""
    kind: str
    seed: int
    step: int | None


def kill(run: "Simulation", rng: random.Random) -> str:
    name = rng.choice(run.names)
    run.processes[name].kill()
    return name


def kill_after_change(run: "Simulation", rng: random.Random) -> str:
    """A role is killed right after it has written or deleted an object, before it has the answer."""
    name, number = rng.choice(run.names), rng.randrange(12)
    run.processes[name].changes_left = number
    return f"{name} after {number} more"


def pause(run: "Simulation", rng: random.Random) -> str:
    name, (seconds,) = rng.choice(run.names), rng.choices([0.5, 5.0, 15.0, 120.0, 3600.0], [30, 30, 30, 9, 1])
    own = run.processes[name]
    own.paused_until = max(own.paused_until, run.world.now + seconds)
    return f"{name} for {seconds} s"


def second(run: "Simulation", rng: random.Random) -> str:
    """Another process of the same role starts beside the first process, half of the times on another host."""
    name, host = rng.choice(run.names), rng.choice(["host", f"host-{rng.randrange(1000)}"])
    run.start(name, host=host)
    return f"{name} on {host}"


def store_fails(run: "Simulation", rng: random.Random) -> str:
    seconds = rng.choice([0.05, 0.5, 3.0])
    run.disk.fails_until = run.world.now + seconds
    run.disk.fails = set(rng.sample(REQUESTS, rng.randint(1, len(REQUESTS))))
    run.disk.fail_share = rng.choice([0.05, 0.3, 1.0])
    return f"{run.disk.fail_share:.0%} of {sorted(run.disk.fails)} for {seconds} s"


def store_full(run: "Simulation", rng: random.Random) -> str:
    """No object can be written, but every other request is answered."""
    seconds = rng.choice([0.5, 5.0])
    run.disk.full_until = run.world.now + seconds
    return f"for {seconds} s"


def store_slow(run: "Simulation", rng: random.Random) -> str:
    seconds = rng.choice([0.5, 5.0])
    run.disk.slow_until = run.world.now + seconds
    return f"for {seconds} s"


def wrong_listing(run: "Simulation", rng: random.Random) -> str:
    """One of the next listings of a role, which mostly has just begun, lacks all objects or the newer half."""
    name = rng.choice(["hub", "trainer", "actor-0"])
    if rng.random() < 0.7:
        run.processes[name].kill()
        run.start(name)
    run.processes[name].lacking = rng.randrange(12), rng.choice([0.0, 0.5])
    return f"{name} {run.processes[name].lacking}"


def takeover(run: "Simulation", rng: random.Random) -> str:
    """A request of a role stalls; meanwhile another host starts the role."""
    name = rng.choice(["hub", "trainer", "trainer", "actor-0"])
    run.processes[name].stall = stall = _stall(rng, 10 ** rng.uniform(-2.0, 1.2))
    run.start(name, host=f"host-{rng.randrange(1000)}")
    return f"{name} {stall}"


def engine(run: "Simulation", rng: random.Random) -> str:
    """The engine of an actor fails for good, or a few of its swaps fail."""
    name = rng.choice([name for name in run.names if name.startswith("actor")])
    own, number = run.processes[name], rng.choice([0, 1, 4])
    own.has_bad_engine, own.engine_fails, own.failing_swaps = True, not number, number
    return f"{name} {f'{number} swaps' if number else ''}"


def foreign_engine(run: "Simulation", rng: random.Random) -> str:
    """The first of several actors samples with other weights than its versions'; the trainer may expel it."""
    if run.gone or run.settings.num_actors == 1 or not run.config.trainer.rescore_share:
        return "nothing"
    run.processes["actor-0"].engine_is_foreign = run.has_foreign_engine = True
    return "actor-0"


def commits_lost(run: "Simulation", rng: random.Random) -> str:
    """The whole run ends, its newest commits are lost for good, and a user accepts the loss. Once per run."""
    keys = sorted(key for key in run.disk.objects if key.startswith("commits/"))
    number = rng.randint(1, 3)
    can_be_trained_again = not run.config.store.keep_rows  # else the rows before the checkpoints may be removed
    if not can_be_trained_again or run.has_lost_commits or run.ended or run.is_stopping or len(keys) <= number:
        return "nothing"
    run.has_lost_commits = True
    for own in run.pids.values():
        own.kill()
    for key in keys[-number:]:
        del run.disk.objects[key]

    def accept(store: SimulatedStore) -> None:
        while True:
            try:
                accept_lost_commits(store, is_final=True)
                return
            except ConfigError:  # none of them counted
                return
            except (StoreUnavailable, Fenced):  # a role that starts claims the same epoch
                run.world.sleep(1.0)

    run.world.at(run.world.now + 3.0, lambda: run.command("accept-loss", accept))
    return f"{number}"


def damage(run: "Simulation", rng: random.Random) -> str:
    """A bit of an object that the run can do without changes. Half of the times, the role that reads it is killed."""
    keys, reader = _expendable(run, rng)
    if not keys:
        return "nothing"
    key, disk = rng.choice(keys), run.disk
    if rng.random() < 0.5:
        run.processes[reader].kill()
    if key.startswith("batches/"):
        run.has_lost_commits = True  # these steps cannot be trained again
        disk.backup.setdefault(key, disk.objects[key])
    data = bytearray(disk.objects[key])
    data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    disk.objects[key] = bytes(data)
    disk.damaged.add(key)
    return key


def _expendable(run: "Simulation", rng: random.Random) -> tuple[list[str], str]:
    """Segments and logs of actors; once the newest checkpoint; an early version; or rows that were trained before the
    newest two checkpoints, of which a backup exists. Also the role that reads them."""
    disk, keys, reader = run.disk, sorted(run.disk.objects), "hub"
    chosen = [key for key in keys if key.startswith(("rollouts/", "partials/"))]
    checkpoints = [key for key in keys if key.startswith("checkpoints/")]
    steps = sorted({parse_step_key(key)[0] for key in checkpoints})
    is_damaged = any(key.startswith(("checkpoints/", "batches/")) for key in disk.damaged)  # each needs the other
    if rng.random() < 0.3 and steps and steps[-1] and not is_damaged:
        chosen, reader = [key for key in checkpoints if key.startswith(checkpoints[-1].rpartition("/")[0])], "trainer"
    weights = [key for key in keys if key.startswith("weights/") and not key.endswith(".json")]
    newest = parse_step_key(weights[-1])[0] if weights else 0
    if rng.random() < 0.3 and run.evaluates_on != "own" and 0 < newest < run.config.trainer.steps // 2:
        chosen, reader = weights[-1:], "hub"  # later versions replace it
    first, _ = steps[-2:] if len(steps) > 1 else (0, 0)
    batches = [key for key in keys if key.startswith("batches/") and parse_step_key(key)[0] <= first]
    if (
        rng.random() < 0.3
        and batches
        and not (run.has_lost_commits or any(key.startswith("checkpoints/") for key in disk.damaged))
    ):
        chosen, reader = batches[-2:], "trainer"
    return chosen, reader


def messages_lost(run: "Simulation", rng: random.Random) -> str:
    NETWORK.loses = rng.choice([0.1, 0.5])

    def heal() -> None:
        NETWORK.loses = 0.0

    run.world.at(run.world.now + rng.choice([0.5, 3.0]), heal)
    return str(NETWORK.loses)


def connections_lost(run: "Simulation", rng: random.Random) -> str:
    for server in NETWORK.servers.values():
        for exchange in list(server.exchanges):
            if rng.random() < 0.5:
                exchange.cut("the network")
    return ""


def clock_set(run: "Simulation", rng: random.Random) -> str:
    name, seconds = rng.choice(run.names), rng.choice([-3600.0, -5.0, 5.0, 3600.0])
    run.processes[name].clock_offset += seconds
    return f"{name} by {seconds} s"


def drain(run: "Simulation", rng: random.Random) -> str:
    """`pipelinerl drain`; once all roles have ended, the run is resumed."""
    run.command("drain", lambda store: ask_to_drain(store, "user"))
    return ""


def collect_garbage(run: "Simulation", rng: random.Random) -> str:
    """`pipelinerl gc` of a run that may be live, half of the times with --rollouts."""
    with_rollouts = rng.random() < 0.5
    run.note_collection(with_rollouts=with_rollouts)

    def collect_all(store: SimulatedStore) -> None:
        for _ in range(2):  # the second call removes what the first call has noted
            is_live = HubWatch(store).find_live() is not None
            try:
                collect(store, run.config, with_rollouts=with_rollouts, dry_run=False, is_live=is_live)
            finally:  # the run may have ended since this command began
                run.note_collection(with_rollouts=with_rollouts)
            run.world.sleep(0.5)

    run.command("gc", collect_all)
    return "--rollouts" if with_rollouts else ""


def cut_off(run: "Simulation", rng: random.Random) -> str:
    """No message between a role and the others arrives, but the store answers."""
    name, seconds = rng.choice(run.names), rng.choice([3.0, 12.0, 12.0, 30.0, 70.0])
    run.processes[name].cut_off_until = run.world.now + seconds
    return f"{name} for {seconds} s"


def store_fails_for(run: "Simulation", rng: random.Random) -> str:
    """The store answers all roles but one."""
    name, seconds = rng.choice(run.names), rng.choice([0.5, 3.0, 12.0, 30.0])
    run.processes[name].store_fails_until = run.world.now + seconds
    return f"{name} for {seconds} s"


def terminate(run: "Simulation", rng: random.Random) -> str:
    """SIGTERM, then SIGKILL."""
    own = run.processes[rng.choice(run.names)]
    own.stop.set()
    run.world.at(run.world.now + rng.choice([1.0, 5.0]), own.kill)
    return own.name


def hang(run: "Simulation", rng: random.Random) -> str:
    """A request to the store takes long, half of the times of a role that has just begun."""
    name = rng.choice(run.names)
    if rng.random() < 0.5:
        run.processes[name].kill()
        run.start(name)
    run.processes[name].stall = stall = _stall(rng, rng.choice([0.5, 5.0, 15.0, 45.0]))
    return f"{name} {stall}"


def _stall(rng: random.Random, seconds: float) -> tuple[int, float, str]:
    """One of the next requests, or of those for one kind of object, takes this long."""
    prefix = rng.choice(["", "commits", "epochs", "rollouts"])
    return rng.randrange(3 if prefix else 12), seconds, prefix


def late_writes(run: "Simulation", rng: random.Random) -> str:
    """Objects arrive after their writer has given up, or has ended."""
    seconds = rng.choice([0.5, 3.0, 10.0])
    run.disk.late_until = run.world.now + seconds
    return f"for {seconds} s"


def leave(run: "Simulation", rng: random.Random) -> str:
    """The machine of one of several actors is gone for good."""
    name = f"actor-{run.settings.num_actors - 1}"
    if run.settings.num_actors == 1 or run.has_foreign_engine:  # of two actors, the first may be expelled
        return "nothing"
    run.gone.add(name)
    run.processes[name].kill()
    return name


FAULTS: dict[str, Callable[["Simulation", random.Random], str]] = {
    "kill": kill, "kill after a change": kill_after_change, "pause": pause, "second process": second,
    "store fails": store_fails, "store full": store_full, "store slow": store_slow, "wrong listing": wrong_listing,
    "takeover": takeover, "damaged object": damage, "engine": engine, "foreign engine": foreign_engine,
    "commits lost": commits_lost, "messages lost": messages_lost,
    "connections lost": connections_lost, "clock set": clock_set, "drain": drain, "gc": collect_garbage,
    "cut off": cut_off, "store fails for one": store_fails_for, "terminate": terminate, "hang": hang,
    "late writes": late_writes, "leaves for good": leave,
}  # fmt: skip
WEIGHTS = {"kill": 5, "kill after a change": 5, "pause": 2, "second process": 3, "store fails": 6,
           "store full": 1, "store slow": 2, "wrong listing": 3, "takeover": 4, "damaged object": 2,
           "messages lost": 2, "connections lost": 2, "clock set": 1, "drain": 1, "gc": 1, "engine": 2,
           "foreign engine": 1, "commits lost": 1, "cut off": 3, "store fails for one": 3, "terminate": 3, "hang": 3,
           "late writes": 2, "leaves for good": 1}  # fmt: skip


def plan(seed: int, number: int, steps: int, until: float) -> list[Fault]:
    """`number` faults: half of them at random times before `until`, half soon after the commits of random steps.

    Half of the runs have up to four kinds of faults, and in half of them most faults follow the commits of up to
    three steps: a defect that only several such faults together show is then more likely (Groce et al. 2012, "Swarm
    testing").
    """
    rng = random.Random(f"faults {seed}")
    chosen = list(WEIGHTS) if rng.random() < 0.5 else rng.sample(list(WEIGHTS), rng.randint(1, 4))
    kinds = rng.choices(chosen, [WEIGHTS[kind] for kind in chosen], k=number)
    after_steps, share = range(steps + 1), 0.5
    if rng.random() < 0.5:
        after_steps, share = rng.choices(after_steps, k=rng.randint(1, 3)), 0.8
    faults = []
    for kind in kinds:
        step = rng.choice(after_steps) if rng.random() < share else None
        when = rng.uniform(0.1, until) if step is None else 0.3 * rng.random() ** 3
        faults.append(Fault(when, kind, rng.getrandbits(32), step))
    return faults


def schedule(run: "Simulation", faults: Sequence[Fault]) -> None:
    """Let the faults happen at their times, until the run has ended."""
    after: dict[int, list[Fault]] = {}

    def happen(fault: Fault) -> None:
        if not run.is_finished:
            run.note(f"fault {fault.kind}: {FAULTS[fault.kind](run, random.Random(fault.seed))}")

    def begin(faults: Sequence[Fault]) -> None:
        for fault in faults:
            run.world.at(run.world.now + fault.when, lambda fault=fault: happen(fault))

    begin([fault for fault in faults if fault.step is None])
    for fault in faults:
        if fault.step is not None:
            after.setdefault(fault.step, []).append(fault)
    run.disk.on_commit = lambda step: begin(after.pop(step, []))
