"""What can go wrong. A fault happens to a World, and tells in a few words what it did."""

import os
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from urllib.parse import urlsplit

import psutil

from pipelinerl_core.data.compaction import compact_rollouts, list_rollouts, read_rollouts
from pipelinerl_core.errors import EXIT_STORE
from pipelinerl_core.run import compaction
from pipelinerl_core.run.history import counted_commit_keys, read_commit
from pipelinerl_core.run.reading import read_record
from pipelinerl_core.run.records import HUB_KEY, HubRecord
from tests.chaos.services import Service
from tests.chaos.world import LEASE_SECONDS, RECOVERY_SECONDS, StoreKind, World

Fault = Callable[[World], str]

AWAY_SECONDS = 60.0
STORE_SECONDS = 5.0
OUTAGE_SECONDS = 900.0
"""Longest time until a run has ended whose store is away: each role repeats its requests for a minute, twice."""
SPARE_DESCRIPTORS = 100
_ROLES = ("roles.hub", "roles.trainer", "roles.actor")


def kill(words: str, world: World) -> str:
    """kill -9."""
    process = world.process(words)
    process.send_signal(signal.SIGKILL)
    return f"pid {process.pid}"


def kill_flow(world: World) -> str:
    """kill -9 of the command; somebody starts it again."""
    world.kill_command()
    world.resume()
    return f"start {world.num_starts}"


def stop(words: str, world: World) -> str:
    """SIGSTOP for longer than a lease, then SIGCONT."""
    process, seconds = world.process(words), LEASE_SECONDS + world.random.uniform(1, 3)
    process.send_signal(signal.SIGSTOP)
    time.sleep(seconds)
    with suppress(psutil.NoSuchProcess):
        process.send_signal(signal.SIGCONT)
    return f"{seconds:.1f} s"


def step_clock(hours: float, world: World) -> str:
    """The wall clock of the host is set, and set right after a while longer than a lease."""
    seconds = LEASE_SECONDS + world.random.uniform(1, 3)
    world.set_clock(3600.0 * hours)
    time.sleep(seconds)
    world.set_clock(0.0)
    return f"{hours:+g} h for {seconds:.1f} s"


def second_trainer(world: World) -> str:
    """A trainer is stopped; another one takes the run over, and the first continues as soon as the other claims."""
    old = world.process("roles.trainer.main --run")
    command, environment, directory = old.cmdline(), old.environ(), old.cwd()
    command[command.index("--parent-pid") + 1] = str(os.getpid())
    time.sleep(world.random.uniform(0, 0.5))
    old.send_signal(signal.SIGSTOP)
    known = len(list(world.directory.glob("epochs/[0-9]*.json")))
    with (world.home / "second.txt").open("ab") as log:
        other = subprocess.Popen(
            command, env={**environment, **world.aws(world.proxy)}, cwd=directory, stdout=log, stderr=log
        )
    try:
        world.wait_for(
            "the claim of a second trainer",
            lambda: len(list(world.directory.glob("epochs/[0-9]*.json"))) > known or other.poll() is not None,
            RECOVERY_SECONDS, poll_seconds=0.002,
        )  # fmt: skip
        with suppress(psutil.NoSuchProcess):
            old.send_signal(signal.SIGCONT)
        # The supervisor starts its trainer again, which fences the other one.
        world.wait_for("the end of the second trainer", lambda: other.poll() is not None, RECOVERY_SECONDS)
    finally:
        with suppress(psutil.NoSuchProcess):
            old.send_signal(signal.SIGCONT)
        other.kill()
        other.wait(60)
    return f"it ended with {other.returncode}"


def store_fails(mode: str, world: World) -> str:
    """The S3 server fails in this way for a while."""
    assert world.proxy is not None
    before = world.proxy.num_faults
    world.proxy.mode = mode
    time.sleep(STORE_SECONDS)
    world.proxy.mode = "pass"
    return f"{world.proxy.num_faults - before} requests"


def listings_fail(world: World) -> str:
    """No listing of the store succeeds for a while, and a role starts meanwhile."""
    role = world.random.choice(_ROLES)
    world.fail_listings(True)
    try:
        killed = kill(role, world)
        time.sleep(STORE_SECONDS)
    finally:
        world.fail_listings(False)
    return f"{role} {killed}"


def foreign_files(world: World) -> str:
    """Files of other programs in every folder of the run, and a role starts."""
    folders = [path for path in world.directory.rglob("*") if path.is_dir()]
    for folder in (world.directory, *folders):
        with suppress(FileNotFoundError):  # a folder of weights that was removed meanwhile
            for name in (".nfs000000000001", ".DS_Store", "notes.json~", "Thumbs.db"):
                (folder / name).write_bytes(b"not of this run")
    role = world.random.choice(_ROLES)
    return f"{len(folders) + 1} folders, {role} {kill(role, world)}"


