"""Input of a train flow: a new or a resumed run, with its configuration parsed once. Imports no Prefect."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from pipelinerl_core.config import RunConfig
from pipelinerl_core.config.mlflow_login import without_logins
from pipelinerl_core.errors import ConfigError
from pipelinerl_core.models.resolve import load_config, resume_config
from pipelinerl_core.run.context import RunContext, open_run
from pipelinerl_core.run.history import counted_commit_keys, read_commit
from pipelinerl_core.run.locate import locate_run, refuse_if_live


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A run to start or to resume."""

    preset: str
    """Preset or TOML file of a new run, run id of a resumed run."""
    overrides: tuple[str, ...]
    """`section.key=value`: overrides of the preset, or of the stored configuration of a resumed run."""
    root: str
    config: RunConfig
    """The resolved configuration."""
    run: RunContext | None = None
    """The resumed run, with `config`."""

    @property
    def name(self) -> str:
        """What the id of a new run begins with."""
        return self.config.tracking.name.replace("/", "-") or self.preset


def new_job(preset: str, overrides: Sequence[str], root: str) -> Job:
    """Parse the configuration of a new run; raises ConfigError."""
    overrides = without_logins(overrides)
    return Job(preset=preset, overrides=overrides, root=root, config=load_config(preset, overrides))


def resume_job(run: str, overrides: Sequence[str], root: str) -> Job:
    """Open a run to resume, with overrides. Raises ConfigError, also if the run is live, and BrokenRecord if an epoch
    or the newest commit is damaged. Writes nothing."""
    url, overrides = locate_run(run, root), without_logins(overrides)
    refuse_if_live(url)
    context = open_run(url)
    if commits := counted_commit_keys(context.store):
        read_commit(context.store, commits[max(commits)])
    overrides = _with_decay(context.config, overrides, max(commits, default=0))
    changed = replace(context, config=resume_config(context.config, overrides))
    return Job(
        preset=context.run_id,
        overrides=overrides,
        root=url.rpartition("/")[0],
        config=changed.config,
        run=changed,
    )


def _with_decay(config: RunConfig, overrides: Sequence[str], committed: int) -> tuple[str, ...]:
    """The overrides of a resume; with another trainer.steps also learner.decay_steps, so that committed steps keep
    their learning rates. Raises ConfigError for steps that the run cannot have."""
    if any(override.startswith("learner.decay_steps") for override in overrides):
        raise ConfigError("learner.decay_steps: a resume cannot change the decay. Start a new run with --from")
    steps = _steps(config, overrides)
    if steps is None:
        return tuple(overrides)
    if steps < committed:
        raise ConfigError(f"trainer.steps={steps}: step {committed} is committed already. Set at least {committed}")
    others = [override for override in overrides if override.partition("=")[0] != "trainer.steps"]
    is_kept = config.learner.final_lr_share == 1 or config.learner.decay_steps or not committed
    decay = () if is_kept or steps == config.trainer.steps else (f"learner.decay_steps={config.trainer.steps}",)
    return (*others, f"trainer.steps={steps}", *decay)


def _steps(config: RunConfig, overrides: Sequence[str]) -> int | None:
    """trainer.steps as the overrides set it, whatever the spelling; None if they do not."""
    own = [override for override in overrides if override.partition("=")[0] == "trainer.steps"]
    return resume_config(config, own).trainer.steps if own else None
