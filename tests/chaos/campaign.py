"""A run in which one thing after another goes wrong, and what must be true at its end."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pipelinerl_core.tools.audit import Audit
from tests.chaos.faults import AWAY_SECONDS, catalogue
from tests.chaos.world import RECOVERY_SECONDS, ROOT, StoreKind, World

_AUDIT_SECONDS = 300


@dataclass(frozen=True, slots=True)
class Injected:
    """A fault that happened."""

    name: str
    detail: str
    step: int
    """Newest commit when it happened."""
    seconds: float
    """How long it lasted."""
    recovered_seconds: float
    """From its end to the second commit after its beginning; 0 if that came before."""


@dataclass(slots=True)
class Outcome:
    """What a campaign has found; it has passed when there are no complaints."""

    store: StoreKind
    seed: int
    injected: list[Injected] = field(default_factory=list)
    seconds: float = 0.0
    steps: int = 0
    audit: dict[str, Any] = field(default_factory=dict)
    complaints: list[str] = field(default_factory=list)


def run_campaign(
    home: Path,
    store: StoreKind,
    names: Sequence[str],
    *,
    seed: int,
    away_seconds: float = AWAY_SECONDS,
    replays: bool = True,
    settings: Sequence[str] = (),
    say: Callable[[str], None] = print,
) -> Outcome:
    """Start a run, let the named faults happen at random moments, drain it and look at what is left.

    A run that hangs or ends early is a complaint too, which names what was waited for.
    """
    outcome, begun = Outcome(store, seed), time.monotonic()
    world = World(home, store, seed=seed, settings=settings)
    faults = catalogue(store, away_seconds=away_seconds, settings=settings)
    try:
        world.start()
        for number, name in enumerate(names, 1):
            time.sleep(world.random.uniform(0, 1.5))
            happened = inject(world, name, faults[name])
            outcome.injected.append(happened)
            say(
                f"{store} {number}/{len(names)}: step {happened.step}, {name} ({happened.detail}), "
                f"{happened.seconds:.1f} s, two steps later after {happened.recovered_seconds:.1f} s"
            )
        outcome.steps = world.finish()["steps"]
        outcome.complaints += complaints(world, outcome, replays=replays)
    except AssertionError as error:
        outcome.complaints.append(str(error))
    finally:
        world.close()
    outcome.seconds = time.monotonic() - begun
    return outcome


def inject(world: World, name: str, fault: Callable[[World], str]) -> Injected:
    """Let a fault happen; returns when two further steps are committed."""
    world.look_at_memory()
    step, begun = world.committed, time.monotonic()
    detail = fault(world)
    seconds = time.monotonic() - begun
    recovered = world.wait_for(f"two steps after {name}", lambda: world.committed >= step + 2, RECOVERY_SECONDS)
    return Injected(name, detail, step, seconds, recovered)


def complaints(world: World, outcome: Outcome, *, replays: bool) -> list[str]:
    """What should not be: nothing."""
    with suppress(AssertionError):  # killed a moment ago; `leftovers` names what stays
        world.wait_for("the end of every child", lambda: not world.leftover_processes(), 20, is_running=False)
    problems = [f"left behind: {leftover}" for leftover in world.leftovers()]
    if outcome.steps != world.committed:
        problems.append(f"the report has {outcome.steps} steps, {world.committed} are committed")
    run = world.run
    outcome.audit = Audit(run.store, run.config).run().document
    problems += [f"audit: {problem}" for problem in outcome.audit["problems"]]
    problems += [f"audit: {key} {outcome.audit[key]}" for key in ("lost", "trained_twice") if outcome.audit[key]]
    problems += missing_metrics(world, outcome.steps)
    if replays:
        problems += replay(run.store.url)
    return problems


def missing_metrics(world: World, num_steps: int) -> list[str]:
    """Every step has its loss in MLflow, once, in one run."""
    from mlflow import MlflowClient

    client = MlflowClient(tracking_uri=world.mlflow.url)
    record = world.run.record
    assert record.mlflow_run_id is not None
    steps = [metric.step for metric in client.get_metric_history(record.mlflow_run_id, "train/loss")]
    missing = sorted(set(range(1, num_steps + 1)) - set(steps))
    return [f"MLflow has no loss of steps {missing}"] if missing else []


def replay(url: str) -> list[str]:
    """The recorded batches give the recorded losses and weights, to the last bit."""
    printed = subprocess.run(
        [sys.executable, "-m", "pipelinerl_core.tools.replay", "--run", url, "--json"],
        cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1"}, stdout=subprocess.PIPE, text=True, check=False,
        timeout=_AUDIT_SECONDS,
    )  # fmt: skip
    if printed.returncode == 0 and json.loads(printed.stdout)["all_equal"]:
        return []
    return [f"the replay differs: {printed.stdout[-300:]}"]
