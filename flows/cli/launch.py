"""Run the train or compare flow for a command: a Prefect server if there is none, signals, and what to do next."""

import json
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import wraps
from types import FrameType
from typing import Any

from prefect import Flow
from prefect.events.worker import EventsWorker
from prefect.logging.handlers import APILogWorker
from prefect.settings import PREFECT_API_URL, get_current_settings, temporary_settings

from pipelinerl.flows.cli.console import EXIT_INTERRUPTED, EXIT_TERMINATED, say
from pipelinerl.flows.cli.local_server import local_server
from pipelinerl.flows.compare_flow import compare, compare_runs
from pipelinerl.flows.train_flow import train, train_run
from pipelinerl_core.comparison.plan import Plan
from pipelinerl_core.config import RunConfig
from pipelinerl_core.errors import ConfigError, StoreError
from pipelinerl_core.run.jobs import Job
from pipelinerl_core.run.locate import LATEST_KEY, root_url
from pipelinerl_core.storage.object_store import open_store
from pipelinerl_core.supervision.checks import check_http
from pipelinerl_core.supervision.process_groups import await_groups

DRAIN_SECONDS = 2.0
"""How long the last log lines and events may take to reach the local server."""
END_SECONDS = 15.0
"""Within it whoever was told to stop has ended or was killed: supervision/supervise.py."""


def run_training(job: Job) -> dict[str, Any]:
    """Run the train flow in this process for a job whose configuration was checked; returns the report.

    Raises SystemExit with 130 or 143 after Ctrl-C or SIGTERM, when every child is gone.
    """
    root = root_url(job.root)
    begun = time.time()
    parameters = {
        "preset": job.preset,
        "overrides": job.overrides,
        "root": job.root,
        "resume": job.run.store.url if job.run else "",
    }
    flow = _with_body(train, lambda: train_run(job, is_checked=True))
    report = _run(lambda: flow(**parameters), job.config, root, lambda: _say_how_to_resume(root, begun))
    if report["steps"] < job.config.trainer.steps:
        say(f"drained after step {report['steps']} of {job.config.trainer.steps}")
        _say_how_to_resume(root, begun)
    return report


def run_comparison(plan: Plan, root: str) -> dict[str, Any]:
    """The same for the compare flow and a plan whose first run was checked. Returns the comparison."""
    wanted, first = plan.wanted, plan.runs[0]
    parameters = {
        "arms": {arm.name: list(arm.overrides) for arm in wanted.arms},
        "preset": wanted.source,
        "overrides": wanted.overrides,
        "seeds": list(wanted.seeds),
        "target": wanted.target,
        "margin": wanted.margin,
        "budget_minutes": wanted.budget_minutes,
        "reference": wanted.reference,
        "name": wanted.name,
        "root": root,
    }
    flow = _with_body(compare, lambda: compare_runs(plan, root, checked=first.run_id))

    def say_how_to_go_on() -> None:
        say("go on with the same command: runs that are done are not run again")

    return _run(lambda: flow(**parameters), first.config, root_url(root), say_how_to_go_on)


def _with_body(flow: Flow[..., Any], body: Callable[[], Any]) -> Callable[..., Any]:
    """The flow with its name, options and parameters, whose work is `body`.

    Prefect shows the parameters; what they come to is parsed and checked already, and is in `body`.
    """
    prepared = flow.with_options()
    prepared.fn = wraps(flow.fn)(lambda *_, **__: body())
    return prepared


def _run(
    flow: Callable[[], dict[str, Any]], config: RunConfig, root: str, say_how_to_go_on: Callable[[], None]
) -> dict[str, Any]:
    """Run a flow with a server and signals that unwind it."""
    with _signals_raise():
        try:
            with _prefect_server(config, root):
                return flow()
        except KeyboardInterrupt:
            _say_ended("interrupted")
            say_how_to_go_on()
            raise SystemExit(EXIT_INTERRUPTED) from None
        except _Terminated:
            _say_ended("terminated")
            say_how_to_go_on()
            raise SystemExit(EXIT_TERMINATED) from None
        except Exception:
            say_how_to_go_on()
            raise


def _say_ended(how: str) -> None:
    """Say that everything is stopped once it is: a second Ctrl-C may have cut short whoever waited for that.

    Further ones change nothing: everybody has been told to end, and whoever does not is killed soon.
    """
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    left = await_groups(END_SECONDS)
    say(f"{how}; everything is stopped" if not left else f"{how}; still ending: pids {left}")


class _Terminated(BaseException):
    """SIGTERM; like KeyboardInterrupt no Exception, so that nothing swallows it."""


@contextmanager
def _signals_raise() -> Iterator[None]:
    """SIGTERM unwinds the stack like Ctrl-C; Prefect's own handler, during the flow, ends in this one.

    A shell starts background commands with SIGINT ignored: a kill -INT must stop them all the same.
    """

    def terminate(number: int, frame: FrameType | None) -> None:
        raise _Terminated

    handlers = {signal.SIGTERM: terminate, signal.SIGINT: signal.default_int_handler}
    previous = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


@contextmanager
def _prefect_server(config: RunConfig, root: str) -> Iterator[None]:
    """The server of PREFECT_API_URL or the active profile; one of our own for the time of the command otherwise."""
    configured = get_current_settings().api.url
    if configured:
        check_http("PREFECT_API_URL", str(configured))
        yield
        return
    if config.placement.kind == "work_pools":
        raise ConfigError(
            "placement.kind=work_pools needs a Prefect server that the workers share. Set PREFECT_API_URL, "
            "or placement.kind=local"
        )
    say("starting a local Prefect server (set PREFECT_API_URL to use your own)")
    with local_server(root) as url, temporary_settings({PREFECT_API_URL: url}):
        say(f"Prefect UI: {url.removesuffix('/api')} while this command runs")
        try:
            yield
        finally:  # what Prefect still has to send, it can send only now
            APILogWorker.drain_all(timeout=DRAIN_SECONDS)
            EventsWorker.drain_all(timeout=DRAIN_SECONDS)


def _say_how_to_resume(root: str, begun: float) -> None:
    """Name the command that goes on with the run this command has opened, if it got that far."""
    with suppress(StoreError):
        latest = json.loads(open_store(root).get(LATEST_KEY))
        if latest["at"] >= begun:
            say(f"go on with: pipelinerl resume {latest['run_id']} --root {root.removeprefix('file://')}")
