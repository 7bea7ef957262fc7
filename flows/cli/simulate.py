"""`pipelinerl simulate`: throughput and lag before a run."""

from typing import Annotated

import typer

from pipelinerl.flows.cli.arguments import Json
from pipelinerl.flows.cli.console import answer


def simulate(
    paper: Annotated[
        bool, typer.Option("--paper", help="The case study of arXiv:2509.19128, appendix A, beside its figures.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Compute throughput and lag from a model of the accelerators, without running anything.

    Example: `pipelinerl simulate --paper`
    """
    from pipelinerl_core.errors import ConfigError
    from pipelinerl_core.planning.case_study import case_study, case_study_lines

    if not paper:
        raise ConfigError("simulate computes the paper's case study only. Set --paper")
    document = case_study()
    answer(document, case_study_lines(document), as_json=as_json)
