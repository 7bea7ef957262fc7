"""`pipelinerl drain`: asks a live run to stop after its next commit."""

from pipelinerl.flows.cli.arguments import Json, Root, Run
from pipelinerl.flows.cli.console import answer


def drain(run: Run, root: Root = "", as_json: Json = False) -> None:
    """Stop a live run after its next commit, from any machine that reaches its store; `resume` continues the run.

    Unlike Ctrl-C, drain lets the current step finish, however long the step takes.

    Example: `pipelinerl drain latest`
    """
    from pipelinerl_core.run.drain import request_drain
    from pipelinerl_core.run.locate import locate_run

    document = request_drain(locate_run(run, root))
    line = f"{document['run_id']} stops after its next commit (the newest is {document['step']})"
    answer(document, [line], as_json=as_json)
