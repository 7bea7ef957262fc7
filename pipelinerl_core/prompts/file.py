"""Prompts from a file of rows."""

from pathlib import Path

from pipelinerl_core.config.prompts import FilePrompts
from pipelinerl_core.config.run import RunConfig
from pipelinerl_core.prompts.records import read_file
from pipelinerl_core.prompts.table import Rows, TableSource


def build(config: RunConfig) -> TableSource:
    """The source of a configuration; raises ConfigError if the file or a column is missing or unusable."""
    section = config.prompts
    assert isinstance(section, FilePrompts)
    name = Path(section.path).name

    def rows(key: str, path: str) -> Rows:
        return Rows(read_file(Path(path).expanduser(), f"{key}={path}"), config, name)

    training, own = rows("prompts.path", section.path), section.held_out_path
    held_out = (training if own == section.path else rows("prompts.held_out_path", own)) if own else None
    return TableSource(name, training, config.seed, share=section.held_out_share, held_out=held_out)