def flipped_batch(world: World) -> str:
    """A bit of a batch is another one while its step is compacted; later the batch is right again.

    The campaign compacts beside the run, in small objects: a run compacts after 128 steps.
    """
    store, old = world.run.store, (compaction.FILE_STEPS, compaction.MARGIN_STEPS)
    world.wait_for("a step that can be compacted", lambda: world.committed >= 6, RECOVERY_SECONDS)
    compaction.FILE_STEPS, compaction.MARGIN_STEPS = 2, 2
    try:
        step = world.committed // 2 * 2 - 3
        # A trainer or hub that was killed may have left another attempt of the step beside the committed one.
        path = world.directory / read_commit(store, counted_commit_keys(store)[step]).batches[0].name
        whole = path.read_bytes()  # rclone keeps the size of a file that it has served
        path.write_bytes(flipped(whole, world))
        compaction.compact_commits(store)
        compact_rollouts(store)
        covered = [steps for steps in list_rollouts(store) if steps.first <= step <= steps.last]
        path.write_bytes(whole)
        compact_rollouts(store)
        now = [steps for steps in list_rollouts(store) if steps.first <= step <= steps.last]
    finally:
        compaction.FILE_STEPS, compaction.MARGIN_STEPS = old
    assert now, f"the rollouts of step {step} are in no object after the batch was right again"
    assert not covered or len(read_rollouts(store, now[0], ["step"])), f"step {step} has no rows in its object"
    return f"step {step}, {'compacted before' if covered else 'compacted after the repair'}"


def store_outage(world: World) -> str:
    """S3 is away for longer than all restarts of the roles: the run ends as resumable, and is resumed afterwards.

    The flow is killed first, so that its next start has few restarts: with all of a campaign this would take hours.
    """
    assert world.proxy is not None
    world.kill_command()
    world.resume("placement.max_restarts=1")
    step = world.committed
    world.wait_for("a step before the outage", lambda: world.committed > step, RECOVERY_SECONDS)
    world.proxy.mode, begun = "503", time.monotonic()
    try:
        code = world.await_end(OUTAGE_SECONDS)
    finally:
        world.proxy.mode = "pass"
    assert code == EXIT_STORE, f"an outage of the store ended the run with exit code {code}: {world.log_tail()}"
    step = world.committed
    world.resume("placement.max_restarts=1000")
    world.wait_for("a step after the outage", lambda: world.committed > step, RECOVERY_SECONDS)
    return f"{time.monotonic() - begun:.0f} s, start {world.num_starts}"


def bare_connections(world: World) -> str:
    """TCP connections that say nothing use up the descriptors of the hub for longer than a lease."""
    hub = world.process("roles.hub")
    host, port = urlsplit(read_record(world.run.store, HUB_KEY, HubRecord).url).netloc.rsplit(":", 1)
    limits = hub.rlimit(psutil.RLIMIT_NOFILE)
    hub.rlimit(psutil.RLIMIT_NOFILE, (hub.num_fds() + SPARE_DESCRIPTORS, limits[1]))
    connections = []
    try:
        for _ in range(4 * SPARE_DESCRIPTORS):  # what the hub does not accept waits in the queue of its socket
            connection = socket.socket()
            connection.setblocking(False)
            connection.connect_ex((host, int(port)))
            connections.append(connection)
        time.sleep(LEASE_SECONDS + 1)
        left = hub.rlimit(psutil.RLIMIT_NOFILE)[0] - hub.num_fds()
    finally:
        for connection in connections:
            connection.close()
        with suppress(psutil.NoSuchProcess):
            hub.rlimit(psutil.RLIMIT_NOFILE, limits)
    return f"{len(connections)} connections, {left} descriptors left"


def disk_full(world: World) -> str:
    """No file of one role can grow for a while: its writes fail as on a full disk."""
    role = world.random.choice(_ROLES)
    process = world.process(role)
    with suppress(psutil.NoSuchProcess):
        limits = process.rlimit(psutil.RLIMIT_FSIZE)
        process.rlimit(psutil.RLIMIT_FSIZE, (0, limits[1]))
        time.sleep(STORE_SECONDS)
        process.rlimit(psutil.RLIMIT_FSIZE, limits)
    return role


def damage(path: Path, world: World) -> None:
    """Flip a bit, or tear the end off."""
    data = path.read_bytes()
    torn = data[: world.random.randrange(len(data))]
    path.write_bytes(flipped(data, world) if world.random.random() < 0.5 else torn)


def flipped(data: bytes, world: World) -> bytes:
    """The same with one other bit."""
    damaged = bytearray(data)
    damaged[world.random.randrange(len(damaged))] ^= 1 << world.random.randrange(8)
    return bytes(damaged)


def last_change(path: Path) -> float:
    """When a file was written; 0 if it is gone."""
    try:
        return path.stat().st_mtime
    except FileNotFoundError:
        return 0.0


