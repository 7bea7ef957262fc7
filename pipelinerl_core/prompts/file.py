"""Prompts from a JSON-lines or Parquet file."""

from pathlib import Path

import pyarrow as pa
import pyarrow.json
import pyarrow.parquet

from pipelinerl_core.config.sections import FilePrompts, RunConfig
from pipelinerl_core.config.verifier import verifier_name
from pipelinerl_core.errors import ConfigError
from pipelinerl_core.prompts.table import TableSource, answer_column, text_column

BLOCK_BYTES = 1 << 26
"""Block size of the JSON parser, and so the longest line."""


def build(config: RunConfig) -> TableSource:
    """The source of a configuration; raises ConfigError if the file or a column is missing or unusable."""
    section = config.prompts
    assert isinstance(section, FilePrompts)
    table = _read(Path(section.path).expanduser(), section.path)
    prompts = text_column(table, section.prompt_column, "prompts.prompt_column", section.path)
    answers = answer_column(table, config, section.answer_column, section.path)
    columns = table if config.reward.function else None
    return TableSource(Path(section.path).name, verifier_name(config), prompts, answers, config.seed, columns)


def _read(path: Path, given: str) -> pa.Table:
    if path.suffix not in (".jsonl", ".parquet"):
        raise ConfigError(
            f"prompts.path={given}: the name must end in .jsonl or .parquet. Rename or convert the file"
        )
    if not path.is_file():
        raise ConfigError(f"prompts.path={given}: no such file. Set prompts.path to a .jsonl or .parquet file")
    try:
        if path.suffix == ".parquet":
            return pyarrow.parquet.read_table(path)
        return pyarrow.json.read_json(path, read_options=pyarrow.json.ReadOptions(block_size=BLOCK_BYTES))
    except (pa.ArrowException, OSError) as error:
        reason = str(error).splitlines()[0]
        raise ConfigError(f"prompts.path={given}: cannot be read as {path.suffix[1:]}: {reason}") from None
