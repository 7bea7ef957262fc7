"""A whole run of hub, trainer and actor as supervised processes, without Prefect, MLflow and checks before the start.

The program starts, restarts and evaluates roles as the train flow does (supervision/run_roles.py).
"""

import secrets
import time
from collections.abc import Callable
from dataclasses import replace
from threading import Event, Thread
from typing import Any

import psutil

from pipelinerl_core.config import RunConfig
from pipelinerl_core.errors import DeadlineExceeded
from pipelinerl_core.run.context import RunContext
from pipelinerl_core.run.history import counted_commit_keys
from pipelinerl_core.run.locate import create_run, remove_shared_memory
from pipelinerl_core.supervision.run_roles import evaluate, is_over, supervise

POLL_SECONDS = 0.2
STOP_SECONDS = 20.0
"""Deadline for the end of all roles."""
Watcher = Callable[["LocalRun"], None]


class LocalRun:
    """Roles of a run as processes of this host, each supervised by a thread."""

    def __init__(self, url: str, config: RunConfig, seconds: float) -> None:
        """seconds: deadline of the training, evaluations included."""
        context = create_run(url, config, flow_run_id="", mlflow=None)
        self.context: RunContext = replace(context, token=secrets.token_hex(16))
        self._deadline = time.monotonic() + seconds
        self._errors: list[BaseException] = []
        self._stops: dict[str, tuple[Event, Thread]] = {}

    def train(self, watch: Watcher = lambda run: None) -> dict[str, Any]:
        """Train to the last step, with evaluations before and after; watch: called while waiting.

        Returns accuracies, the seconds from the start of the actor, and the monotonic time of the last step. Raises
        DeadlineExceeded, and the error of a role that failed.
        """
        accuracies: dict[str, Any] = {}
        try:
            for role in ("hub", "trainer"):
                self._start(role, role, {})
            self._wait("the initial weights", lambda: self.committed >= 0)
            if self.context.config.eval.num_prompts:
                accuracies["accuracy_before"] = self._evaluate("first")
            started = time.monotonic()
            self._start("actor", "actor-0", {"name": "actor-0"})
            self._wait("the last step", lambda: is_over(self.context), watch)
            ended = time.monotonic()
            self._stop("actor-0")
            if self.context.config.eval.num_prompts:
                accuracies["accuracy_after"] = self._evaluate("last")
        finally:
            for name in ("actor-0", "trainer", "hub"):  # the others need the hub until their end
                self._stop(name)
            remove_shared_memory(self.context)
        return {**accuracies, "train_seconds": ended - started, "ended": ended}

    @property
    def committed(self) -> int:
        """The newest committed step, -1 before the first commit."""
        return max(counted_commit_keys(self.context.store), default=-1)

    def process(self, role: str) -> psutil.Process | None:
        """The process of a role; None while there is none."""
        module = f"pipelinerl_core.roles.{role}.main"
        for process in psutil.Process().children(recursive=True):
            try:
                command = process.cmdline()
            except psutil.Error:
                continue
            if command[1:3] == ["-m", module]:
                return process
        return None

    def _start(self, role: str, name: str, arguments: dict[str, str]) -> None:
        stop = Event()

        def target() -> None:
            try:
                supervise(self.context, role, name, arguments, stop)
            except BaseException as error:  # noqa: BLE001 - raised in the thread that waits
                self._errors.append(error)

        thread = Thread(target=target, name=name, daemon=True)
        self._stops[name] = (stop, thread)
        thread.start()

    def _stop(self, name: str) -> None:
        if name in self._stops:
            stop, thread = self._stops.pop(name)
            stop.set()
            thread.join(STOP_SECONDS)

    def _evaluate(self, version: str) -> float:
        records = evaluate(self.context, version, Event())
        if not records:
            raise RuntimeError(f"the evaluator of {version} was stopped")
        return records[0].accuracy

    def _wait(self, event: str, condition: Callable[[], bool], watch: Watcher = lambda run: None) -> None:
        while not condition():
            if self._errors:
                raise self._errors[0]
            if time.monotonic() > self._deadline:
                raise DeadlineExceeded(f"{event}: not reached in time, step {self.committed} is committed")
            watch(self)
            time.sleep(POLL_SECONDS)
