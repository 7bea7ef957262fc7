"""One run and everything around it: servers, the store behind a proxy, the command, and its processes."""

import json
import os
import random
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal

import psutil

from pipelinerl_core.run.context import RunContext, open_run
from pipelinerl_core.run.drain import ask_to_drain
from pipelinerl_core.supervision.temporary_directories import compiler_cache, link_compiler_cache
from pipelinerl_core.weights.memory import shm_directory
from tests.chaos.proxy import FaultyProxy
from tests.chaos.services import mlflow_server, prefect_server
from tests.s3_server import BUCKET, aws_variables, start_rclone, stop_rclone

ROOT = Path(__file__).parents[2]
LEASE_SECONDS = 4.0
FIRST_SECONDS = 600.0
"""From the start of the command to the third step: two engines of vLLM load, beside whatever else a machine does."""
RECOVERY_SECONDS = 300.0
"""Longest time between a fault and two further commits, and until there is a process for the next fault."""
END_SECONDS = 240.0
"""From the wish to drain to the end of the command; MLflow may have been away until then."""

StoreKind = Literal["file", "s3"]
SETTINGS = (
    f"placement.lease_seconds={LEASE_SECONDS:g}",
    "placement.actors=2",
    "placement.max_restarts=1000",
    "trainer.groups_per_step=16",
    "engine.concurrency=32",
    "checkpoint.every_seconds=3",
    "store.partial_seconds=0.5",
    "eval.num_prompts=0",
    "trainer.steps=3000",  # it is drained when enough has gone wrong
)


