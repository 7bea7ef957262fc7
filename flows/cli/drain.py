"""`pipelinerl drain`: a live run stops after its next commit."""

from pipelinerl.flows.cli.arguments import Json, Root, Run
from pipelinerl.flows.cli.console import answer


def drain(run: Run, root: Root = "", as_json: Json = False) -> None:
    """Let a live run stop after its next commit, from anywhere that reaches its store; `resume` goes on.

    Unlike Ctrl-C it waits for a step that takes longer than a few seconds. Example: `pipelinerl drain latest`
    """
    from pipelinerl_core.run.drain import request_drain
    from pipelinerl_core.run.locate import locate_run

    document = request_drain(locate_run(run, root))
    line = f"{document['run_id']} stops after its next commit (the newest is {document['step']})"
    answer(document, [line], as_json=as_json)
