"""Compare predictions of the simulator with runs that are made afterwards (docs/planning.md).

Run: python -m benchmarks predictions [--root DIR] [--only NAME,...] [--predict] [--figure FILE] [--json] [KEY=VALUE
...]. Each model and engine is calibrated on this machine, all settings are predicted from these calibrations, and
predictions.json is written before the first run; then every setting runs twice. The same command continues.
"""

import json
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from math import log10
from pathlib import Path
from typing import Any

from benchmarks import report
from pipelinerl_core.errors import ConfigError, PipelineRLError
from pipelinerl_core.models.resolve import load_config
from pipelinerl_core.planning.cache import cached_calibration
from pipelinerl_core.planning.calibration import calibrate
from pipelinerl_core.planning.prediction import predict
from pipelinerl_core.report.charts import Axis, Series, as_file, line_chart
from pipelinerl_core.report.facts import collect
from pipelinerl_core.roles.runtime.process import exit_codes
from pipelinerl_core.run.locate import locate_run
from pipelinerl_core.storage.object_store import open_store

REPEATS = 2
_SHARED = ("eval.num_prompts=0", "eval.every_steps=0", "checkpoint.every_seconds=1800", "tracking.mlflow_uri=none")
_RUN_SECONDS = 3600.0


@dataclass(frozen=True, slots=True)
class Setting:
    """One configuration: the calibrated one with changes."""

    name: str
    preset: str
    calibrated: tuple[str, ...] = ()
    """Settings of the calibration, beside those of the preset."""
    changes: tuple[str, ...] = ()
    """Settings that the calibration did not have."""

    def overrides(self, settings: Sequence[str] = ()) -> list[str]:
        """All settings of its runs."""
        return [*_SHARED, *self.calibrated, *self.changes, *settings]


_LONG, _VLLM, _CHAT = ("trainer.steps=40",), ("engine.kind=vllm", "trainer.steps=24"), ("trainer.steps=10",)
_TURNS = ("schedule.kind=conventional", "schedule.steps_per_phase=2")
SETTINGS = (
    Setting("pipeline", "quickstart", _LONG),
    Setting("two-actors", "quickstart", _LONG, ("placement.actors=2", "engine.concurrency=96")),
    Setting("conventional-2", "quickstart", _LONG, _TURNS),
    Setting("april", "quickstart", _LONG, ("schedule.kind=april",)),
    Setting("vllm", "quickstart", _VLLM),
    Setting("vllm-conventional-2", "quickstart", _VLLM, _TURNS),
    Setting("chat", "smollm2", _CHAT),
    Setting("chat-conventional-2", "smollm2", _CHAT, _TURNS),
)
"""Three schedules, both engines, one and two actors, two models."""


@exit_codes
def main() -> int:
    """Print a table, or one JSON document with --json."""
    parser = report.parser(__doc__)
    parser.add_argument("--root", default="./runs-predictions", help="directory of predictions and runs")
    parser.add_argument(
        "--only", default="", help=f"of {', '.join(setting.name for setting in SETTINGS)}; default: all"
    )
    parser.add_argument("--predict", action="store_true", help="calibrate and predict, run nothing else")
    parser.add_argument("--figure", default="", help="write predicted over measured steps per second as SVG")
    parser.add_argument("settings", nargs="*", metavar="KEY=VALUE", help="settings of every run")
    options = parser.parse_args()
    wanted = options.only.split(",") if options.only else [setting.name for setting in SETTINGS]
    if unknown := set(wanted) - {setting.name for setting in SETTINGS}:
        raise ConfigError(f"--only {', '.join(sorted(unknown))}: not known")
    chosen = [setting for setting in SETTINGS if setting.name in wanted]
    result = measure(chosen, Path(options.root), options.settings, is_prediction=options.predict)
    if options.figure and not options.predict:
        Path(options.figure).write_text(figure(result), encoding="utf-8")
    report.write(result, table, as_json=options.json)
    return 0


def measure(
    chosen: Sequence[Setting], root: Path, settings: Sequence[str], *, is_prediction: bool = False
) -> dict[str, Any]:
    """Predictions and measurements of the chosen settings. is_prediction: predict only."""
    root.mkdir(parents=True, exist_ok=True)
    predicted = _predictions(chosen, root, settings)
    configurations = []
    for setting in chosen:
        runs = [] if is_prediction else [_measured(setting, root, number, settings) for number in range(REPEATS)]
        configurations.append({"name": setting.name, **predicted[setting.name], "runs": runs})
    return {**report.machine(), "settings": list(settings), "configurations": configurations}


def _predictions(chosen: Sequence[Setting], root: Path, settings: Sequence[str]) -> dict[str, Any]:
    """Name -> what the simulator and the calibration run say; kept in predictions.json."""
    file = root / "predictions.json"
    kept: dict[str, Any] = json.loads(file.read_text()) if file.exists() else {}
    for setting in chosen:
        if setting.name not in kept:
            kept[setting.name] = _prediction(setting, root, settings)
            file.write_text(json.dumps(kept, indent=2), encoding="utf-8")
    return kept


