"""PipelineRL from Python: configure, start, read and export runs (docs/python.md).

`flows/` and `tasks/` are importable as `pipelinerl.flows` and `pipelinerl.tasks` (docs/adr/0015).
"""

from typing import TYPE_CHECKING, Any

from pipelinerl_core import __version__

if TYPE_CHECKING:
    from pipelinerl.api import Run, load_config, open_run, runs, start, train

__all__ = ["Run", "__version__", "load_config", "open_run", "runs", "start", "train"]


def __getattr__(name: str) -> Any:
    if name in __all__:  # imported on use, because the command line imports this package for --help
        from pipelinerl import api  # noqa: PLC0415

        return getattr(api, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
