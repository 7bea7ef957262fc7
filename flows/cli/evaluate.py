"""`pipelinerl evaluate`: measures the held-out accuracy of weight versions."""

from threading import Event
from typing import Annotated

import typer

from pipelinerl.flows.cli.arguments import Json, Root, Run
from pipelinerl.flows.cli.console import answer


def evaluate(
    run: Run,
    version: Annotated[
        str, typer.Option(help="first, last, all, due, or numbers of durable weight versions separated by commas.")
    ] = "last",
    root: Root = "",
    as_json: Json = False,
) -> None:
    """Measure the held-out accuracy of weight versions: the mean reward of sampled completions.

    Examples: `pipelinerl evaluate latest --version first`, `pipelinerl evaluate latest --version all`
    """
    from pipelinerl_core.run.context import open_run
    from pipelinerl_core.run.evaluations import evaluation_line
    from pipelinerl_core.run.locate import locate_run
    from pipelinerl_core.run.versions import names_several
    from pipelinerl_core.supervision.run_roles import evaluate as evaluate_versions

    records = evaluate_versions(open_run(locate_run(run, root)), version, Event())
    assert records is not None  # nothing sets the stop event
    documents = [record.document() for record in records]
    has_one = not names_several(version) and len(documents) == 1  # otherwise of several versions or sets
    result = documents[0] if has_one else documents
    answer(result, [evaluation_line(record) for record in records], as_json=as_json)
