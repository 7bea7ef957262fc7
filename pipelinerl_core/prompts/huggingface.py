"""Prompts from a data set of the Hugging Face hub or of a local directory."""

from collections.abc import Iterable
from dataclasses import fields
from pathlib import Path
from tempfile import TemporaryDirectory

import datasets
from datasets.utils.extract import ExtractManager

from pipelinerl_core.config.prompts import HuggingFacePrompts
from pipelinerl_core.config.run import RunConfig
from pipelinerl_core.errors import ConfigError
from pipelinerl_core.prompts.records import (
    Records,
    joined,
    labelled,
    part_of,
    read_file,
    table_records,
)
from pipelinerl_core.prompts.table import Rows, TableSource

_TEXT_READERS = ("json", "csv")
"""Readers of the library that guess types."""
_KNOWN_OPTIONS = {
    *("name", "version", "data_dir", "data_files", "description", "features", "field", "sep", "delimiter"),
    *("use_threads", "block_size", "chunksize", "newlines_in_values", "on_mixed_types", "parse_agent_traces"),
    "batch_size",
}
"""Options of these readers that do not change which rows there are, or that are respected here."""


def build(config: RunConfig) -> TableSource:
    """The source of a configuration; raises ConfigError if the data set cannot be loaded or a column is missing."""
    section = config.prompts
    assert isinstance(section, HuggingFacePrompts)
    directory = Path(section.path).expanduser()
    name = directory.name if directory.is_dir() else section.path

    def rows(key: str, split: str) -> Rows:
        return Rows(_records(section, key, split), config, name)

    training, own = rows("prompts.split", section.split), section.held_out_split
    held_out = (training if own == section.split else rows("prompts.held_out_split", own)) if own else None
    return TableSource(name, training, config.seed, share=section.held_out_share, held_out=held_out)


def _records(section: HuggingFacePrompts, key: str, split: str) -> Records:
    """All rows of a split. key: the key that names the split, for messages."""
    try:
        return _load(section, key, split)
    except ConfigError:
        raise
    except Exception as error:  # noqa: BLE001  (errors of the library, of fsspec and of the network)
        reason = (str(error).splitlines() or [""])[0].rstrip(".")
        raise ConfigError(
            f"prompts.path={section.path}: the data set cannot be loaded: {type(error).__name__}: {reason}. "
            "Set prompts.path to a directory, or to a data set on a hub that this host can reach; "
            "`pipelinerl train ... --tiny` needs no data set of a hub"
        ) from None


def _load(section: HuggingFacePrompts, key: str, split: str) -> Records:
    directory, origin = Path(section.path).expanduser(), f"{section.path}, split {split}"
    is_saved = (directory / "dataset_dict.json").is_file() or (directory / "state.json").is_file()
    if is_saved and section.config_name:
        raise ConfigError(
            f"prompts.config_name={section.config_name}: {section.path} was written by save_to_disk and has no "
            "configurations. Remove prompts.config_name"
        )
    if (directory / "dataset_dict.json").is_file():
        splits = datasets.load_from_disk(str(directory))
        _require(key, split, "splits", section.path, splits)
        return _rows_of(splits[split], origin)
    if is_saved:
        return _rows_of(datasets.load_from_disk(str(directory)), origin)
    path = str(directory) if directory.is_dir() else section.path
    try:
        builder = datasets.load_dataset_builder(path, section.config_name or None)
        # Files of the hub are read by the library, whose cache serves hosts without a network.
        if _kind(builder) in _TEXT_READERS or (_kind(builder) == "parquet" and directory.is_dir()):
            return _file_rows(builder, split, origin)
        return _rows_of(datasets.load_dataset(path, section.config_name or None, split=split), origin)
    except ValueError as error:
        if section.config_name or "Config name is missing" in str(error):
            names = datasets.get_dataset_config_names(path)
            _require("prompts.config_name", section.config_name, "configurations", section.path, names)
        names = datasets.get_dataset_split_names(path, section.config_name or None)
        _require(key, split.partition("[")[0], "splits", section.path, names)
        raise


def _rows_of(data: datasets.Dataset, origin: str) -> Records:
    """The rows of a data set that the library has read."""
    return table_records(data.with_format("arrow")[:], origin, labelled(data.features))


def _kind(builder: datasets.DatasetBuilder) -> str:
    """The reader of the library that the builder uses."""
    return type(builder).__module__.rpartition(".")[2]


def _file_rows(builder: datasets.DatasetBuilder, instruction: str, origin: str) -> Records:
    """The rows of a split, or of a part of it such as train[:50%], from JSON, CSV and Parquet files.

    Raises ConfigError for options of the library's readers that are not supported.
    """
    options, kind = builder.config, _kind(builder)
    default = type(options)()
    given = [
        option.name for option in fields(options) if getattr(options, option.name) != getattr(default, option.name)
    ]
    if others := sorted(set(given) - _KNOWN_OPTIONS):
        raise ConfigError(
            f"prompts.path={origin}: its configuration sets {', '.join(others)} for the reader of the files. This is "
            "not supported. Convert the files to JSON Lines or Parquet"
        )
    separator = str(getattr(options, "delimiter", None) or getattr(options, "sep", ""))
    names = {part.partition("[")[0].strip() for part in instruction.split("+")}
    declared = builder.info.features
    features = labelled(declared) if declared else None
    splits: dict[str, Records] = {}
    for split, files in options.data_files.items():
        if names & {str(split), "all"}:
            field, paths = getattr(options, "field", None) or "", datasets.DownloadManager().download(list(files))
            # In its cache the library extracts a local file once, and other processes read there meanwhile.
            with TemporaryDirectory(prefix="pipelinerl-data-") as place:
                extract = ExtractManager(place).extract
                parts = [
                    read_file(
                        Path(extract(path)), origin, separator=separator, field=field, kind=kind, features=features
                    )
                    for path in paths
                ]
            splits[str(split)] = joined(parts, origin)
    lengths = {split: len(records) for split, records in splits.items()}
    chosen = datasets.ReadInstruction.from_spec(instruction).to_absolute(lengths)  # ValueError for an unknown split
    return joined([part_of(splits[part.splitname], part.from_, part.to) for part in chosen], origin)


def _require(key: str, name: str, noun: str, path: str, existing: Iterable[str]) -> None:
    if name not in existing:
        raise ConfigError(f"{key}={name}: {path} has the {noun} {', '.join(existing)}. Set {key} to one of them")
