"""Compare the goodput of runs with preemptions with what their machines allow (docs/results/preemption.md).

Run: python -m benchmarks preemption [--part simulated|real] [--root DIR] [--json]. `simulated`: 128 emulated
accelerators on the simulator. `real`: hub, three actors and a trainer are killed and kept away as in
preemption_traces/four-processes.csv; predictions.json is written before. The same command continues.
"""

import csv
import json
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import psutil

from benchmarks import report
from pipelinerl_core.config import RunConfig
from pipelinerl_core.errors import PipelineRLError
from pipelinerl_core.models.resolve import load_config
from pipelinerl_core.planning.calibration import calibrate
from pipelinerl_core.planning.prediction import predict
from pipelinerl_core.planning.preemptions import goodput, predict_goodput, read_trace
from pipelinerl_core.planning.roofline import Table
from pipelinerl_core.planning.simulator import Preemption
from pipelinerl_core.report.facts import RunFacts, collect
from pipelinerl_core.roles.runtime.process import exit_codes
from pipelinerl_core.run.locate import locate_run
from pipelinerl_core.storage.object_store import open_store

_TRACES = Path(__file__).parent / "preemption_traces"
_SIMULATED = (
    "placement.actors=16", "engine.concurrency=384", "rollouts.max_tokens=32768", "schedule.max_lag=20",
    "engine.pace=false",
    "trainer.groups_per_step=128", "trainer.steps=200", "emulation.accelerators=128", "emulation.generators=48",
    "emulation.token_seconds=8e-5", "emulation.saturation=128", "emulation.train_token_seconds=1.06e-4",
)  # fmt: skip
"""As of a model of 7 B parameters: 16 actors with 3 accelerators each, a trainer with 80. Generation is the limit."""
_SIMULATED_START_SECONDS = 60.0
_MADE = "actors=7200,trainer=3600,hub=3600,away=300"
_REAL = (
    "placement.actors=3", "engine.concurrency=32", "trainer.groups_per_step=16", "placement.max_restarts=1000",
    "eval.num_prompts=0", "eval.every_steps=0", "tracking.mlflow_uri=none", "emulation.accelerators=4",
    "emulation.generators=3", "emulation.token_seconds=2e-3", "emulation.saturation=100",
    "emulation.train_token_seconds=6e-4",
)  # fmt: skip
"""A decode step of 200 ms, so that all processes fit two cores."""
_BASE_STEPS, _REAL_STEPS = 40, 150
_REAL_START_SECONDS = 12.0
_NOTICES = {"kill -9": 0.0, "SIGTERM 120 s before": 120.0, "SIGTERM 10 s before": 10.0}
_REAL_NOTICES = {"kill -9": 0.0, "SIGTERM 5 s before": 5.0}
_RUN_SECONDS = 1800.0


@exit_codes
def main() -> int:
    """Print a table, or one JSON document with --json."""
    parser = report.parser(__doc__)
    parser.add_argument("--part", choices=("simulated", "real"), default="", help="default: both")
    parser.add_argument("--root", default="./runs-preemption", help="directory of predictions and runs")
    options = parser.parse_args()
    root = Path(options.root)
    root.mkdir(parents=True, exist_ok=True)
    rows = [] if options.part == "real" else simulated(root)
    rows += [] if options.part == "simulated" else real(root)
    report.write({**report.machine(), "rows": rows}, table, as_json=options.json)
    return 0


def simulated(root: Path) -> list[dict[str, Any]]:
    """Predictions of both traces on 128 emulated accelerators."""
    config = load_config("quickstart", list(_SIMULATED))
    source, rows = Table(), []
    for name, notice in _NOTICES.items():
        public = with_notice(_TRACES / "aws-p3.csv", notice, root)
        for trace, text in ((f"made: {_MADE}", f"{_MADE},notice={notice:g}"), ("AWS p3, actors", public)):
            figures = predict_goodput(source, config, text, _SIMULATED_START_SECONDS)
            rows.append({"trace": trace, "end": name, "predicted": figures})
    return rows


def real(root: Path) -> list[dict[str, Any]]:
    """Predictions and measurements of four emulated accelerators with real processes."""
    base = root / "base"
    if not list(base.glob("*/report.json")):
        train(base, _BASE_STEPS).wait(_RUN_SECONDS)
    source = calibrate(facts_of(base))
    config = load_config("quickstart", [*_REAL, f"trainer.steps={_REAL_STEPS}"])
    trace = _TRACES / "four-processes.csv"
    paths = {name: with_notice(trace, notice, root) for name, notice in _REAL_NOTICES.items()}
    file = root / "predictions.json"
    if not file.exists():
        predicted = {name: predict_goodput(source, config, path, _REAL_START_SECONDS) for name, path in paths.items()}
        written = {"at": time.time(), "undisturbed": asdict(predict(source, config)), "predicted": predicted}
        file.write_text(json.dumps(written, indent=2), encoding="utf-8")
    predicted = json.loads(file.read_text())["predicted"]
    rows = []
    for name, path in paths.items():
        place = root / f"notice-{_REAL_NOTICES[name]:g}"
        if not list(place.glob("*/measured.json")):
            disturb(place, config, read_trace(path, config, 0.0))
        measured = json.loads(next(place.glob("*/measured.json")).read_text())
        rows.append({"trace": "four processes", "end": name, "predicted": predicted[name], "measured": measured})
    return rows


