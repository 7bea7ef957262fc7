"""`pipelinerl audit`: checks that no rollout of a run was lost or trained twice."""

from pipelinerl.flows.cli.arguments import Json, Root, Run
from pipelinerl.flows.cli.child import run_tool


def audit(run: Run, root: Root = "", as_json: Json = False) -> None:
    """Check in the stored objects of a run that no rollout was lost or trained twice. Exit 1 if a check fails.

    Example: `pipelinerl audit latest`
    """
    from pipelinerl_core.run.locate import locate_run

    run_tool("audit", {"run": locate_run(run, root)}, as_json=as_json)
