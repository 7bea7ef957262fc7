"""Faults of a simulation. Each happens at a time of the seed, to a process or the store of the seed."""

from collections.abc import Callable
from typing import TYPE_CHECKING

from tests.simulation.network import NETWORK

if TYPE_CHECKING:
    from tests.simulation.run import Simulation

REQUESTS = ("put", "get", "exists", "list", "delete")


def kill(run: "Simulation") -> str:
    name = run.world.rng.choice(run.names)
    run.processes[name].kill()
    return name


def pause(run: "Simulation") -> str:
    name, seconds = run.world.rng.choice(run.names), run.world.rng.choice([0.5, 5.0, 15.0, 3600.0])
    run.processes[name].paused_until = run.world.now + seconds
    return f"{name} for {seconds} s"


def second(run: "Simulation") -> str:
    """Another process of the same role starts on another host, beside the first process."""
    name = run.world.rng.choice(run.names)
    run.start(name, host=f"host-{run.world.rng.randrange(1000)}")
    return name


def store_fails(run: "Simulation") -> str:
    rng, seconds = run.world.rng, run.world.rng.choice([0.05, 0.5, 3.0])
    run.disk.fails_until = run.world.now + seconds
    run.disk.fails = set(rng.sample(REQUESTS, rng.randint(1, len(REQUESTS))))
    return f"{sorted(run.disk.fails)} for {seconds} s"


def store_slow(run: "Simulation") -> str:
    run.disk.slow_until = run.world.now + run.world.rng.choice([0.5, 5.0])
    return ""


def messages_lost(run: "Simulation") -> str:
    NETWORK.loses = run.world.rng.choice([0.1, 0.5])

    def heal() -> None:
        NETWORK.loses = 0.0

    run.world.at(run.world.now + run.world.rng.choice([0.5, 3.0]), heal)
    return str(NETWORK.loses)


def connections_lost(run: "Simulation") -> str:
    for server in NETWORK.servers.values():
        for client in list(server.clients):
            if run.world.rng.random() < 0.5:
                client.lost("the network")
    return ""


def clock_set(run: "Simulation") -> str:
    name, seconds = run.world.rng.choice(run.names), run.world.rng.choice([-3600.0, -5.0, 5.0, 3600.0])
    run.processes[name].clock_offset += seconds
    return f"{name} by {seconds} s"


FAULTS: dict[str, Callable[["Simulation"], str]] = {
    "kill": kill, "pause": pause, "second process": second, "store fails": store_fails, "store slow": store_slow,
    "messages lost": messages_lost, "connections lost": connections_lost, "clock set": clock_set,
}  # fmt: skip
WEIGHTS = {"kill": 4, "pause": 1, "second process": 1, "store fails": 3, "store slow": 1, "messages lost": 1,
           "connections lost": 1, "clock set": 1}  # fmt: skip


def plan(run: "Simulation", number: int, until: float) -> None:
    """Schedule `number` faults at random times before `until`."""
    rng = run.world.rng
    kinds = rng.choices(list(WEIGHTS), list(WEIGHTS.values()), k=number)
    for when, kind in sorted((rng.uniform(0.1, until), kind) for kind in kinds):
        run.world.at(when, lambda kind=kind: run.note(f"fault {kind}: {FAULTS[kind](run)}"))
