"""`pipelinerl export`: writes a weight version as a model directory."""

from pathlib import Path
from typing import Annotated

import typer

from pipelinerl.flows.cli.arguments import Json, Root, Run
from pipelinerl.flows.cli.console import answer


def export(
    run: Run,
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="The directory to create; must not exist.")],
    version: Annotated[
        str, typer.Option(help="Number of a step, or last. A CPU computes versions that are not durable again.")
    ] = "last",
    root: Root = "",
    as_json: Json = False,
) -> None:
    """Write a weight version as a Hugging Face model directory: weights, configuration and tokenizer.

    transformers, vLLM and `model.path` of a new run can read the directory; `hf upload USER/NAME DIR --private`
    uploads it to the hub.

    Example: `pipelinerl export latest ./my-model`
    """
    from pipelinerl_core.run.locate import locate_run
    from pipelinerl_core.tools.export import export as export_version

    document = export_version(locate_run(run, root), directory, version)
    lines = [
        f"{document['directory']}: version {document['version']} of {document['run_id']}, "
        f"{document['num_bytes'] / 1e6:,.1f} MB",
        f"  AutoModelForCausalLM.from_pretrained({document['directory']!r})",
    ]
    answer(document, lines, as_json=as_json)
