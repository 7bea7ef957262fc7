"""A new run that starts from the weights and the configuration of another run: `train --from RUN@VERSION`."""

import os
import re
import shutil
from collections.abc import Callable, Sequence

from pipelinerl_core.config import as_toml
from pipelinerl_core.errors import ConfigError
from pipelinerl_core.models.recipes import cache_directory
from pipelinerl_core.run.context import open_run
from pipelinerl_core.run.locate import locate_run
from pipelinerl_core.run.versions import find_commit
from pipelinerl_core.tools.export import export

_PARENT = re.compile(r"(.+?)(?:@(first|last|\d+))?", re.DOTALL)


def start_from(
    parent: str, source: str, overrides: Sequence[str], root: str, say: Callable[[str], None]
) -> tuple[str, tuple[str, ...]]:
    """The preset or TOML file, and the overrides, of a run that starts from a version of another run.

    parent: RUN or RUN@VERSION, as `export` takes them. source: a preset or TOML file; empty: the configuration of the
    other run. say: shows a line, because this can take long. The weights are exported to the cache once. Raises
    ConfigError as `export`.
    """
    matched = _PARENT.fullmatch(parent)
    if matched is None:
        raise ConfigError("--from: give a run, or RUN@VERSION")
    name, version = matched.groups()
    url = locate_run(name, root)
    run = open_run(url)
    commit = find_commit(run, version or "last", may_replay=True)
    step = commit.step
    # Another run may have had this id, for example in another root.
    directory = cache_directory() / "branches" / f"{run.run_id}-{step}-{commit.weights_digest[:12]}"
    if not (directory / "model").exists():
        say(f"{run.run_id}: the weights of version {step} are read, or computed again if they are not stored")
        partial = directory / f"partial-{os.getpid()}"
        try:
            export(url, partial, str(step))
            try:
                partial.rename(directory / "model")
            except OSError:
                if not (directory / "model").exists():  # else another command has exported the version meanwhile
                    raise
        finally:
            shutil.rmtree(partial, ignore_errors=True)
    if not source:
        file = directory / f"{run.run_id.rpartition('-')[0] or run.run_id}.toml"
        file.write_text(as_toml(run.config.without_labels()), encoding="utf-8")
        source = str(file)
    return source, (f"model.path={directory / 'model'}", *overrides)
