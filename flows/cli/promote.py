"""`pipelinerl promote`: names a weight version by an alias of a registered model in MLflow."""

from typing import Annotated, Any

import typer

from pipelinerl.flows.cli.arguments import Json, Root, complete_run
from pipelinerl.flows.cli.console import answer


def promote(
    run: Annotated[
        str,
        typer.Argument(
            metavar="[RUN]",
            help="A run: id under the root, `latest`, path or URL. Without it, the versions of NAME are shown.",
            autocompletion=complete_run,
        ),
    ] = "",
    version: Annotated[
        str, typer.Argument(metavar="[VERSION]", help="best, last, or the number of a step.")
    ] = "best",
    name: Annotated[
        str, typer.Option(metavar="NAME", help="The registered model. Default: tracking.register_as of the run.")
    ] = "",
    alias: Annotated[str, typer.Option(help="The alias.")] = "champion",
    rollback: Annotated[
        bool, typer.Option("--rollback", help="Let the alias name the version that it named before; without RUN.")
    ] = False,
    root: Root = "",
    as_json: Json = False,
) -> None:
    """Let an alias of a registered model in MLflow name a version of a run, or show where its versions come from.

    The version gets a copy of all weights in MLflow, adapters merged, which mlflow.pyfunc and mlflow.transformers
    load. The best version has the highest lower end of the interval of its held-out accuracy.

    Examples: `pipelinerl promote latest best --name sums`, `pipelinerl promote --name sums`, `pipelinerl promote
    --name sums --rollback`
    """
    from pipelinerl_core.config.sections import TrackingConfig
    from pipelinerl_core.errors import ConfigError
    from pipelinerl_core.run.context import open_run
    from pipelinerl_core.run.locate import locate_run, root_url
    from pipelinerl_core.telemetry.mlflow import tracking_uri
    from pipelinerl_core.telemetry.mlflow_models import ModelStore, check_name, mlflow_errors
    from pipelinerl_core.tools import promote as tool

    if run and rollback:
        raise ConfigError("--rollback takes no RUN: give --name and --alias")
    opened = open_run(locate_run(run, root)) if run else None
    name = name or (opened.config.tracking.register_as if opened else "")
    check_name(name, alias)
    uri = tool.mlflow_uri(opened) if opened else tracking_uri(TrackingConfig().chosen_uri, root_url(root)) or ""
    with mlflow_errors(uri):
        store = ModelStore(uri)
        if opened:
            entries = [tool.promote(opened, version, name, alias)]
        else:
            if rollback:
                store.restore_alias(name, alias)
            entries = tool.describe(store, name)
    lines = [line for entry in entries for line in _lines(entry)]
    answer(entries if run == "" else entries[0], lines, as_json=as_json)


def _lines(entry: dict[str, Any]) -> list[str]:
    """A version of a registered model, and where it comes from."""
    origin, figures = entry["origin"], entry["held_out"]
    names = ", ".join(f"{entry['name']}@{alias}" for alias in entry["aliases"])
    lines = [f"{entry['name']} version {entry['version']}{f': {names}' if names else ''}"]
    if entry.get("before") not in (None, entry["version"]):
        lines.append(f"  before    version {entry['before']}; --rollback restores it")
    if not origin:
        return [*lines, f"  source    {entry['source']}"]
    lines += [
        f"  run       {origin['run_id']} at {origin['run_url']}, code {origin['code']}",
        f"  weights   version {origin['step']}, {origin['weights_digest'][:12]}; its step, batches and actors: "
        f"pipelinerl trace {origin['run_id']} v{origin['step']}",
    ]
    if figures:
        interval = f" ({figures['low']:.3f} to {figures['high']:.3f})" if figures["low"] is not None else ""
        lines.append(
            f"  held-out  {figures['accuracy']:.3f}{interval} on {figures['num_prompts']:,} prompts, measure "
            f"{figures['measure']}"
        )
    return [*lines, *([f"  note      {entry['note']}"] if entry["note"] else [])]
