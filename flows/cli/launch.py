"""Runs train, compare or sweep for a command: starts a Prefect server if none is set, and handles signals."""

import os
import signal
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from functools import wraps
from threading import Timer
from types import FrameType
from typing import Any

import httpx
from prefect import Flow
from prefect.client.schemas.objects import State
from prefect.events.worker import EventsWorker
from prefect.exceptions import CrashedRun, Pause
from prefect.logging.handlers import APILogWorker
from prefect.settings import PREFECT_API_URL, get_current_settings, temporary_settings

from pipelinerl.flows.cli.console import EXIT_INTERRUPTED, EXIT_TERMINATED, say
from pipelinerl.flows.cli.local_server import local_server
from pipelinerl.flows.compare_flow import compare, compare_runs
from pipelinerl.flows.sweep_flow import sweep
from pipelinerl.flows.train_flow import train, train_run
from pipelinerl.tasks.outage import check_prefect, server_answers
from pipelinerl_core.comparison.plan import Plan
from pipelinerl_core.config import RunConfig
from pipelinerl_core.errors import ConfigError, PipelineRLError, StoreUnavailable
from pipelinerl_core.run.context import RunContext
from pipelinerl_core.run.jobs import Job
from pipelinerl_core.run.locate import plain_name, root_url
from pipelinerl_core.supervision.process_groups import await_groups

DRAIN_SECONDS = 2.0
"""Deadline of sending the last log lines and events to the local server."""
SERVER_SECONDS = 10.0
"""Deadline of an answer of the Prefect server at the end of a flow."""
AGAIN_SECONDS = 30.0
"""Time after which SIGTERM is raised again; an orderly end takes less."""
END_SECONDS = 15.0
"""Deadline of the end of all role processes after a signal; supervision/supervise.py kills the rest earlier."""


def run_training(job: Job) -> dict[str, Any]:
    """Run the train flow in this process for a job whose configuration was checked; returns the report.

    After Ctrl-C or SIGTERM, raises SystemExit with 130 or 143 once all child processes have ended.
    """
    root = root_url(job.root)
    opened: list[RunContext] = []
    parameters = {
        "preset": job.preset,
        "overrides": job.overrides,
        "root": job.root,
        "resume": job.run.store.url if job.run else "",
    }

    def on_open(run: RunContext) -> None:
        opened.append(run)
        say(f"run {run.run_id} at {run.store.url}")

    name = job.run.run_id if job.run else plain_name(job.name)
    flow = _with_body(train, name, lambda: train_run(job, is_checked=True, on_open=on_open))
    report = _run(lambda: flow(**parameters), job.config, root, lambda: _say_how_to_resume(root, opened))
    if report["steps"] < job.config.trainer.steps:
        say(f"drained after step {report['steps']} of {job.config.trainer.steps}")
        _say_how_to_resume(root, opened)
    return report


def run_comparison(plan: Plan, root: str) -> dict[str, Any]:
    """Run the flow compare or sweep in this process for a plan whose first run was checked; returns comparison.json.

    After Ctrl-C or SIGTERM, raises SystemExit like run_training.
    """
    wanted, first = plan.wanted, plan.runs[0]
    if wanted.deployment and not get_current_settings().api.url:
        raise ConfigError("--deployment needs a Prefect server with workers. Set PREFECT_API_URL")
    own = {
        "arms": {arm.name: list(arm.overrides) for arm in wanted.arms},
        "overrides": wanted.overrides,
        "seeds": list(wanted.seeds),
        "margin": wanted.margin,
        "budget_minutes": wanted.budget_minutes,
        "reference": wanted.reference,
    }
    parameters = {
        **({"grid": list(wanted.grid)} if wanted.grid else own),
        "preset": wanted.source,
        "target": wanted.target,
        "limit": wanted.limit,
        "deployment": wanted.deployment,
        "name": wanted.name,
        "root": root,
    }
    flow = _with_body(
        sweep if wanted.grid else compare, plan.name, lambda: compare_runs(plan, root, checked=first.run_id)
    )

    def say_how_to_continue() -> None:
        say("continue with the same command; finished runs are not repeated")

    return _run(lambda: flow(**parameters), first.config, root_url(root), say_how_to_continue)


