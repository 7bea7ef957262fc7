"""`pipelinerl promote`: names a weight version by an alias of a registered model in MLflow."""

from typing import Annotated, Any

import typer

from pipelinerl.flows.cli.arguments import Json, Root, complete_run
from pipelinerl.flows.cli.console import answer


def promote(
    run: Annotated[
        str, typer.Argument(metavar="[RUN]", help="A run; without it, only shows.", autocompletion=complete_run)
    ] = "",
    version: Annotated[str, typer.Argument(metavar="[VERSION]", help="best, last or the number of a step.")] = "best",
    name: Annotated[str, typer.Option(help="The registered model. Default: tracking.register_as of the run.")] = "",
    alias: Annotated[str, typer.Option(help="The alias.")] = "champion",
    rollback: Annotated[bool, typer.Option("--rollback", help="Undo the newest move of the alias.")] = False,
    root: Root = "",
    as_json: Json = False,
) -> None:
    """Let an alias of a registered model in MLflow name a version of a run, and show where its versions come from.

    The version gets a copy of all weights in MLflow, adapters merged. best: the highest lower end of the interval.

    Examples: `pipelinerl promote latest best --name sums`, `pipelinerl promote --name sums`, `pipelinerl promote
    --name sums --rollback`
    """
    import re

    from pipelinerl_core.config.sections import TrackingConfig
    from pipelinerl_core.errors import ConfigError, PipelineRLError
    from pipelinerl_core.run.context import open_run
    from pipelinerl_core.run.locate import locate_run, root_url
    from pipelinerl_core.telemetry.mlflow import tracking_uri
    from pipelinerl_core.telemetry.redact import redact_text
    from pipelinerl_core.tools import promote as tool

    from mlflow.exceptions import MlflowException  # isort: skip (after telemetry.mlflow)

    opened = open_run(locate_run(run, root)) if run else None
    name = name or (opened.config.tracking.register_as if opened else "")
    if not re.fullmatch(r"[^/:.%\"']+", name) or not re.fullmatch(r"(?!v\d+$|latest$)[\w-]+", alias):
        raise ConfigError(f"--name {name!r} --alias {alias!r}: a name has no / : . %; give an alias like champion")
    uri = tool.mlflow_of(opened) if opened else tracking_uri(TrackingConfig().chosen_uri, root_url(root))
    try:
        client = tool.open_mlflow(uri or "")
        if rollback:
            tool.rollback(client, name, alias)
        elif opened:
            tool.promote(opened, version, name, alias)
        entries = tool.describe(client, name)
    except MlflowException as error:
        raise PipelineRLError(redact_text(f"MLflow: {error}".partition("\n")[0])) from None
    answer(entries, [line for entry in entries for line in _lines(name, entry)], as_json=as_json)


def _lines(name: str, entry: dict[str, Any]) -> list[str]:
    """A version of a registered model, and where it comes from."""
    names = [f"{name}@{alias}" for alias in entry["aliases"]]
    lines = [": ".join([f"{name} version {entry['version']}", *names])]
    if origin := entry["origin"]:
        trace = f"its batches and actors: pipelinerl trace {origin['run_id']} v{origin['step']}"
        lines.append(f"  run       {origin['run_id']} at {origin['run_url']}, code {origin['code']}")
        lines.append(f"  weights   version {origin['step']}, {origin['weights_digest'][:12]}; {trace}")
    if own := entry["held_out"]:
        interval = "" if own["low"] is None else f" ({own['low']:.3f} to {own['high']:.3f})"
        lines.append(f"  held-out  {own['accuracy']:.3f}{interval} on {own['num_prompts']:,} prompts")
    return [*lines, *([f"  note      {entry['note']}"] if entry["note"] else [])]
