"""`pipelinerl simulate`: throughput, lag and memory before a run."""

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pipelinerl.flows.cli.arguments import Json, Overrides, Root
from pipelinerl.flows.cli.console import answer, say

if TYPE_CHECKING:
    from pipelinerl_core.config import RunConfig
    from pipelinerl_core.planning.calibration import Calibration
    from pipelinerl_core.planning.prediction import Source


def simulate(
    source: Annotated[
        str,
        typer.Argument(
            metavar="RUN|PRESET|FILE.toml",
            help="A recorded run (id under the root, `latest`, path or URL), or a configuration.",
        ),
    ],
    overrides: Overrides = None,
    root: Root = "",
    sweeps: Annotated[
        list[str] | None,
        typer.Option("--sweep", metavar="KEY=V1,V2", help="Predict all combinations of values; may be repeated."),
    ] = None,
    write: Annotated[str, typer.Option(help="With --sweep: write the best configuration as TOML.")] = "",
    figure: Annotated[str, typer.Option(help="With --sweep: draw the predictions as SVG.")] = "",
    gpus: Annotated[
        int, typer.Option(min=0, help="GPUs in all; those that do not generate train (trainer.ranks).")
    ] = 0,
    lengths: Annotated[
        str,
        typer.Option(help="Lengths of completions: a mean, or a JSON file: a list of lengths or {length: count}."),
    ] = "",
    longer: Annotated[float, typer.Option(help="Make completions so many times as long.")] = 1.0,
    turns: Annotated[int, typer.Option(min=1, help="Turns of an episode, of equal length.")] = 1,
    tool_seconds: Annotated[
        float, typer.Option(min=0, help="Time between two turns, in which the environment works.")
    ] = 0.0,
    actor_speeds: Annotated[
        str, typer.Option(metavar="S1,S2,...", help="Speed of each actor's decode steps, if actors are unequal.")
    ] = "",
    preemptions: Annotated[
        str, typer.Option(metavar="TRACE.csv|RATES", help="Machines end and come back: actors=3600,away=300.")
    ] = "",
    start_seconds: Annotated[
        float, typer.Option(min=0, help="With --preemptions: time in which a started role loads code and weights.")
    ] = 30.0,
    calibrate: Annotated[
        bool,
        typer.Option("--calibrate", help="Measure this machine with short runs of the configuration first."),
    ] = False,
    as_json: Json = False,
) -> None:
    """Predict throughput, lag, bottleneck and memory of a run without running anything.

    The scheduler is the real one, on simulated time. Speeds come from a recorded run; for a configuration from the
    last --calibrate on this machine, else from a table of accelerators (placement.gpu). Every input is printed with
    its source. For a recorded run, the prediction of its own settings is printed beside the measurement: the
    difference is the error to expect.

    Examples:

    - `pipelinerl simulate latest placement.actors=2 schedule.max_lag=8`
    - `pipelinerl simulate quickstart --calibrate`
    - `pipelinerl simulate math-7b-16gpu --gpus 16 --sweep placement.actors=8,10,12,14`
    - `pipelinerl simulate latest --longer 2`
    - `pipelinerl simulate latest --turns 4 --tool-seconds 2`
    - `pipelinerl simulate latest placement.actors=3 --actor-speeds 1,1,0.5`
    - `pipelinerl simulate math-7b-16gpu --preemptions actors=3600,trainer=14400,away=300`
    """
    from pipelinerl_core.config.arm import parse_grid
    from pipelinerl_core.errors import ConfigError
    from pipelinerl_core.planning import what_if
    from pipelinerl_core.planning.preemptions import predict_goodput

    if preemptions and sweeps:
        raise ConfigError("--preemptions is not possible with --sweep. Give one of them")
    if (write or figure) and not sweeps:
        raise ConfigError("--write and --figure need --sweep KEY=V1,V2")
    changes = overrides or []
    keys = parse_grid(sweeps or [])
    recorded, chosen, config = _source(source, changes, root, calibrate=calibrate)
    if tool_seconds and turns == 1:
        raise ConfigError(f"--tool-seconds {tool_seconds:g} needs --turns of at least 2")
    speeds = what_if.parse_speeds(actor_speeds)
    if lengths or longer != 1 or turns > 1 or speeds:
        given = what_if.read_lengths(lengths, config.rollouts.max_tokens) if lengths else None
        chosen = what_if.Changed(chosen, longer, given, turns, tool_seconds, speeds)
    names = what_if.names(changes)
    if keys:
        document, lines = _swept(chosen, config, keys, gpus, sorted(names), write, figure)
        answer(document, lines, as_json=as_json)
        return
    config = what_if.on_gpus(config, gpus, names)
    if recorded is None:
        document = what_if.document(chosen, config)
    else:
        document = what_if.recorded_document(recorded, chosen, config if changes or gpus else None)
    text = what_if.lines(document)
    if preemptions:
        document["goodput"] = predict_goodput(chosen, config, preemptions, start_seconds)
        text += ["", *(f"{key.replace('_', ' '):<26}{value:.3g}" for key, value in document["goodput"].items())]
    del document["memory_lines"]
    answer(document, text, as_json=as_json)


