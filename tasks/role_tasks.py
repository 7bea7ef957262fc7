"""One Prefect task per role; each task run supervises one role process (supervision/run_roles.py)."""

from threading import Event

from prefect import task
from prefect.cache_policies import NO_CACHE

from pipelinerl_core.run.context import RunContext
from pipelinerl_core.run.records import EvalRecord
from pipelinerl_core.supervision.run_roles import evaluate, supervise
from pipelinerl_core.supervision.supervise import RoleReport

NODE_PREFIX = "trainer-node-"
"""Prefix of the name of the role that runs the trainer's ranks on a further host: trainer-node-1, ..."""


@task(name="hub", task_run_name="hub", persist_result=False, cache_policy=NO_CACHE, retries=0)
def run_hub(run: RunContext, stop: Event) -> RoleReport:
    """Supervise the hub of a run."""
    return supervise(run, "hub", "hub", {}, stop)


@task(name="trainer", task_run_name="trainer", persist_result=False, cache_policy=NO_CACHE, retries=0)
def run_trainer(run: RunContext, stop: Event) -> RoleReport:
    """Supervise the trainer of a run until its last step."""
    return supervise(run, "trainer", "trainer", {}, stop)


@task(name="trainer-node", task_run_name="{name}", persist_result=False, cache_policy=NO_CACHE, retries=0)
def run_trainer_node(run: RunContext, name: str, stop: Event) -> RoleReport:
    """Supervise the trainer's ranks on a further host."""
    return supervise(run, "trainer_node", name, {"node": name.removeprefix(NODE_PREFIX)}, stop)


@task(name="actor", task_run_name="{name}", persist_result=False, cache_policy=NO_CACHE, retries=0)
def run_actor(run: RunContext, name: str, stop: Event, *, has_hub: bool) -> RoleReport:
    """Supervise one actor of a run. has_hub: as of `supervise`."""
    return supervise(run, "actor", name, {"name": name}, stop, has_hub=has_hub)


@task(name="evaluation", task_run_name="evaluate-{version}", persist_result=False, cache_policy=NO_CACHE, retries=0)
def run_evaluation(
    run: RunContext, version: str, stop: Event, enough: float | None = None
) -> list[EvalRecord] | None:
    """Measure the held-out accuracy of durable versions: first, last, all, or numbers separated by commas.

    enough: accuracy after which, once two versions have reached it, the later versions are left out.
    """
    return evaluate(run, version, stop, enough)
