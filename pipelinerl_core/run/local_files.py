"""Rows and models of the user on the hosts of a run: a run that continues must find what it started with.

Other rows are other prompts behind the same group numbers, and other held-out prompts, which were perhaps trained on.
"""

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path

from pipelinerl_core.config import RunConfig
from pipelinerl_core.config.prompts import RowPrompts
from pipelinerl_core.errors import ConfigError
from pipelinerl_core.models.paths import builtin_recipe, resolve_model_path
from pipelinerl_core.run.context import RunContext
from pipelinerl_core.run.records import EXPORT_ORIGIN

_WEIGHTS = (".safetensors", ".bin")
"""Of these files only size, first and last bytes count, because a model may have a terabyte."""
_END_BYTES = 1 << 20
_MODEL_FILES = (".json", ".jinja", ".model", ".txt", *_WEIGHTS)


def local_files(config: RunConfig) -> dict[str, str]:
    """Setting -> digest of the file or directory that it names, of rows and models on this host."""
    return {key: _digest(path) for key, path in _paths(config) if path.exists()}


def check_local_files(run: RunContext) -> None:
    """Raise ConfigError if rows or a model have changed since the run started."""
    digests = local_files(run.config)
    for key, path in _paths(run.config):
        stored = run.record.files.get(key)
        if stored is not None and digests.get(key, stored) != stored:
            raise ConfigError(
                f"{key}: {path} has changed since the run started, and the run cannot continue with other rows or "
                "another model. Restore the file, or start a new run, for example from the weights of this run "
                f"(`pipelinerl export {run.run_id}`)"
            )


def _paths(config: RunConfig) -> Iterator[tuple[str, Path]]:
    """(setting, file or directory) of rows and models that are the user's own."""
    for key, name in config.model_paths.items():
        directory = None if builtin_recipe(name) else resolve_model_path(name)
        if directory is not None:
            yield key, directory
    parts = {f"mixture.{name}.prompts" if name else "prompts": part for name, part in config.parts.items()}
    sets = {f"eval.sets.{name}": config.with_set(name) for name in config.eval.sets}
    for section, part in (parts | sets).items():
        if isinstance(part.prompts, RowPrompts):
            for name in ("path", "held_out_path"):
                if own := getattr(part.prompts, name, ""):
                    yield f"{section}.{name}", Path(own).expanduser()


def _digest(path: Path) -> str:
    """16 hex digits of sha256 over names and contents."""
    total = hashlib.sha256()
    directory = path if path.is_dir() else None
    files = [path] if directory is None else sorted(file for file in path.rglob("*") if file.is_file())
    for file in files:
        if directory is not None and (directory / "config.json").exists() and file.suffix not in _MODEL_FILES:
            continue
        name = "" if directory is None else file.relative_to(directory).as_posix()
        total.update(f"{name}\0{_file_digest(file)}\0".encode())
    return total.hexdigest()[:16]


def _file_digest(file: Path) -> str:
    with file.open("rb") as opened:
        if file.suffix not in _WEIGHTS:
            return hashlib.file_digest(opened, "sha256").hexdigest()
        size = file.stat().st_size
        parts = [opened.read(_END_BYTES)]
        opened.seek(max(0, size - _END_BYTES))
        parts.append(opened.read())
    return hashlib.sha256(b"".join([str(size).encode(), *parts])).hexdigest()


def parent_of(config: RunConfig) -> str:
    """RUN@VERSION if model.path is an exported model, else an empty string."""
    directory = resolve_model_path(config.model.path)
    try:
        origin = json.loads((directory / EXPORT_ORIGIN).read_text(encoding="utf-8")) if directory else {}
        return f"{origin['run_id']}@{origin['version']}"
    except (OSError, ValueError, KeyError, TypeError):
        return ""
