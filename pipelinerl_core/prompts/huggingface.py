"""Prompts from a data set of the Hugging Face hub or of a local directory."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa

from pipelinerl_core.config.sections import HuggingFacePrompts, RunConfig
from pipelinerl_core.errors import ConfigError
from pipelinerl_core.prompts.table import Rows, TableSource


def build(config: RunConfig) -> TableSource:
    """The source of a configuration; raises ConfigError if the data set cannot be loaded or a column is missing."""
    section = config.prompts
    assert isinstance(section, HuggingFacePrompts)
    directory = Path(section.path).expanduser()
    name = directory.name if directory.is_dir() else section.path

    def rows(key: str, split: str) -> Rows:
        return Rows(_table(section, key, split), config, f"{section.path}, split {split}", name)

    training = rows("prompts.split", section.split)
    held_out = rows("prompts.held_out_split", section.held_out_split) if section.held_out_split else None
    return TableSource(name, training, config.seed, share=section.held_out_share, held_out=held_out)


def _table(section: HuggingFacePrompts, key: str, split: str) -> pa.Table:
    """All rows of a split. key: the key that names the split, for messages."""
    try:
        return _load(section, key, split).with_format("arrow")[:]
    except ConfigError:
        raise
    except Exception as error:  # noqa: BLE001  (errors of the library, of fsspec and of the network)
        reason = (str(error).splitlines() or [""])[0].rstrip(".")
        raise ConfigError(
            f"prompts.path={section.path}: the data set cannot be loaded: {type(error).__name__}: {reason}. "
            "Set prompts.path to a directory, or to a data set on a hub that this host can reach; "
            "`pipelinerl train ... --tiny` needs no data set of a hub"
        ) from None


def _load(section: HuggingFacePrompts, key: str, split: str) -> Any:
    """One split as a datasets.Dataset."""
    directory = Path(section.path).expanduser()
    is_saved = (directory / "dataset_dict.json").is_file() or (directory / "state.json").is_file()
    if is_saved and section.config_name:
        raise ConfigError(
            f"prompts.config_name={section.config_name}: {section.path} was written by save_to_disk and has no "
            "configurations. Remove prompts.config_name"
        )
    if (directory / "dataset_dict.json").is_file():
        splits = datasets.load_from_disk(str(directory))
        _require(key, split, "splits", section.path, splits)
        return splits[split]
    if is_saved:
        return datasets.load_from_disk(str(directory))
    path = str(directory) if directory.is_dir() else section.path
    try:
        return datasets.load_dataset(path, section.config_name or None, split=split)
    except ValueError as error:
        if section.config_name or "Config name is missing" in str(error):
            names = datasets.get_dataset_config_names(path)
            _require("prompts.config_name", section.config_name, "configurations", section.path, names)
        names = datasets.get_dataset_split_names(path, section.config_name or None)
        _require(key, split.partition("[")[0], "splits", section.path, names)
        raise


def _require(key: str, name: str, what: str, path: str, existing: Iterable[str]) -> None:
    if name not in existing:
        raise ConfigError(f"{key}={name}: {path} has the {what} {', '.join(existing)}. Set {key} to one of them")