def with_notice(trace: Path, notice: float, root: Path) -> str:
    """The path of a copy of a trace with this notice."""
    path = root / f"{trace.stem}-{notice:g}.csv"
    with trace.open() as source, path.open("w") as file:
        rows = csv.DictReader(source)
        writer = csv.DictWriter(file, rows.fieldnames or ())
        writer.writeheader()
        writer.writerows({**row, "notice_seconds": notice} for row in rows)
    return str(path)


def train(place: Path, steps: int) -> "subprocess.Popen[bytes]":
    """Start a run below `place`."""
    place.mkdir(exist_ok=True)
    arguments = ["train", "quickstart", *_REAL, f"trainer.steps={steps}", "--root", str(place)]
    with (place / "bench.log").open("ab") as log:
        command = [sys.executable, "-m", "pipelinerl.flows.cli", *arguments]
        return subprocess.Popen(command, stdout=log, stderr=log)


def facts_of(place: Path) -> RunFacts:
    """The recorded run below `place`."""
    return collect(open_store(locate_run("latest", str(place))))


def disturb(place: Path, config: RunConfig, trace: Sequence[Preemption]) -> None:
    """Train while machines end and come back, audit the run, and write measured.json beside its run.json."""
    command, load = train(place, config.trainer.steps), report.machine()["load_average"]
    try:
        while not list(place.glob("*/commits/00000001.*")):
            if command.poll() is not None:
                raise PipelineRLError(f"the run ended before its first step; see {place}/bench.log")
            time.sleep(0.05)
        begun = time.time()
        for event in sorted(trace):
            preempt(command.pid, event, begun)
        command.wait(_RUN_SECONDS)
    finally:
        command.terminate()
        command.wait(60)
    facts = facts_of(place)
    steps = [commit.computed_at - begun for commit in facts.trained_commits]
    undisturbed = calibrate(facts_of(place.parent / "base")).measured
    assert undisturbed is not None
    url = locate_run("latest", str(place))
    audit = [sys.executable, "-m", "pipelinerl_core.tools.audit", "--run", url, "--json"]
    printed = json.loads(subprocess.run(audit, stdout=subprocess.PIPE, check=False, timeout=300).stdout)
    measured = goodput(steps, trace, config, undisturbed) | {
        "load_average": load, "exit_code": command.returncode, "problems": printed["problems"],
        "lost": printed["lost"], "trained_twice": printed["trained_twice"],
    }  # fmt: skip
    (next(place.glob("*/run.json")).parent / "measured.json").write_text(json.dumps(measured), encoding="utf-8")


def preempt(command: int, event: Preemption, begun: float) -> None:
    """End a role at the time of its preemption. Stop the process that replaces the role until a machine is back."""
    time.sleep(max(0.0, begun + event.seconds - event.notice_seconds - time.time()))
    old = process_of(command, event.role)
    old.send_signal(signal.SIGTERM if event.notice_seconds else signal.SIGKILL)
    new = None
    while time.time() < begun + event.seconds + event.away_seconds:
        with suppress(psutil.NoSuchProcess, PipelineRLError):
            if time.time() > begun + event.seconds and old.is_running():
                old.kill()
            process = process_of(command, event.role)
            if new is None and process.pid != old.pid:
                new = process
                new.suspend()
        time.sleep(0.02)
    if new is None:
        raise PipelineRLError(f"{event.role}: no new process within {event.away_seconds:g} s")
    new.resume()


def process_of(command: int, role: str) -> psutil.Process:
    """The process of a role of the run."""
    module = f"pipelinerl_core.roles.{role.partition('-')[0]}.main"
    for process in psutil.Process(command).children(recursive=True):
        words = process.cmdline()
        if module in words and (not role.startswith("actor-") or role in words):
            return process
    raise PipelineRLError(f"the run has no process of {role}")


def table(result: dict[str, Any]) -> str:
    """The result as Markdown."""
    header = ["trace", "end of a machine", "preemptions", "actors there", "trainer there", "goodput predicted"]
    header += ["measured", "lost", "twice"]
    rows = []
    for row in result["rows"]:
        predicted, measured = row["predicted"], row.get("measured")
        rows.append([
            row["trace"], row["end"],
            ", ".join(f"{predicted[f'{role}_preemptions']} {role}" for role in ("actor", "trainer", "hub")),
            f"{predicted['actors_there']:.1%}", f"{predicted['trainer_there']:.1%}",
            f"{predicted['goodput']:.3f}", f"{measured['goodput']:.3f}" if measured else "-",
            measured["lost"] if measured else "-", measured["trained_twice"] if measured else "-",
        ])  # fmt: skip
    return "\n".join([*report.markdown(header, rows, num_text_columns=3), "", report.conditions(result), ""])


if __name__ == "__main__":
    sys.exit(main())
