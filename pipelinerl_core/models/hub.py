"""Models of the Hugging Face hub by name: `org/name` or `org/name@revision`, in the library's cache ($HF_HOME).

As a process this module downloads a model: `python -m pipelinerl_core.models.hub org/name` prints the directory, or
one line and exit code 2.
"""

import json
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pipelinerl_core.config.run import RunConfig
from pipelinerl_core.errors import ConfigError

_NAME = re.compile(r"(?P<name>\w[\w.-]*/[\w.-]+)(?:@(?P<revision>\w[\w./-]*))?", re.ASCII)
_COMMIT = re.compile(r"[0-9a-f]{40}")
_FILES = ("*.json", "*.jinja", "*.model", "*.safetensors", "*.txt")
"""Configuration, tokenizer and weights; not weights in other formats."""


def is_hub_model(path: str) -> bool:
    """Whether a model.path names a model of the hub, that is, has the form of a name and is no directory here."""
    return _NAME.fullmatch(path) is not None and not Path(path).is_dir()


def cached_model(path: str) -> Path | None:
    """The directory of a model of the hub in the local cache; None if the model is not there, or only a part."""
    from huggingface_hub.errors import IncompleteSnapshotError, LocalEntryNotFoundError  # noqa: PLC0415

    try:
        directory = _snapshot(path, local_files_only=True)
    except (IncompleteSnapshotError, LocalEntryNotFoundError):
        return None
    return directory if _is_complete(directory) else None


def download_model(path: str) -> Path:
    """The directory of a model of the hub, downloaded as far as the local cache lacks it.

    Without a network the cache is used; a commit in the cache is not looked up again. Raises ConfigError, one line,
    if the download fails.
    """
    if _COMMIT.fullmatch(_parts(path)[1] or "") and (cached := cached_model(path)):
        return cached
    try:
        directory = _snapshot(path, local_files_only=False)
    except Exception as error:  # noqa: BLE001  (errors of the library, of the network and of the disk)
        reason = next(iter(str(error).splitlines()), "")
        raise ConfigError(
            f"model.path={path}: no such directory on this host, and the download from the Hugging Face hub failed "
            f"({type(error).__name__}: {reason}). Set model.path to a directory, HF_HOME to a cache that has the "
            "model, or HF_TOKEN for a model with restricted access; `pipelinerl train ... --tiny` downloads no model"
        ) from None
    if not _is_complete(directory):
        raise ConfigError(
            f"model.path={path}: the model has no config.json or no weights in safetensors files ({directory}). Set "
            "another model or revision"
        )
    return directory


def hub_config(path: str) -> dict[str, Any] | None:
    """config.json of a model of the hub, downloaded unless it is in the local cache; None if that fails."""
    for local_files_only in (True, False):
        try:
            file = _snapshot(path, local_files_only=local_files_only, files=("config.json",)) / "config.json"
            entries: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
        except Exception:  # noqa: BLE001  (errors of the library, of the network and of the file)
            continue
        return entries
    return None


def pinned(config: RunConfig) -> RunConfig:
    """The configuration with the commit of the cached files as the revision of each model of the hub.

    Every host of the run, also after a resume, then loads the same files.
    """
    for key, path in config.model_paths.items():
        directory = cached_model(path) if is_hub_model(path) else None
        if directory is not None:
            section, _, name = key.partition(".")
            own = getattr(config, section).model_copy(update={name: f"{_parts(path)[0]}@{directory.name}"})
            config = config.model_copy(update={section: own})
    return config


def _snapshot(path: str, *, local_files_only: bool, files: Sequence[str] = _FILES) -> Path:
    from huggingface_hub import snapshot_download  # noqa: PLC0415  (takes a second)

    name, revision = _parts(path)
    patterns = list(files)
    return Path(
        snapshot_download(name, revision=revision, local_files_only=local_files_only, allow_patterns=patterns)
    )


def _parts(path: str) -> tuple[str, str | None]:
    name, _, revision = path.partition("@")
    return name, revision or None


def _is_complete(directory: Path) -> bool:
    return (directory / "config.json").is_file() and any(directory.glob("*.safetensors"))


def main() -> int:
    """Returns the exit code. The result goes to stdout, the progress of the library to stderr."""
    try:
        line, code = str(download_model(sys.argv[1])), 0
    except ConfigError as error:
        line, code = str(error), 2
    sys.stdout.write(f"{line}\n")
    return code


if __name__ == "__main__":
    sys.exit(main())
