"""`pipelinerl compare`: which settings learn sooner."""

from typing import Annotated

import typer

from pipelinerl.flows.cli.arguments import Json, Overrides, Root


def compare(
    source: Annotated[
        str, typer.Argument(metavar="[PRESET|FILE.toml]", help="What all arms start from.")
    ] = "quickstart",
    overrides: Overrides = None,
    arm: Annotated[list[str] | None, typer.Option(help='"name: section.key=value ...", once for each arm.')] = None,
    arms: Annotated[str, typer.Option(metavar="FILE.toml", help="Arms as tables of settings.")] = "",
    seeds: Annotated[str, typer.Option(help="Every arm runs once with each.")] = "0,1,2",
    target: Annotated[float, typer.Option(help="Held-out accuracy that the arms are timed to.")] = 0.5,
    margin: Annotated[float, typer.Option(help="A run ends when its training reward is this far above.")] = 0.07,
    budget_minutes: Annotated[float, typer.Option(help="What does not fit is left out, the last seed first.")] = 50.0,
    reference: Annotated[str, typer.Option(help="Arm that the others are compared with; default the first.")] = "",
    name: Annotated[str, typer.Option(help="Of the comparison; default the name of the preset.")] = "",
    root: Root = "",
    as_json: Json = False,
) -> None:
    """Train the same model in several ways and say which reaches an accuracy how much sooner.

    Examples:

    - `pipelinerl compare --arm "pipeline: schedule.kind=pipeline" --arm "four: schedule.kind=conventional
      schedule.steps_per_phase=4" --seeds 0,1`
    - `pipelinerl compare quickstart --arms arms.toml --target 0.4 trainer.steps=200`

    Every arm runs with every seed; runs that are done are found again. Ctrl-C stops; the same command goes on.
    """
    from pipelinerl.flows.cli.comparing import arms_of, carry_out, parse_seeds, show, split_source
    from pipelinerl_core.comparison.plan import Wanted, plan_comparison

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
    )
    show(carry_out(plan_comparison(wanted), root), as_json=as_json)
