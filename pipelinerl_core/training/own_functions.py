"""Loads a user's loss and function of advantages into a process that trains."""

from collections.abc import Callable, Mapping
from typing import Any

import torch

from pipelinerl_core.algo.own import OWN
from pipelinerl_core.config.losses import LossConfig
from pipelinerl_core.errors import ConfigError
from pipelinerl_core.sandbox.user_code import failure_line, load

_texts: dict[str, str | None] = {}


def load_own_functions(config: LossConfig, texts: Mapping[str, str | None]) -> None:
    """Load the functions that the section `loss` names. Raises ConfigError.

    texts: key of the section -> text of the file; None, or no entry, for a module. An exception of a loaded function
    becomes a ConfigError, so that a start of the trainer that would fail again is not repeated.
    """
    _texts.clear()
    _texts.update(texts)
    for key, location in config.own_functions.items():
        try:
            function, file = load(location, texts.get(key), "function")
            if not callable(function):
                raise TypeError(f"{location} is not callable")
        except (Exception, SystemExit) as error:  # noqa: BLE001 (any exception of the user's file)
            raise ConfigError(f"{key}={location}: {failure_line(error)}") from None
        OWN[location] = _guarded(f"{key}={location}", function, file)


def loaded_texts() -> dict[str, str | None]:
    """The texts of the functions of this process, for its other ranks."""
    return dict(_texts)


def _guarded(subject: str, function: Callable[..., Any], file: str) -> Callable[..., Any]:
    def call(*arguments: Any, **options: Any) -> Any:
        try:
            return function(*arguments, **options)
        except (torch.OutOfMemoryError, ConfigError):
            raise
        except (Exception, SystemExit) as error:
            raise ConfigError(f"{subject}: {failure_line(error, file)}") from error

    return call
