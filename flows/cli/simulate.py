"""`pipelinerl simulate`: throughput and lag before a run."""

from typing import Annotated

import typer

from pipelinerl.flows.cli.arguments import Json, Overrides, Root
from pipelinerl.flows.cli.console import answer


def simulate(
    run: Annotated[
        str, typer.Argument(metavar="[RUN]", help="A recorded run: id under the root, `latest`, path or URL.")
    ] = "",
    overrides: Overrides = None,
    root: Root = "",
    paper: Annotated[
        bool, typer.Option("--paper", help="The case study of arXiv:2509.19128, appendix A, beside its figures.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Predict throughput and lag of a run with changed settings, without running anything.

    The speeds of engines and trainer come from a recorded run; the scheduler is the real one, on simulated time. The
    prediction of the recorded settings is printed beside the measurement: the difference is the error to expect.

    Examples:

    - `pipelinerl simulate latest`
    - `pipelinerl simulate latest placement.actors=2 schedule.max_lag=8`
    - `pipelinerl simulate latest schedule.kind=conventional`
    - `pipelinerl simulate --paper`
    """
    from pipelinerl_core.config.load import override_config
    from pipelinerl_core.errors import ConfigError
    from pipelinerl_core.planning.calibration import calibrate, document, document_lines
    from pipelinerl_core.planning.case_study import case_study, case_study_lines
    from pipelinerl_core.report.facts import collect
    from pipelinerl_core.run.locate import locate_run
    from pipelinerl_core.storage.object_store import open_store

    if paper == bool(run):
        raise ConfigError("simulate needs either a recorded run, for example `latest`, or --paper")
    if paper:
        found = case_study()
        answer(found, case_study_lines(found), as_json=as_json)
        return
    calibration = calibrate(collect(open_store(locate_run(run, root))))
    changed = override_config(calibration.config, overrides) if overrides else None
    found = document(calibration, changed)
    answer(found, document_lines(found), as_json=as_json)
