"""`pipelinerl trace`: from a token to the version that sampled it and the step that trained it."""

from typing import Annotated

import typer

from pipelinerl.flows.cli.arguments import Json, Root, Run
from pipelinerl.flows.cli.console import answer


def trace(
    run: Run,
    place: Annotated[
        str, typer.Argument(metavar="GROUP[.ROLLOUT[:TOKEN]]|vVERSION", help="Group, rollout, token, or a version.")
    ],
    gradient: Annotated[
        bool,
        typer.Option(
            "--gradient",
            help="Compute the step again and print only the norm of its gradient with and without the rollout.",
        ),
    ] = False,
    root: Root = "",
    as_json: Json = False,
) -> None:
    """Trace a group, a rollout, a token or a weight version through a run.

    For a group: its prompt, what became of it, the step that trained it, and each rollout's reward, advantage and
    share of the step's sum of |advantage x weight in the loss x ratio| over trained tokens. For a rollout also its
    text, components, and which actor sampled which tokens with which version after which swap; for a token also its
    log-probability, ratio and lag. For a version: the groups of the step that made it, and the actors that sampled
    with it.

    Examples: `pipelinerl trace latest 12`, `pipelinerl trace latest 12.3:40`, `pipelinerl trace latest v7 --json`
    """
    from pipelinerl.flows.cli.child import run_tool
    from pipelinerl_core.errors import ConfigError
    from pipelinerl_core.report.query.output import json_value
    from pipelinerl_core.report.trace import parse_place, trace, trace_lines
    from pipelinerl_core.run.locate import locate_run
    from pipelinerl_core.storage.object_store import open_store

    parsed, url = parse_place(place), locate_run(run, root)
    document = trace(open_store(url), parsed)
    if gradient:
        if parsed.rollout is None or document["step"] is None:
            raise ConfigError("--gradient needs a rollout that was trained, for example 12.3")
        names = {"step": document["step"]["step"], "group": parsed.group, "rollout": parsed.rollout}
        arguments = {name: str(value) for name, value in names.items()}
        run_tool("gradient", {"run": url, **arguments}, as_json=as_json)
    answer(json_value(document), trace_lines(document), as_json=as_json)
