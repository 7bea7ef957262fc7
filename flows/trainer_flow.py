"""The trainer on the machine of a work pool: the train flow starts it as deployment trainer/trainer."""

from typing import Annotated

from prefect import flow
from prefect.task_runners import ThreadPoolTaskRunner
from pydantic import Field

from flows.parameters import described
from tasks.placement import TRAINER
from tasks.pooled import run_pooled

RunUrl = Annotated[str, Field(description="URL of the run in the object store, as the train flow made it.")]


@flow(name="trainer", task_runner=ThreadPoolTaskRunner(), persist_result=False)  # type: ignore[arg-type]
@described
def trainer(run_url: RunUrl) -> None:
    """Take the optimizer steps of a live run."""
    run_pooled(run_url, TRAINER)
