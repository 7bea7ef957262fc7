"""A real hub under the load of `bench stream`: its process, processes of simulated actors, and a simulated trainer.

The hub is the role itself on a run in a temporary directory. The trainer is this process: it reserves, fetches the
rows, reads their tokens and log-probabilities as numpy views, and commits; it neither trains nor writes anything.
"""

import json
import os
import secrets
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from pipelinerl_core.bench.stream_actors import Seal
from pipelinerl_core.bench.stream_rows import GROUP_SIZE, RUN_ID
from pipelinerl_core.channel.client import HubClient
from pipelinerl_core.config import RunConfig, build_config
from pipelinerl_core.data.codec import flat_list
from pipelinerl_core.errors import HubUnavailable, PipelineRLError
from pipelinerl_core.interfaces import ObjectStore
from pipelinerl_core.messages import Ack, Committed, FateRecord, Register, Registered, Reserve, Reserved, Rows
from pipelinerl_core.run.context import TOKEN_VARIABLE
from pipelinerl_core.run.hub_status import read_hub
from pipelinerl_core.run.reading import read_record
from pipelinerl_core.run.records import HUB_KEY, RUN_KEY, HubRecord, RunRecord
from pipelinerl_core.storage.object_store import open_store
from pipelinerl_core.types import WeightManifest

