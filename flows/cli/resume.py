"""`pipelinerl resume`: a run that was stopped goes on."""

from pipelinerl.flows.cli.arguments import Json, Overrides, Root, Run


def resume(run: Run, overrides: Overrides = None, root: Root = "", as_json: Json = False) -> None:
    """Go on with a run where its last commit is, after a stop, a crash or a kill. Nothing is lost or trained twice.

    Settings may change what it runs on, for good: ranks and kind of the learner, device, placement.

    Examples: `pipelinerl resume latest`, `pipelinerl resume latest trainer.ranks=1`. Refused while the run is live.
    """
    from pipelinerl.flows.cli.training import carry_out
    from pipelinerl_core.run.jobs import resume_job

    carry_out(resume_job(run, overrides or (), root), as_json=as_json)
