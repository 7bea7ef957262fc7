"""`pipelinerl audit`: nothing of a run was lost or trained twice."""

from pipelinerl.flows.cli.arguments import Json, Root, Run
from pipelinerl.flows.cli.child import run_module


def audit(run: Run, root: Root = "", as_json: Json = False) -> None:
    """Prove from the objects of a run that nothing was lost or trained twice; exit 1 if anything does not close.

    Example: `pipelinerl audit latest`
    """
    from pipelinerl_core.run.locate import locate_run

    run_module("tools.audit", {"run": locate_run(run, root)}, ["--json"] if as_json else [])