START_SECONDS = 60.0
"""Longest time for the hub to start, or for the actors to connect."""
_EPOCH = 1
_READ_COLUMNS = ("completion_token_ids", "rollout_logprobs")
_ACTOR_PROCESSES = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One constellation to be measured."""

    num_actors: int
    num_tokens: int
    """Of each completion of a group of GROUP_SIZE."""
    groups_per_step: int = 256
    num_leases: int = 8
    """Groups that each actor wants to hold."""
    burst: int = 1 << 30
    """Groups that an actor sends together."""
    seal: Seal = Seal.SAY
    max_groups: int = 0
    """That all actors send together; 0: no end."""
    pause_seconds: float = 0.0
    """Of an actor after each sending."""
    overrides: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Section -> settings of the run."""

    def config(self) -> RunConfig:
        """Of a run that admits all these leases, and the groups of three steps besides."""
        window = self.num_actors * self.num_leases + 3 * self.groups_per_step
        sections: dict[str, dict[str, Any]] = {
            # by its longest completion the hub judges how many groups it has room for, until it has seen some
            "rollouts": {"group_size": GROUP_SIZE, "max_tokens": self.num_tokens},
            "engine": {"concurrency": GROUP_SIZE},
            "schedule": {"max_lag": -(-window // self.groups_per_step)},
            "trainer": {"groups_per_step": self.groups_per_step, "steps": 10**7},
        }
        for name, settings in self.overrides.items():
            sections.setdefault(name, {}).update(settings)
        return build_config(sections)


class HubUnderLoad:
    """A hub and its simulated actors; `open` starts and ends them."""

    def __init__(self, cell: Cell, directory: Path) -> None:
        """`directory`: of the run, empty."""
        self.cell = cell
        self.url = f"file://{directory}"
        self.token = secrets.token_hex(16)
        self.store: ObjectStore = open_store(self.url)
        record = RunRecord(
            run_id=RUN_ID, created_at=time.time(), code_version="", config=cell.config().model_dump(mode="json")
        )
        self.store.put(RUN_KEY, record.model_dump_json().encode())
        self._log = directory / "hub.log"
        self.children: list[subprocess.Popen[str]] = []
        self.actors: list[subprocess.Popen[str]] = []
        self.hub = self._start_hub()
        self.process = psutil.Process(self.hub.pid)

    @classmethod
    @contextmanager
    def open(cls, cell: Cell) -> "Iterator[HubUnderLoad]":
        """Raises PipelineRLError when the hub does not start or the actors do not connect."""
        with tempfile.TemporaryDirectory(prefix="bench-stream-") as directory:
            load = cls(cell, Path(directory))
            try:
                load.connect_actors()
                yield load
            finally:
                load.end()

    def begin(self) -> None:
        """Let the actors send."""
        for actor in self.actors:
            assert actor.stdin is not None
            actor.stdin.write("go\n")
            actor.stdin.flush()

    def finish(self) -> dict[str, int]:
        """End the actors; what they have done in all."""
        totals: dict[str, int] = {}
        for actor in self.actors:
            assert actor.stdin is not None
            actor.stdin.close()
        for actor in self.actors:
            for name, number in self._hear(actor).items():
                totals[name] = totals.get(name, 0) + number
        self.actors = []
        return totals

    def cpu_seconds(self) -> tuple[float, float]:
        """(the hub's, that of all actors), user and system."""
        times = self.process.cpu_times()
        actors = [psutil.Process(actor.pid).cpu_times() for actor in self.actors]
        return times.user + times.system, sum(actor.user + actor.system for actor in actors)

    @property
    def rss_bytes(self) -> int:
        """Memory of the hub."""
        return int(self.process.memory_info().rss)

    def live(self) -> dict[str, Any]:
        """What hub.json says, a second old at most."""
        return read_record(self.store, HUB_KEY, HubRecord).live

    def hub_url(self) -> str:
        """Where the hub listens."""
        deadline = time.monotonic() + START_SECONDS
        while time.monotonic() < deadline and self.hub.poll() is None:
            hub = read_hub(self.store)
            if hub is not None:
                return hub.url
            time.sleep(0.02)
        raise HubUnavailable(f"the hub did not start: {self._log.read_text()[-500:]}")

    def connect_actors(self) -> None:
        """Start their processes and wait until every actor has registered."""
        cell = self.cell
        share = -(-cell.num_actors // _ACTOR_PROCESSES)
        for first in range(0, cell.num_actors, share):
            arguments = {
                "run": self.url,
                "url": self.hub_url(),
                "parent-pid": os.getpid(),
                "first": first,
                "num": min(share, cell.num_actors - first),
                "tokens": cell.num_tokens,
                "leases": cell.num_leases,
                "burst": cell.burst,
                "seal": cell.seal,
                "max-groups": cell.max_groups // len(range(0, cell.num_actors, share)),
                "pause-seconds": cell.pause_seconds,
            }
            options = [text for name, value in arguments.items() for text in (f"--{name}", str(value))]
            self.actors.append(self._start("pipelinerl_core.bench.stream_actors", options, stderr=None))
        for actor in self.actors:
            self._hear(actor)

    def end(self) -> None:
        """Stop everything that runs, the hub last."""
        for child in reversed(self.children):
            child.kill()
            child.wait(timeout=10)
            for pipe in (child.stdin, child.stdout):
                if pipe is not None:
                    pipe.close()

    def _start_hub(self) -> subprocess.Popen[str]:
        with open(self._log, "w", encoding="utf-8") as log:
            return self._start(
                "pipelinerl_core.roles.hub.main", ["--run", self.url, "--parent-pid", str(os.getpid())], stderr=log
            )

    def _start(self, module: str, options: list[str], stderr: Any) -> subprocess.Popen[str]:
        child = subprocess.Popen(
            [sys.executable, "-m", module, *options],
            env={**os.environ, TOKEN_VARIABLE: self.token, "OMP_NUM_THREADS": "1"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=stderr,
            text=True,
        )
        self.children.append(child)
        return child

    def _hear(self, actor: subprocess.Popen[str]) -> dict[str, int]:
        assert actor.stdout is not None
        line = actor.stdout.readline()
        if not line:
            raise PipelineRLError("simulated actors ended before their time; their lines above say why")
        counts: dict[str, int] = json.loads(line)
        return counts


class SimulatedTrainer:
    """Takes step after step; counts, and refuses to get a group twice. Raises PipelineRLError for any refusal."""

    def __init__(self, url: str, token: str, num_tokens: int) -> None:
        self._client = HubClient(url, token=token, role="trainer", name="trainer")
        self._num_tokens = GROUP_SIZE * num_tokens
        self._step = 0
        self.seen: set[tuple[int, int]] = set()
        self.latencies: list[float] = []
        """Seconds from the making of each group's rows to their being read."""
        registered = self._client.request(Register(role="trainer", name="trainer", epoch=_EPOCH))
        if not isinstance(registered, Registered):
            raise PipelineRLError(f"the hub does not register the trainer: {registered}")
        self._commit((), ())

    def take_step(self, wait_seconds: float = 0.5) -> int:
        """Reserve, fetch, read and commit; the number of groups, 0 if there were too few within the wait."""
        answer, at_hand = self._client.reserve(Reserve(step=self._step, epoch=_EPOCH, wait_seconds=wait_seconds))
        if not isinstance(answer, Reserved):
            raise PipelineRLError(f"the hub does not reserve step {self._step}: {answer}")
        if not answer.is_ready:
            return 0
        groups = tuple((ref.group_id, ref.attempt) for ref in answer.groups)
        missing = set(groups) - {(header.group_id, header.attempt) for header, _ in at_hand}
        others = self._client.request_rows(Rows(step=self._step, groups=tuple(missing))) if missing else []
        for header, rows in (*at_hand, *others):
            key = (header.group_id, header.attempt)
            if key in self.seen or rows.num_rows != GROUP_SIZE:
                raise PipelineRLError(f"group {key} came twice, or with {rows.num_rows} rows")
            self.seen.add(key)
            for name in _READ_COLUMNS:
                offsets, values = flat_list(rows.column(name))
                if len(values) != self._num_tokens or offsets[-1] != self._num_tokens:
                    raise PipelineRLError(f"group {key}: {len(values)} values of {name}")
            self.latencies.append(time.time() - rows.column("finished_at")[0].as_py())
        self._commit(groups, answer.fates)
        return len(groups)

    def close(self) -> None:
        """Leave."""
        self._client.close()

    def _commit(self, groups: tuple[tuple[int, int], ...], fates: tuple[FateRecord, ...]) -> None:
        manifest = WeightManifest(
            version=self._step, epoch=_EPOCH, files=(), key=None, shm=None, host="", published_at=time.time()
        )
        answer = self._client.request(
            Committed(step=self._step, epoch=_EPOCH, manifest=manifest, groups=groups, fates=fates)
        )
        if not isinstance(answer, Ack):
            raise PipelineRLError(f"the hub refuses the commit of step {self._step}: {answer}")
        self._step += 1
