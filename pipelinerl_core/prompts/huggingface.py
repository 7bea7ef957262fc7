"""Prompts from a data set of the Hugging Face hub or of a local directory."""

from pathlib import Path
from typing import Any

import datasets

from pipelinerl_core.config.sections import HuggingFacePrompts, RunConfig
from pipelinerl_core.config.verifier import verifier_name
from pipelinerl_core.errors import ConfigError
from pipelinerl_core.prompts.table import TableSource, answer_column, text_column


def build(config: RunConfig) -> TableSource:
    """The source of a configuration; raises ConfigError if the data set cannot be loaded or a column is missing."""
    section = config.prompts
    assert isinstance(section, HuggingFacePrompts)
    try:
        table = _load(section).with_format("arrow")[:]
    except ConfigError:
        raise
    except Exception as error:  # noqa: BLE001  (errors of the library, of fsspec and of the network)
        reason = (str(error).splitlines() or [""])[0]
        raise ConfigError(
            f"prompts.path={section.path}: the data set cannot be loaded: {type(error).__name__}: {reason} "
            "Set prompts.path to a directory, or to a data set on a hub that this host can reach"
        ) from None
    prompts = text_column(table, section.prompt_column, "prompts.prompt_column", section.path)
    answers = answer_column(table, config, section.answer_column, section.path)
    columns = table if config.reward.function else None
    directory = Path(section.path).expanduser()
    name = directory.name if directory.is_dir() else section.path
    return TableSource(name, verifier_name(config), prompts, answers, config.seed, columns)


def _load(section: HuggingFacePrompts) -> Any:
    """One split as a datasets.Dataset."""
    directory = Path(section.path).expanduser()
    if (directory / "dataset_dict.json").is_file():
        splits = datasets.load_from_disk(str(directory))
        if section.split not in splits:
            raise ConfigError(
                f"prompts.split={section.split}: {section.path} has the splits {', '.join(splits)}. Name one of them"
            )
        return splits[section.split]
    if (directory / "state.json").is_file():
        return datasets.load_from_disk(str(directory))
    return datasets.load_dataset(str(directory) if directory.is_dir() else section.path, split=section.split)
