"""`pipelinerl resume`: continues a run that was stopped."""

from pipelinerl.flows.cli.arguments import Json, Overrides, Root, Run


def resume(run: Run, overrides: Overrides = None, root: Root = "", as_json: Json = False) -> None:
    """Continue a run from its last commit after a stop, crash or kill. No rollout is lost or trained twice.

    Settings may change ranks and kind of the learner, device and placement; later resumes keep them. A live run is
    refused.

    Examples: `pipelinerl resume latest`, `pipelinerl resume latest trainer.ranks=1`
    """
    from pipelinerl.flows.cli.training import carry_out
    from pipelinerl_core.run.jobs import resume_job

    carry_out(resume_job(run, overrides or (), root), as_json=as_json)
