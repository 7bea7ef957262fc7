"""What the actor and trainer flows of a work pool do: supervise one role by the same task as a local run."""

import shutil
from dataclasses import replace

from pipelinerl_core.config import RunConfig
from pipelinerl_core.roles.context import open_run
from tasks.placement import TRAINER, Crew, load_token
from tasks.runs import shared_memory_of

FOLLOW_SECONDS = 1.0


def run_pooled(run_url: str, name: str) -> None:
    """Run one role of a live run on this machine until it ends; call it in a flow."""
    run = open_run(run_url)
    crew = Crew(replace(run, token=load_token(run.run_id), config=_on_this_host(run.config)))
    try:
        crew.start(name)
        while not crew.has_ended(name):
            crew.wait(FOLLOW_SECONDS)
    finally:
        crew.stop()
        if name == TRAINER:  # the actors of this host may still read it
            shutil.rmtree(shared_memory_of(run.run_id), ignore_errors=True)


def _on_this_host(config: RunConfig) -> RunConfig:
    """The same configuration, with the role as a child of this flow."""
    return config.model_copy(update={"placement": config.placement.model_copy(update={"kind": "local"})})