def _source(
    source: str, changes: list[str], root: str, *, calibrate: bool
) -> "tuple[Calibration | None, Source, RunConfig]":
    """The recorded run, if any; where the inputs come from; and the configuration to simulate."""
    from pipelinerl.flows.cli.calibrating import measure
    from pipelinerl_core.config.load import preset_names
    from pipelinerl_core.errors import ConfigError
    from pipelinerl_core.models.resolve import load_config, override_config
    from pipelinerl_core.planning.what_if import source_of

    if source.endswith(".toml") or source in preset_names():
        config = load_config(source, changes)
        if calibrate:
            measure(config)
        return None, source_of(config), config
    if calibrate:
        raise ConfigError(f"--calibrate needs a configuration, and {source} is none. A run is a calibration itself")
    recorded = _recorded(source, root)
    return recorded, recorded, override_config(recorded.config, changes)


def _recorded(run: str, root: str) -> "Calibration":
    from pipelinerl_core.models.resolve import build_config
    from pipelinerl_core.planning.cache import usable_cores
    from pipelinerl_core.planning.calibration import calibrate
    from pipelinerl_core.report.facts import collect
    from pipelinerl_core.run.locate import locate_run
    from pipelinerl_core.run.processor import processor
    from pipelinerl_core.run.reading import list_keys, read_record
    from pipelinerl_core.run.records import EpochRecord
    from pipelinerl_core.storage.object_store import open_store

    store = open_store(locate_run(run, root))
    facts = collect(store)
    epochs = [read_record(store, key, EpochRecord) for key in list_keys(store, "epochs")]
    is_here = any(epoch.processor == processor() for epoch in epochs)
    return calibrate(facts, cores=usable_cores(build_config(facts.run.config)) if is_here else 0)


def _swept(
    source: "Source",
    config: "RunConfig",
    keys: list[tuple[str, list[str]]],
    gpus: int,
    given: list[str],
    write: str,
    figure: str,
) -> tuple[dict[str, Any], list[str]]:
    """The table of a sweep; writes the files that were asked for."""
    from pipelinerl_core.config import as_toml
    from pipelinerl_core.errors import ConfigError
    from pipelinerl_core.planning.sweep import best_of, sweep, sweep_document, sweep_figure, sweep_lines

    for path in filter(None, (write, figure)):
        if not os.access(Path(path).absolute().parent, os.W_OK):
            raise ConfigError(f"{path}: its directory does not exist or is not writable")
    points = sweep(
        source, config, keys, gpus=gpus, given=given,
        on_progress=lambda done, total: say(f"{done} of {total} combinations"),
    )  # fmt: skip
    best = best_of(points).config
    if write and best is not None:
        Path(write).write_text(as_toml(best), encoding="utf-8")
        say(f"{write}: the configuration of the best combination")
    if figure:
        Path(figure).write_text(sweep_figure(points), encoding="utf-8")
        say(f"{figure}: rollouts per second")
    return sweep_document(points), sweep_lines(points)