def _with_body(flow: Flow[..., Any], name: str, body: Callable[[], Any]) -> Callable[..., Any]:
    """A copy of the flow whose runs have the given name, and that runs `body` instead of the flow's function.

    Prefect records and shows the parameters; the caller has parsed and checked them, and `body` holds the result. If
    the Prefect server is gone at the end, the result or the error of `body` counts.
    """
    prepared = flow.with_options(flow_run_name=name)
    outcome: Future[Any] = Future()

    def run_body(*_: Any, **__: Any) -> Any:
        try:
            outcome.set_result(body())
        except BaseException as error:  # noqa: BLE001 (result() raises the error again)
            outcome.set_exception(error)
        if not server_answers(SERVER_SECONDS):
            say("the Prefect server does not answer: the flow run has no end there")
            raise Pause  # Prefect then asks the server for nothing; otherwise it waits for minutes and fails
        return outcome.result()

    prepared.fn = wraps(flow.fn)(run_body)

    def run(**parameters: Any) -> Any:
        try:
            return prepared(**parameters)
        except Pause:
            result = outcome.result()
        except httpx.HTTPError as error:
            if not outcome.done():
                raise PipelineRLError(f"the Prefect server does not answer: {error}") from None
            result = outcome.result()
        return result.result() if isinstance(result, State) else result

    return run


def _run(
    flow: Callable[[], dict[str, Any]], config: RunConfig, root: str, say_how_to_continue: Callable[[], None]
) -> dict[str, Any]:
    """Run a flow with a Prefect server; Ctrl-C and SIGTERM unwind the flow and become SystemExit."""
    with _signals_raise():
        try:
            with _prefect_server(config, root):
                return flow()
        except KeyboardInterrupt:
            _say_ended("interrupted")
            say_how_to_continue()
            raise SystemExit(EXIT_INTERRUPTED) from None
        except _Terminated:
            _say_ended("terminated")
            say_how_to_continue()
            raise SystemExit(EXIT_TERMINATED) from None
        except ConfigError:  # another start would be refused too
            raise
        except CrashedRun as error:  # the message says how to continue (tasks/outage.py)
            raise StoreUnavailable(str(error)) from None
        except Exception:
            say_how_to_continue()
            raise


def _say_ended(how: str) -> None:
    """Wait for the end of all role processes, then report it; a second Ctrl-C may have interrupted the flow's wait.

    Further signals are ignored: all role processes have received a request to stop, and the supervision kills those
    that do not.
    """
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    left = await_groups(END_SECONDS)
    say(f"{how}; everything is stopped" if not left else f"{how}; still ending: pids {left}")


class _Terminated(BaseException):
    """Raised on SIGTERM. Not an Exception (like KeyboardInterrupt), so that `except Exception` does not catch it."""


@contextmanager
def _signals_raise() -> Iterator[None]:
    """Let SIGTERM, and SIGHUP of a closed terminal, unwind the stack like Ctrl-C; Prefect's own handler, during the
    flow, calls this handler.

    A shell starts background commands with SIGINT ignored; the handler for SIGINT lets `kill -INT` stop them too.
    A library may swallow the exception of SIGTERM. Therefore SIGTERM is sent again every AGAIN_SECONDS until the
    block ends.
    """
    again: list[Timer] = []

    def terminate(number: int, frame: FrameType | None) -> None:
        timer = Timer(AGAIN_SECONDS, os.kill, (os.getpid(), number))
        timer.daemon = True
        again.append(timer)
        timer.start()
        raise _Terminated

    handlers = {signal.SIGTERM: terminate, signal.SIGINT: signal.default_int_handler}
    if signal.getsignal(signal.SIGHUP) is signal.SIG_DFL:  # under nohup it stays ignored
        handlers[signal.SIGHUP] = terminate
    previous = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    try:
        yield
    finally:
        for timer in again:
            timer.cancel()
        for number, handler in previous.items():
            signal.signal(number, handler)


def check_server(config: RunConfig) -> bool:
    """Whether a Prefect server is set. Raises ConfigError if it does not answer, or if work pools need one."""
    configured = get_current_settings().api.url
    if configured:
        check_prefect(str(configured))
    elif config.placement.kind == "work_pools":
        raise ConfigError(
            "placement.kind=work_pools needs a Prefect server that the workers share. Set PREFECT_API_URL, "
            "or set placement.kind=local"
        )
    return bool(configured)


@contextmanager
def _prefect_server(config: RunConfig, root: str) -> Iterator[None]:
    """Use the server of PREFECT_API_URL or the active profile; without one, run a local server during the block."""
    if check_server(config):
        yield
        return
    say("starting a local Prefect server (set PREFECT_API_URL to use your own)")
    with local_server(root) as url, temporary_settings({PREFECT_API_URL: url}):
        say(f"Prefect UI: {url.removesuffix('/api')} while this command runs")
        try:
            yield
        finally:  # the server ends with the block: send the queued log lines and events before
            APILogWorker.drain_all(timeout=DRAIN_SECONDS)
            EventsWorker.drain_all(timeout=DRAIN_SECONDS)


def _say_how_to_resume(root: str, opened: Sequence[RunContext]) -> None:
    """Print the command that resumes the run of this command, if this command has created or opened a run."""
    for run in opened:
        say(f"continue with: pipelinerl resume {run.run_id} --root {root.removeprefix('file://')}")
