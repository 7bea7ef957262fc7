"""`pipelinerl prepare`: builds a built-in model."""

from typing import Annotated

import typer

from pipelinerl.flows.cli.arguments import Json
from pipelinerl.flows.cli.child import run_module


def prepare(
    model: Annotated[str, typer.Option(help="The built-in model to build.")] = "builtin:sums", as_json: Json = False
) -> None:
    """Build a built-in model before the first `train`; takes about a minute, needs no network, and is cached."""
    run_module("tools.prepare", {"model": model}, ["--json"] if as_json else [])
