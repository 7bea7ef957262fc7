"""Arguments and options that several commands share."""

from typing import Annotated

import typer

Root = Annotated[
    str,
    typer.Option(
        help="A path or s3://bucket/prefix below which runs are stored. Default: $PIPELINERL_ROOT, else ./runs."
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON document.")]
Run = Annotated[str, typer.Argument(help="A run: id under the root, `latest`, path or URL.")]
Overrides = Annotated[
    list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Settings, for example trainer.steps=20.")
]
