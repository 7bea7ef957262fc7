"""`pipelinerl compare`: measures which settings reach an accuracy sooner."""

from typing import Annotated

import typer

from pipelinerl.flows.cli.arguments import Deployment, Json, Limit, Overrides, Root


def compare(
    source: Annotated[
        str, typer.Argument(metavar="[PRESET|FILE.toml]", help="Preset or file of all arms.")
    ] = "quickstart",
    overrides: Overrides = None,
    arm: Annotated[list[str] | None, typer.Option(help='"NAME: section.key=value ..."; repeat for each arm.')] = None,
    arms: Annotated[
        str, typer.Option(metavar="FILE.toml", help="A file with the arms, each a table of settings.")
    ] = "",
    seeds: Annotated[str, typer.Option(help="Every arm runs once with each seed.")] = "0,1,2",
    target: Annotated[
        float, typer.Option(help="Held-out accuracy to which the time is measured; 0: runs of trainer.steps.")
    ] = 0.5,
    margin: Annotated[
        float, typer.Option(help="A run stops if its training reward exceeds the target by this.")
    ] = 0.07,
    budget_minutes: Annotated[float, typer.Option(help="Seeds that do not fit are left out, the last first.")] = 50.0,
    reference: Annotated[str, typer.Option(help="Arm to compare the others with. Default: the first.")] = "",
    name: Annotated[str, typer.Option(help="Name of the comparison. Default: the preset.")] = "",
    limit: Limit = 1,
    deployment: Deployment = "",
    root: Root = "",
    as_json: Json = False,
) -> None:
    """Train with several settings (arms) and measure how long each arm takes to a held-out accuracy.

    Examples:

    - `pipelinerl compare --arm "pipeline: schedule.kind=pipeline" --arm "four: schedule.kind=conventional
      schedule.steps_per_phase=4" --seeds 0,1`
    - `pipelinerl compare quickstart --arms arms.toml --target 0.4 trainer.steps=200`

    Every arm runs with every seed. Ctrl-C stops the comparison; the same command continues it without repeating runs.
    """
    from pipelinerl.flows.cli.comparing import arms_of, carry_out, show, split_source
    from pipelinerl_core.comparison.plan import Wanted, parse_seeds, plan_comparison

    preset, settings = split_source(source, overrides or ())
    wanted = Wanted(
        source=preset,
        arms=arms_of(arm or (), arms),
        overrides=settings,
        seeds=parse_seeds(seeds),
        target=target,
        margin=margin,
        budget_minutes=budget_minutes,
        reference=reference,
        name=name,
        limit=limit,
        deployment=deployment,
    )
    show(carry_out(plan_comparison(wanted), root), as_json=as_json)
