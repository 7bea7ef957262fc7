"""The evaluate flow: held-out accuracy of weight versions of a finished, stopped or live run."""

from threading import Event
from typing import Annotated, Any

from prefect import flow
from pydantic import Field

from pipelinerl.flows.parameters import Root, Run, described
from pipelinerl.tasks.role_tasks import run_evaluation
from pipelinerl_core.run.context import open_run
from pipelinerl_core.run.locate import locate_run

Version = Annotated[
    str, Field(description="first, last, all, due, or numbers of durable weight versions separated by commas.")
]


@flow(name="evaluate", persist_result=False)
@described
def evaluate(run: Run = "latest", version: Version = "last", root: Root = "") -> list[dict[str, Any]]:
    """Measure the mean reward over held-out prompts, sampled as the section `eval` of the run says.

    The result of each version is also written to evals/<version>.json.
    """
    records = run_evaluation(open_run(locate_run(run, root)), version, Event())
    return [record.document() for record in records or ()]
