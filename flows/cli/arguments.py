"""Arguments and options that several commands share."""

from typing import Annotated

import typer

Root = Annotated[
    str,
    typer.Option(help="Where runs are kept: a path or s3://bucket/prefix. Default: $PIPELINERL_ROOT, then ./runs."),
]
Json = Annotated[bool, typer.Option("--json", help="One JSON document on stdout.")]
Run = Annotated[str, typer.Argument(help="Id under the root, `latest`, or the path or URL of a run.")]
Overrides = Annotated[
    list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Single settings, for example trainer.steps=20.")
]
