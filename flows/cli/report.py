"""`pipelinerl report`: writes the report of a run anew."""

from pipelinerl.flows.cli.arguments import Json, Root, Run
from pipelinerl.flows.cli.console import answer


def report(run: Run, root: Root = "", as_json: Json = False) -> None:
    """Write report.json, report.html and weights.parquet of a run from its stored objects, and print the summary.

    The run may be live. `pipelinerl resume` of a complete run also repeats a missing last evaluation, and writes what
    MLflow and Prefect lack.

    Examples: `pipelinerl report latest`, `pipelinerl report quickstart-1a2b3c4d --root s3://bucket/runs`
    """
    from pipelinerl.flows.cli.training import report_location, summary
    from pipelinerl_core.report.html import write_report
    from pipelinerl_core.run.context import open_run
    from pipelinerl_core.run.locate import locate_run

    context = open_run(locate_run(run, root))
    document = write_report(context.store)
    root_of_run = context.store.url.rpartition("/")[0]
    answer(document, summary(document, report_location(context.run_id, root_of_run)), as_json=as_json)
