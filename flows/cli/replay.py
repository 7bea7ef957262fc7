"""`pipelinerl replay`: trains recorded batches again, to verify a run or with other settings."""

from collections.abc import Sequence
from typing import Annotated

import typer

from pipelinerl.flows.cli.arguments import Json, Root, Run
from pipelinerl.flows.cli.child import run_module

ESS_SHARE_HELP = "Not ranked below this share of the recorded run's effective sample size."


def replay(
    run: Run,
    from_step: Annotated[int | None, typer.Option(help="First step. Default: the first step of the run.")] = None,
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Settings of another loss or learner.")
    ] = None,
    to_step: Annotated[int | None, typer.Option(help="Last step. Default: the last step of the run.")] = None,
    ess_share: Annotated[float, typer.Option(help=f"With settings: {ESS_SHARE_HELP}")] = 0.3,
    root: Root = "",
    as_json: Json = False,
) -> None:
    """Train recorded batches again and compare losses and weights with the commits. Exit 1 if any differs.

    With settings of loss or learner: what would they have made of the same rollouts? The recorded groups and rewards
    get new advantages, weights and masks and train another model, which is kept beside the run, evaluated on the
    held-out prompts and compared with the run on a page. The answer holds up to the step at which the recorded
    rollouts no longer represent the new policy; the result names that step. `pipelinerl study` compares settings.

    Examples: `pipelinerl replay latest --from-step 10 --to-step 20`, `pipelinerl replay latest loss.ratio_max=2`
    """
    from pipelinerl_core.run.locate import locate_run

    url = locate_run(run, root)
    if overrides:
        _replay_with(url, overrides, from_step, to_step, ess_share, as_json=as_json)
        return
    steps = {key: str(step) for key, step in (("from-step", from_step), ("to-step", to_step)) if step is not None}
    run_module("tools.replay", {"run": url} | steps, ["--json"] if as_json else [])


def _replay_with(
    url: str, overrides: Sequence[str], first: int | None, last: int | None, ess_share: float, *, as_json: bool
) -> None:
    from pipelinerl.flows.cli.console import answer, say
    from pipelinerl_core.comparison.whatif.document import HTML_KEY, replay_document
    from pipelinerl_core.comparison.whatif.page import lines, step_line
    from pipelinerl_core.comparison.whatif.run_arm import run_arm
    from pipelinerl_core.comparison.whatif.study import plan_replay
    from pipelinerl_core.run.context import open_run
    from pipelinerl_core.run.records import Commit

    planned = plan_replay(open_run(url), overrides, first, last, ess_share)
    (arm,) = planned.arms

    def show(commit: Commit) -> None:
        say(step_line(commit, arm.origin.last))

    run_arm(arm, on_step=show)
    document = planned.write()
    page = f"{document['url'].removeprefix('file://')}/{HTML_KEY}"
    answer(
        replay_document(document), [*lines(document), f"weights: {arm.store.url}", f"page: {page}"], as_json=as_json
    )
