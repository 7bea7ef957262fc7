"""What a train flow is to do: a new run or one that goes on, its configuration parsed once. Imports no Prefect."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from pipelinerl_core.config import RunConfig, load_config, resume_config
from pipelinerl_core.run.context import RunContext, open_run
from pipelinerl_core.run.locate import locate_run, refuse_if_live


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A run to start, or to go on with."""

    preset: str
    """Preset or TOML file of a new run, id of one that goes on."""
    overrides: tuple[str, ...]
    """What differs from the preset; of a run that goes on, what it runs on from now on."""
    root: str
    config: RunConfig
    """All of this resolved."""
    run: RunContext | None = None
    """The run that goes on, with `config`."""


def new_job(preset: str, overrides: Sequence[str], root: str) -> Job:
    """Parse the configuration of a new run; raises ConfigError."""
    return Job(preset=preset, overrides=tuple(overrides), root=root, config=load_config(preset, overrides))


def resume_job(run: str, overrides: Sequence[str], root: str) -> Job:
    """Open a run that is not live, with what is to change; raises ConfigError. Writes nothing."""
    url = locate_run(run, root)
    refuse_if_live(url)
    found = open_run(url)
    changed = replace(found, config=resume_config(found.config, overrides))
    return Job(
        preset=found.run_id,
        overrides=tuple(overrides),
        root=url.rpartition("/")[0],
        config=changed.config,
        run=changed,
    )
