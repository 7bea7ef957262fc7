"""`pipelinerl sweep`: trains with every combination of values."""

from typing import Annotated

import typer

from pipelinerl.flows.cli.arguments import Deployment, Json, Limit, Root, complete_preset, complete_setting


def sweep(
    source: Annotated[
        str,
        typer.Argument(
            metavar="PRESET|FILE.toml", help="A shipped preset or a TOML file.", autocompletion=complete_preset
        ),
    ],
    grid: Annotated[
        list[str],
        typer.Argument(
            metavar="KEY=V1,V2...",
            help="Values of settings. A comma inside of quotes, brackets or braces belongs to a value.",
            autocompletion=complete_setting,
        ),
    ],
    limit: Limit = 1,
    target: Annotated[
        float, typer.Option(help="Held-out accuracy to which the time is measured; 0: runs of trainer.steps.")
    ] = 0.0,
    name: Annotated[str, typer.Option(help="Name of the sweep. Default: the preset.")] = "",
    deployment: Deployment = "",
    root: Root = "",
    as_json: Json = False,
) -> None:
    """Train with every combination of values, and with every seed; at the end print a table of means over the seeds.

    Examples:

    - `pipelinerl sweep quickstart learner.lr=1e-4,3e-4 seed=0,1,2 --limit 2`
    - `pipelinerl sweep mine.toml loss.kind=grpo,dapo trainer.steps=200 'prompts.lengths=[2,3],[3,4]'`

    Ctrl-C stops the sweep; the same command continues it without repeating runs, and more seeds extend it.
    """
    from pipelinerl.flows.cli.comparing import carry_out, show
    from pipelinerl_core.comparison.plan import plan_sweep

    plan = plan_sweep(source, grid, target=target, name=name, limit=limit, deployment=deployment)
    show(carry_out(plan, root), as_json=as_json)
