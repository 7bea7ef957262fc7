"""`pipelinerl resume`: continues a run that was stopped."""

from pipelinerl.flows.cli.arguments import Json, Overrides, Root, Run


def resume(run: Run, overrides: Overrides = None, root: Root = "", as_json: Json = False) -> None:
    """Continue a run from its last commit after a stop, crash or kill. No rollout is lost or trained twice.

    Settings may change trainer.steps, ranks and kind of the learner, device and placement; later resumes keep them. A
    finished run continues with a higher trainer.steps. A live run is refused.

    Examples: `pipelinerl resume latest`, `pipelinerl resume latest trainer.ranks=1`, `pipelinerl resume latest
    trainer.steps=200`
    """
    from pipelinerl.flows.cli.training import carry_out
    from pipelinerl_core.run.jobs import resume_job

    carry_out(resume_job(run, overrides or (), root), as_json=as_json)