def _prediction(setting: Setting, root: Path, settings: Sequence[str]) -> dict[str, Any]:
    config = load_config(setting.preset, setting.overrides(settings))
    source = cached_calibration(config)
    if source is None or not (root / f"{_base(setting)}.calibrated").exists():
        base = [*_SHARED, *setting.calibrated, *settings]
        _pipelinerl(root, "simulate", setting.preset, *base, "--calibrate")
        (root / f"{_base(setting)}.calibrated").touch()
        source = cached_calibration(config)
    if source is None or source.measured is None:
        raise PipelineRLError(f"{setting.name}: no calibration of this machine; see {root}/bench.log")
    return {
        "at": time.time(),
        "calibrated": _base(setting),
        "simulated": asdict(predict(source, config)),
        "calibration_run": {
            "steps_per_second": source.measured.steps_per_second,
            "mean_lag": source.measured.mean_lag,
        },
    }


def _base(setting: Setting) -> str:
    return "-".join([setting.preset, *(text.partition("=")[2] for text in setting.calibrated if "engine" in text)])


def _measured(setting: Setting, root: Path, number: int, settings: Sequence[str]) -> dict[str, Any]:
    """The figures of a run; the run is made or resumed if it has no report."""
    place = root / f"{setting.name}-{number}"
    known = sorted(place.glob("*/run.json"))
    if not (known and (known[0].parent / "report.json").exists()):
        arguments = (
            ("resume", "latest")
            if known
            else ("train", setting.preset, *setting.overrides(settings), f"seed={number}")
        )
        _pipelinerl(root, *arguments, "--root", str(place))
    measured = calibrate(collect(open_store(locate_run("latest", str(place))))).measured
    if measured is None:
        raise PipelineRLError(f"{place}: the run was not measured")
    return asdict(measured)


def _pipelinerl(root: Path, *arguments: str) -> None:
    sys.stderr.write(f"{' '.join(arguments)}\n")
    with (root / "bench.log").open("ab") as log:
        command = [sys.executable, "-m", "pipelinerl.flows.cli", *arguments]
        done = subprocess.run(command, stdout=log, stderr=log, timeout=_RUN_SECONDS, check=False)
    if done.returncode != 0:
        raise PipelineRLError(f"{' '.join(arguments[:2])} ended with code {done.returncode}; see {root}/bench.log")


# ---- output ------------------------------------------------------------------------------------------------------

_SOURCES = {"simulated": "simulator", "calibration_run": "calibration run"}


def errors(result: Mapping[str, Any], source: str, key: str) -> list[float]:
    """Prediction over the mean of the runs - 1, for each configuration that was run."""
    return [
        configuration[source][key] / statistics.fmean(run[key] for run in configuration["runs"]) - 1
        for configuration in result["configurations"]
        if configuration["runs"]
    ]


def spread(configuration: Mapping[str, Any], key: str) -> float:
    """The larger over the smaller of the repeats - 1."""
    values = [run[key] for run in configuration["runs"]]
    return float(max(values) / min(values) - 1)


def table(result: dict[str, Any]) -> str:
    """The result as Markdown."""
    titles = (("steps/s", "steps_per_second", "{:.3g}"), ("lag", "mean_lag", "{:.2f}"))
    header = ["configuration", "calibrated on"]
    for title, _, _ in titles:
        header += [f"{title} predicted", "measured", "error", "repeats", "calibration run"]
    rows = []
    for configuration in result["configurations"]:
        row = [configuration["name"], configuration["calibrated"]]
        for _, key, form in titles:
            row += _cells(configuration, key, form)
        rows.append(row)
    lines = report.markdown(header, rows, num_text_columns=2)
    for title, key, _ in titles:
        for source, name in _SOURCES.items():
            if absolute := [abs(error) for error in errors(result, source, key)]:
                lines.append(
                    f"\n{title}, {name}: median error {statistics.median(absolute):.0%}, worst {max(absolute):.0%}"
                )
    return "\n".join([*lines, "", report.conditions(result), ""])


def _cells(configuration: Mapping[str, Any], key: str, form: str) -> list[str]:
    predicted = form.format(configuration["simulated"][key])
    if not configuration["runs"]:
        return [predicted, "-", "-", "-", "-"]
    only = {"configurations": [configuration]}
    measured = ", ".join(form.format(run[key]) for run in configuration["runs"])
    return [
        predicted,
        measured,
        f"{errors(only, 'simulated', key)[0]:+.0%}",
        f"{spread(configuration, key):.0%}",
        f"{errors(only, 'calibration_run', key)[0]:+.0%}",
    ]


def figure(result: Mapping[str, Any]) -> str:
    """SVG: predicted over measured steps per second, both logarithmic, with the line of equality."""
    ran = [configuration for configuration in result["configurations"] if configuration["runs"]]
    key = "steps_per_second"

    def points(source: str) -> list[tuple[float, float]]:
        return [
            (log10(statistics.fmean(run[key] for run in configuration["runs"])), log10(configuration[source][key]))
            for configuration in ran
        ]

    ends = [value for source in _SOURCES for point in points(source) for value in point]
    series = [
        Series("equal", [(min(ends), min(ends)), (max(ends), max(ends))], "other", "beyond"),
        Series("calibration run", points("calibration_run"), "held", "dots"),
        Series("simulator", points("simulated"), "generate", "ring"),
    ]

    def text(value: float) -> str:
        return f"{10**value:.2g}"

    axes = Axis("measured steps per second (logarithmic)", text), Axis("predicted", text)
    return as_file(line_chart("predicted over measured steps per second", series, *axes), series[1:])


if __name__ == "__main__":
    sys.exit(main())
