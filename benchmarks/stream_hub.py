"""A real hub under the load of `bench stream`: the hub's process, the process of the actors, and a simulated trainer.

The hub serves a run in a temporary directory. The trainer is this process: it reserves steps, fetches the rows, reads
tokens and log-probabilities as numpy views, and commits. The trainer neither trains nor writes.
"""

import multiprocessing
import os
import secrets
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil

from benchmarks.stream_actors import GROUP_SIZE, RUN_ID, Cell, run_actors
from pipelinerl_core.channel.client import HubClient
from pipelinerl_core.config import RunConfig
from pipelinerl_core.data.codec import flat_list
from pipelinerl_core.errors import DeadlineExceeded, HubUnavailable, PipelineRLError
from pipelinerl_core.interfaces import ObjectStore
from pipelinerl_core.messages import Ack, Committed, FateRecord, Register, Registered, Reserve, Reserved, Rows
from pipelinerl_core.models.resolve import build_config
from pipelinerl_core.run.context import TOKEN_VARIABLE
from pipelinerl_core.run.hub_status import read_hub
from pipelinerl_core.run.reading import read_record
from pipelinerl_core.run.records import HUB_KEY, RUN_KEY, HubRecord, RunRecord
from pipelinerl_core.storage.object_store import open_store
from pipelinerl_core.types import WeightManifest

START_SECONDS = 60.0
"""Longest time for the hub to start, for the actors to connect, and for the actors to end."""
_EPOCH = 1
_READ_COLUMNS = ("completion_token_ids", "rollout_logprobs")


def run_config(cell: Cell) -> RunConfig:
    """A run that admits the leases of all actors and three more steps of groups."""
    window = cell.num_actors * cell.num_leases + 3 * cell.groups_per_step
    return build_config(
        {
            # Until the first groups arrive, the hub computes their size from max_tokens.
            "rollouts": {"group_size": GROUP_SIZE, "max_tokens": cell.num_tokens},
            "engine": {"concurrency": GROUP_SIZE},
            "schedule": {"max_lag": -(-window // cell.groups_per_step)},
            "trainer": {"groups_per_step": cell.groups_per_step, "steps": 10**7},
            "placement": {"hub_bytes": cell.hub_bytes},
        }
    )


class HubUnderLoad:
    """A hub and its simulated actors; `open` starts and ends the processes."""

    def __init__(self, cell: Cell, directory: Path) -> None:
        """`directory`: the run's, empty."""
        self.token = secrets.token_hex(16)
        self._url = f"file://{directory}"
        self._store: ObjectStore = open_store(self._url)
        config = run_config(cell).model_dump(mode="json")
        record = RunRecord(run_id=RUN_ID, created_at=time.time(), code_version="", config=config)
        self._store.put(RUN_KEY, record.model_dump_json().encode())
        self._log = directory / "hub.log"
        with open(self._log, "w", encoding="utf-8") as log:
            self._hub = subprocess.Popen(
                [sys.executable, "-m", "pipelinerl_core.roles.hub.main", "--run", self._url,
                 "--parent-pid", str(os.getpid())],
                env={**os.environ, TOKEN_VARIABLE: self.token, "OMP_NUM_THREADS": "1"}, stderr=log,
            )  # fmt: skip
        self._process = psutil.Process(self._hub.pid)
        spawn = multiprocessing.get_context("spawn")
        self._connection, actors_end = spawn.Pipe()
        arguments = (actors_end, os.getpid(), cell, self._url, self.token)
        self._actors = spawn.Process(target=run_actors, args=arguments, daemon=True)
        self._actors.start()
        actors_end.close()

    @classmethod
    @contextmanager
    def open(cls, cell: Cell) -> "Iterator[HubUnderLoad]":
        """Raises PipelineRLError if the hub does not start or the actors do not connect."""
        with tempfile.TemporaryDirectory(prefix="bench-stream-") as directory:
            load = cls(cell, Path(directory))
            try:
                load._connection.send(load.hub_url())
                load._receive()
                yield load
            finally:
                load._actors.kill()
                load._actors.join(timeout=10)
                load._hub.kill()
                load._hub.wait(timeout=10)

    def begin(self) -> None:
        """Let the actors send."""
        self._connection.send(None)

    def finish(self) -> tuple[int, int]:
        """End the actors; returns the numbers of groups that the hub accepted and refused."""
        self._connection.send(None)
        counts: tuple[int, int] = self._receive()
        return counts

    def cpu_seconds(self) -> float:
        times = self._process.cpu_times()
        return float(times.user + times.system)

    def rss_bytes(self) -> int:
        return int(self._process.memory_info().rss)

    def live(self) -> dict[str, Any]:
        """The hub's state in hub.json, one second old at most."""
        return read_record(self._store, HUB_KEY, HubRecord).live

    def hub_url(self) -> str:
        """Waits until the hub serves. Raises HubUnavailable."""
        deadline = time.monotonic() + START_SECONDS
        while time.monotonic() < deadline and self._hub.poll() is None:
            hub = read_hub(self._store)
            if hub is not None:
                return hub.url
            time.sleep(0.02)
        raise HubUnavailable(f"the hub did not start: {self._log.read_text()[-500:]}")

    def _receive(self) -> Any:
        if not self._connection.poll(START_SECONDS):
            raise DeadlineExceeded(f"no answer of the simulated actors within {START_SECONDS:.0f} s")
        try:
            return self._connection.recv()
        except EOFError:
            raise PipelineRLError("the simulated actors have ended; see the lines above") from None


class SimulatedTrainer:
    """Takes one step after the other. Raises PipelineRLError if the hub refuses a request or sends a group twice."""

    def __init__(self, url: str, token: str, num_tokens: int) -> None:
        self._client = HubClient(url, token=token, role="trainer", name="trainer")
        self._num_tokens = GROUP_SIZE * num_tokens
        self._step = 0
        self.seen: set[tuple[int, int]] = set()
        self.latencies: list[float] = []
        """For each group: seconds from the creation of the rows in the actor to the end of reading in the trainer."""
        registered = self._client.request(Register(role="trainer", name="trainer", epoch=_EPOCH))
        if not isinstance(registered, Registered):
            raise PipelineRLError(f"the hub does not register the trainer: {registered}")
        self._commit(())

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
                raise PipelineRLError(f"group {key} arrived twice, or with {rows.num_rows} rows")
            self.seen.add(key)
            for name in _READ_COLUMNS:
                offsets, values = flat_list(rows.column(name))
                if len(values) != self._num_tokens or offsets[-1] != self._num_tokens:
                    raise PipelineRLError(f"group {key}: {len(values)} values of {name}")
            self.latencies.append(time.time() - rows.column("finished_at")[0].as_py())
        self._commit(answer.decided)
        return len(groups)

    def close(self) -> None:
        self._client.close()

    def _commit(self, fates: tuple[FateRecord, ...]) -> None:
        manifest = WeightManifest(
            version=self._step, epoch=_EPOCH, files=(), key=None, shm=None, host="", published_at=time.time()
        )
        answer = self._client.request(Committed(step=self._step, epoch=_EPOCH, manifest=manifest, fates=fates))
        if not isinstance(answer, Ack):
            raise PipelineRLError(f"the hub refuses the commit of step {self._step}: {answer}")
        self._step += 1
