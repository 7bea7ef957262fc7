"""The Prefect tasks of roles; each task run supervises one role process (supervision/run_roles.py)."""

from threading import Event

from prefect import task
from prefect.cache_policies import NO_CACHE

from pipelinerl_core.run.context import RunContext
from pipelinerl_core.run.records import EvalRecord
from pipelinerl_core.supervision.run_roles import evaluate, supervise
from pipelinerl_core.supervision.supervise import RoleReport

NODE_PREFIX = "trainer-node-"
"""Prefix of the name of the role that runs the trainer's ranks on a further host: trainer-node-1, ..."""


@task(task_run_name="{name}", persist_result=False, cache_policy=NO_CACHE, retries=0)
def run_role(
    run: RunContext, role: str, name: str, arguments: dict[str, str], stop: Event, *, has_hub: bool
) -> RoleReport:
    """Supervise a role of a run; the caller names the task after the role. arguments, has_hub: as of `supervise`."""
    return supervise(run, role, name, arguments, stop, has_hub=has_hub)


@task(name="evaluation", task_run_name="evaluate-{version}", persist_result=False, cache_policy=NO_CACHE, retries=0)
def run_evaluation(
    run: RunContext, version: str, stop: Event, enough: float | None = None
) -> list[EvalRecord] | None:
    """Measure the held-out accuracy of durable versions: first, last, all, or numbers separated by commas.

    enough: accuracy after which, once two versions have reached it, the later versions are left out.
    """
    return evaluate(run, version, stop, enough)