def damaged_segments(world: World) -> str:
    """The newest segments are damaged, and the hub must read them because it dies."""
    newest = sorted(world.directory.glob("rollouts/*/*/[0-9]*.arrow"), key=last_change)[-3:]
    for path in newest:
        damage(path, world)
    return f"{len(newest)} segments, hub {kill('roles.hub', world)}"


def damaged_log(world: World) -> str:
    """The newest write of the log of open groups is damaged, and its actor dies."""
    logs: list[Path] = []

    def has_any() -> bool:
        logs[:] = sorted(world.directory.glob("partials/*/*/[0-9]*.arrow"), key=last_change)
        return bool(logs)

    world.wait_for("a log of open groups", has_any, 30)
    name = logs[-1].parts[-3]
    with suppress(FileNotFoundError):  # its groups were sealed a moment ago
        damage(logs[-1], world)
    return f"{'/'.join(logs[-1].parts[-3:])}, {name} {kill(f'--name {name}', world)}"


def until_one_is_damaged(choose: Callable[[], str]) -> str:
    """Old versions and checkpoints go while one looks: then another is chosen."""
    for _ in range(20):
        with suppress(FileNotFoundError):
            return choose()
    raise AssertionError("what was to be damaged was always gone")


def damaged_weights(world: World) -> str:
    """The newest weights are damaged wherever they are, and an actor must read them because it dies."""

    def choose() -> str:
        paths = {path: path.stem for path in world.shm.glob("[0-9]*.safetensors")}
        paths |= {path: path.parent.name for path in world.directory.glob("weights/*/*.safetensors")}
        newest = max(paths.values())
        for path in [path for path, version in paths.items() if version == newest]:
            copy = path.with_name(f"copy-{path.name}")  # engines have mapped the file itself
            copy.write_bytes(path.read_bytes())
            damage(copy, world)
            copy.replace(path)
        return newest

    return f"version {until_one_is_damaged(choose)}, actor {kill('roles.actor', world)}"


def damaged_checkpoint(world: World) -> str:
    """The newest checkpoint is damaged, and the trainer must read it because it dies."""

    def choose() -> str:
        newest = max(path.parent for path in world.directory.glob("checkpoints/*/manifest.json"))
        damage(world.random.choice(sorted(newest.glob("state-*.safetensors"))), world)
        return newest.name

    return f"step {until_one_is_damaged(choose)}, trainer {kill('roles.trainer.main --run', world)}"


def away(service: Callable[[World], Service], seconds: float, world: World) -> str:
    """kill -9 of a server, which comes back after a while; the faults after this one do not wait for it."""
    world.await_servers()
    server = service(world)
    server.kill()
    timer = threading.Timer(seconds, server.start)
    timer.start()
    world.returning.append(timer)
    return f"{seconds:.0f} s"


def catalogue(
    kind: StoreKind, *, away_seconds: float = AWAY_SECONDS, settings: Sequence[str] = ()
) -> dict[str, Fault]:
    """Name -> fault, of all that can happen to a run with these settings on this kind of store."""
    faults: dict[str, Fault] = {
        "kill hub": partial(kill, "roles.hub"),
        "kill trainer": partial(kill, "roles.trainer.main --run"),
        "kill actor": partial(kill, "roles.actor"),
        "kill reward worker": partial(kill, "rewards.worker"),
        "kill flow": kill_flow,
        "stop hub": partial(stop, "roles.hub"),
        "stop trainer": partial(stop, "roles.trainer.main --run"),
        "stop actor": partial(stop, "roles.actor"),
        "stop reward worker": partial(stop, "rewards.worker"),
        "second trainer": second_trainer,
        "clock an hour ahead": partial(step_clock, 1.0),
        "clock an hour behind": partial(step_clock, -1.0),
        "segments damaged": damaged_segments,
        "log damaged": damaged_log,
        "weights damaged": damaged_weights,
        "checkpoint damaged": damaged_checkpoint,
        "bare connections": bare_connections,
        "listing fails": listings_fail,
        "foreign file": foreign_files,
        "bit flip in a batch before compaction": flipped_batch,
        "Prefect away": partial(away, lambda world: world.prefect, away_seconds),
        "MLflow away": partial(away, lambda world: world.mlflow, away_seconds),
    }
    if "engine.kind=vllm" in settings:
        faults["kill engine core"] = partial(kill, "VLLM::EngineCore")
    if any(setting.startswith("trainer.ranks=") and setting != "trainer.ranks=1" for setting in settings):
        faults |= {"kill rank": partial(kill, "roles.trainer.rank"), "stop rank": partial(stop, "roles.trainer.rank")}
    if kind == "s3":
        modes = {"503": "503", "slow": "slow", "torn": "torn", "full": "full"}
        faults |= {f"store {name}": partial(store_fails, mode) for name, mode in modes.items()}
        faults["proxy answers HTML"] = partial(store_fails, "html")
        return faults | {"store outage": store_outage}
    return faults | {"disk full": disk_full}