class World:
    """`start`, then faults, then `finish`; `close` whatever happened."""

    def __init__(self, home: Path, store: StoreKind, *, seed: int, settings: Sequence[str] = ()) -> None:
        self.home, self.kind = home, store
        self.random = random.Random(seed)
        self.settings = (*SETTINGS, *settings)
        self.prefect, self.mlflow = prefect_server(home), mlflow_server(home)
        self.proxy: FaultyProxy | None = None
        self._directory = home / "runs"
        self._clock = home / "clock"
        self.set_clock(0.0)
        self._rclone: Any = None
        self._command: subprocess.Popen[str] | None = None
        self._temporary = Path(tempfile.mkdtemp(prefix="chaos-"))
        """TMPDIR of the command; short, as the system's own is."""
        link_compiler_cache(self._temporary)
        self._seen: dict[int, float] = {}
        """pid -> creation time of every process the run ever had, as far as somebody looked."""
        self._memory: set[Path] = set()
        """Shared memory that they had open."""
        self.num_starts = 0
        self.returning: list[threading.Timer] = []
        """They bring servers back that are away."""

    # ---- from the start to the end ---------------------------------------------------------------------------

    def start(self) -> None:
        """Servers, then the run; returns when its third step is committed."""
        for service in (self.prefect, self.mlflow):
            service.start()
        if self.kind == "s3":
            self._rclone = start_rclone(self.home / "s3")
            self.proxy = FaultyProxy(self._rclone.endpoint, self.random.randrange(1 << 30))
            self._prefix = uuid.uuid4().hex[:8]
            self.root, self._directory = f"s3://{BUCKET}/{self._prefix}", self.home / "s3" / BUCKET / self._prefix
        else:
            self._directory.mkdir()
            self.root = f"file://{self._directory}"
        for service in (self.prefect, self.mlflow):
            service.wait()
        settings = (*self.settings, f"tracking.mlflow_uri={self.mlflow.url}")
        self._launch("train", "quickstart", *settings)
        self.wait_for("the first steps", lambda: self.committed >= 3, FIRST_SECONDS)

    def resume(self, *overrides: str) -> None:
        """Start a command that goes on with the run, which must not be running."""
        self.await_servers()
        self._launch("resume", self.directory.name, *overrides)

    def await_end(self, seconds: float) -> int:
        """Wait until the command has ended by itself; its exit code. All that it started must have ended too."""
        assert self._command is not None

        def has_ended() -> bool:
            self.look()
            return self._command is not None and self._command.poll() is not None

        self.wait_for("the end of the command", has_ended, seconds, is_running=False)
        self.wait_for("the end of every child", lambda: not self.leftover_processes(), 20, is_running=False)
        return int(self._command.returncode)

    def finish(self) -> dict[str, Any]:
        """Drain the run and wait for its end; its report."""
        assert self._command is not None
        self.await_servers()
        ask_to_drain(self.run.store, by="chaos")
        deadline = time.monotonic() + END_SECONDS
        while self._command.poll() is None:
            self.look()
            assert time.monotonic() < deadline, f"the run did not end within {END_SECONDS:g} s: {self.log_tail()}"
            time.sleep(0.3)
        assert self._command.returncode == 0, self.log_tail()
        report: dict[str, Any] = json.loads((self.home / "stdout.txt").read_text())
        return report

    def set_clock(self, offset_seconds: float) -> None:
        """Set the wall clock of all processes of the run, relative to the clock of this host."""
        with self._clock.open("r+b" if self._clock.exists() else "wb") as file:  # in place: they have mapped the file
            file.write(struct.pack("d", offset_seconds))

    def fail_listings(self, is_failing: bool) -> None:
        """Whether listings of the store fail, in all processes of the run."""
        if self.proxy is not None:
            self.proxy.mode = "list" if is_failing else "pass"
        elif is_failing:
            self._clock.with_name("clock.listings-fail").touch()
        else:
            self._clock.with_name("clock.listings-fail").unlink()

    def await_servers(self) -> None:
        """Until Prefect and MLflow answer; those that are away come back first."""
        for timer in self.returning:
            timer.join()
        self.returning.clear()
        for service in (self.prefect, self.mlflow):
            service.wait()

    def close(self) -> None:
        """End what is left of it all."""
        for timer in self.returning:
            timer.cancel()
            timer.join()  # it may be at it already
        if self._command is not None and self._command.poll() is None:
            with suppress(AssertionError):  # the complaint is another one
                self.kill_command()
        for service in (self.prefect, self.mlflow):
            service.kill()
        if self.proxy is not None:
            self.proxy.shutdown()
            self.proxy.server_close()
        if self._rclone is not None:
            stop_rclone(self._rclone.process)
        runs = [path.parent.name for path in self._directory.glob("*/run.json")]
        for path in [self._temporary, *map(shm_directory, runs)]:
            shutil.rmtree(path, ignore_errors=True)

    def _launch(self, *arguments: str) -> None:
        environment = {**os.environ, "TMPDIR": str(self._temporary), **self.aws(self.proxy)}
        environment["PREFECT_API_URL"] = f"{self.prefect.url}/api"
        environment["CHAOS_CLOCK"] = str(self._clock)
        paths = [str(Path(__file__).parent / "clock"), os.environ.get("PYTHONPATH", "")]
        environment["PYTHONPATH"] = os.pathsep.join(path for path in paths if path)
        command = [sys.executable, "-m", "pipelinerl.flows.cli", *arguments, "--root", self.root, "--json"]
        with (self.home / "stdout.txt").open("w") as results, (self.home / "stderr.txt").open("a") as log:
            self._command = subprocess.Popen(
                command, cwd=ROOT, env=environment, stdout=results, stderr=log, text=True, start_new_session=True
            )
        self.num_starts += 1

    def aws(self, proxy: FaultyProxy | None) -> dict[str, str]:
        """Environment of those who use the store, through the proxy or (None) around it."""
        if self.kind == "file":
            return {}
        return aws_variables(self._rclone.endpoint if proxy is None else proxy.endpoint)

    # ---- looking ---------------------------------------------------------------------------------------------

    @property
    def directory(self) -> Path:
        """Where the run's objects lie on this disk, on S3 too."""
        (path,) = [path.parent for path in self._directory.glob("*/run.json")]
        return path

    @property
    def run(self) -> RunContext:
        """The run, read around the proxy."""
        os.environ.update(self.aws(None))
        return open_run(f"{self.root}/{self.directory.name}")

    @property
    def shm(self) -> Path:
        """Shared memory of the run."""
        return shm_directory(self.directory.name)

    @property
    def committed(self) -> int:
        """Newest step that has a commit, -1 before there is one."""
        keys = self._directory.glob("*/commits/[0-9]*.json")
        return max((int(path.name.split(".")[0]) for path in keys), default=-1)

    def look(self) -> list[psutil.Process]:
        """Processes below the command, remembered for `leftovers`."""
        assert self._command is not None
        try:
            processes = psutil.Process(self._command.pid).children(recursive=True)
        except psutil.NoSuchProcess:
            return []
        for process in processes:
            try:
                self._seen[process.pid] = process.create_time()
            except psutil.NoSuchProcess:
                continue
        return processes

    def look_at_memory(self) -> None:
        """Shared memory of the processes (vLLM's channels), remembered for `leftovers`."""
        for process in self.look():
            with suppress(OSError):
                lines = Path(f"/proc/{process.pid}/maps").read_text().splitlines()
                self._memory.update(Path(line.split()[-1]) for line in lines if "/dev/shm/psm_" in line)

    def leftovers(self) -> list[str]:
        """Processes, shared memory and temporary files that have outlived the run."""
        leftovers = self.leftover_processes() + ([str(self.shm)] if self.shm.exists() else [])
        kept = (compiler_cache().name, f"pipelinerl-{os.getuid()}")  # the latter: logs of runs on S3
        leftovers += [str(path) for path in self._temporary.iterdir() if path.name not in kept]
        return leftovers + [str(path) for path in self._memory if path.exists()]

    def leftover_processes(self) -> list[str]:
        """`leftovers` without the files, which a killed flow cannot remove; the next one does."""
        command_lines = []
        for pid, created in self._seen.items():
            try:
                process = psutil.Process(pid)
                if process.create_time() == created and process.status() != psutil.STATUS_ZOMBIE:
                    command_lines.append(" ".join(process.cmdline()))
            except psutil.NoSuchProcess:
                continue
        return command_lines

    def process(self, *words: str) -> psutil.Process:
        """One of the processes of the run whose command line has all of these words; waits for one."""
        processes: list[psutil.Process] = []

        def has_any() -> bool:
            processes[:] = [process for process in self.look() if has_words(process, words)]
            return bool(processes)

        self.wait_for(f"a process with {words}", has_any, RECOVERY_SECONDS)
        return self.random.choice(processes)

    def kill_command(self) -> None:
        """kill -9 of the flow; returns when all that it started has gone with it."""
        assert self._command is not None
        self.look()
        self._command.send_signal(signal.SIGKILL)
        self._command.wait(60)
        self.wait_for("the end of every child", lambda: not self.leftover_processes(), 20, is_running=False)
        for path in self._temporary.glob("tmp*"):  # its own, of an upload to MLflow; nobody knows them now
            shutil.rmtree(path, ignore_errors=True)

    def wait_for(
        self, event: str, condition: Callable[[], bool], seconds: float, *, is_running: bool = True,
        poll_seconds: float = 0.1,
    ) -> float:  # fmt: skip
        """Poll until it holds, returns the seconds; fails at the deadline, or when the command has ended."""
        assert self._command is not None
        begun = time.monotonic()
        while not condition():
            assert not is_running or self._command.poll() is None, f"the run ended before {event}: {self.log_tail()}"
            waited = time.monotonic() - begun
            assert waited < seconds, f"{event} did not happen within {seconds:g} s: {self.log_tail()}"
            if poll_seconds >= 0.1:  # a look takes tens of milliseconds
                self.look()
            time.sleep(poll_seconds)
        return time.monotonic() - begun

    def log_tail(self) -> str:
        """The end of what the command wrote to stderr."""
        return f"see {self.home}\n" + (self.home / "stderr.txt").read_text()[-3000:]


def has_words(process: psutil.Process, words: Sequence[str]) -> bool:
    """Whether a process lives and its command line has all words, each as a part of an argument."""
    try:
        line = " ".join(process.cmdline())
        return process.status() != psutil.STATUS_ZOMBIE and all(word in line for word in words)
    except psutil.Error:
        return False
