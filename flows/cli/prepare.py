"""`pipelinerl prepare`: builds a built-in model, or downloads a model of the hub."""

from typing import Annotated

import typer

from pipelinerl.flows.cli.arguments import Json
from pipelinerl.flows.cli.child import run_tool


def prepare(
    model: Annotated[str, typer.Option(help="A built-in model, or org/name on the hub.")] = "builtin:sums",
    as_json: Json = False,
) -> None:
    """Build a built-in model before the first `train`; takes about a minute, needs no network, and is cached.

    A model of the Hugging Face hub, `--model org/name@revision`, is downloaded into the cache of this host.
    """
    run_tool("prepare", {"model": model}, as_json=as_json)
