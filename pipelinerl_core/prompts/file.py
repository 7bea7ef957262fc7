"""Prompts from a JSON-lines or Parquet file."""

from pathlib import Path

import pyarrow as pa
import pyarrow.json
import pyarrow.parquet

from pipelinerl_core.config.sections import FilePrompts, RunConfig
from pipelinerl_core.errors import ConfigError
from pipelinerl_core.prompts.table import Rows, TableSource

BLOCK_BYTES = 1 << 26
"""Block size of the JSON parser, and so the longest line."""
_ADVICE = {
    ".jsonl": "Write one JSON object per line, in UTF-8; a column has the same type in all lines",
    ".parquet": "Write the file again",
}


def build(config: RunConfig) -> TableSource:
    """The source of a configuration; raises ConfigError if the file or a column is missing or unusable."""
    section = config.prompts
    assert isinstance(section, FilePrompts)
    name = Path(section.path).name

    def rows(key: str, path: str) -> Rows:
        return Rows(_read(Path(path).expanduser(), f"{key}={path}"), config, path, name)

    training = rows("prompts.path", section.path)
    held_out = rows("prompts.held_out_path", section.held_out_path) if section.held_out_path else None
    return TableSource(name, training, config.seed, share=section.held_out_share, held_out=held_out)


def _read(path: Path, given: str) -> pa.Table:
    """given: key and value, for messages."""
    if path.suffix not in (".jsonl", ".parquet"):
        raise ConfigError(f"{given}: the name must end in .jsonl or .parquet. Rename or convert the file")
    if not path.is_file():
        raise ConfigError(f"{given}: no such file. Set a .jsonl or .parquet file")
    try:
        if path.suffix == ".parquet":
            table = pyarrow.parquet.read_table(path)
        else:
            table = pyarrow.json.read_json(path, read_options=pyarrow.json.ReadOptions(block_size=BLOCK_BYTES))
        table.validate(full=True)  # text that is not UTF-8 otherwise raises where the text is used
    except (pa.ArrowException, OSError) as error:
        reason = str(error).splitlines()[0]
        raise ConfigError(f"{given}: cannot be read as {path.suffix[1:]}: {reason}. {_ADVICE[path.suffix]}") from None
    return table
