"""`pipelinerl study`: what other settings would have made of the recorded rollouts of a run."""

from typing import Annotated

import typer

from pipelinerl.flows.cli.arguments import Json, Root, Run
from pipelinerl.flows.cli.replay import ESS_SHARE_HELP


def study(
    run: Run,
    arm: Annotated[
        list[str] | None,
        typer.Option(help='Changed settings, "section.key=value ..." or "NAME: section.key=value ..."; repeat.'),
    ] = None,
    arms: Annotated[
        str, typer.Option(metavar="FILE.toml", help="A file with the arms, each a table of settings.")
    ] = "",
    from_step: Annotated[int | None, typer.Option(help="First step. Default: the first step of the run.")] = None,
    to_step: Annotated[int | None, typer.Option(help="Last step. Default: the last step of the run.")] = None,
    ess_share: Annotated[float, typer.Option(help=ESS_SHARE_HELP)] = 0.3,
    root: Root = "",
    as_json: Json = False,
) -> None:
    """Train the recorded rollouts of a run with several settings of loss and learner, and rank them by accuracy.

    Examples:

    - `pipelinerl study latest --arm loss.kind=ppo --arm learner.lr=1e-4`
    - `pipelinerl study latest --arm "fast: learner.lr=6e-4 learner.warmup_steps=2"`

    The recorded objective is always one arm and must come out bit for bit; otherwise nothing is ranked. An arm is
    ranked only as long as the recorded rollouts represent its policy. Ctrl-C keeps the finished arms; the same
    command continues.
    """
    from pipelinerl.flows.cli.console import EXIT_FAILURE, answer, say
    from pipelinerl_core.comparison.whatif.document import HTML_KEY
    from pipelinerl_core.comparison.whatif.page import lines
    from pipelinerl_core.comparison.whatif.plan import parse_study_arm
    from pipelinerl_core.comparison.whatif.study import plan_study
    from pipelinerl_core.config.arm import read_arms
    from pipelinerl_core.run.context import open_run
    from pipelinerl_core.run.locate import locate_run

    wanted = [*(read_arms(arms) if arms else ()), *map(parse_study_arm, arm or ())]
    planned = plan_study(open_run(locate_run(run, root)), wanted, from_step, to_step, ess_share)
    from pipelinerl.flows.cli.launch import run_study
    from pipelinerl.flows.study_flow import failure

    document = run_study(planned)
    page = f"{document['url'].removeprefix('file://')}/{HTML_KEY}"
    answer(document, [*lines(document), f"page: {page}"], as_json=as_json)
    if reason := failure(document):
        say(f"pipelinerl: {reason}")
        raise typer.Exit(EXIT_FAILURE)
