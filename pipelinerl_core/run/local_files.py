"""Rows and models of the user on the hosts of a run: a run that continues must find what it started with.

Other rows are other prompts behind the same group numbers, and other held-out prompts, which were perhaps trained on.
"""

import hashlib
import json
import re
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path

from pipelinerl_core.config import RunConfig
from pipelinerl_core.config.prompts import RowPrompts
from pipelinerl_core.errors import ConfigError
from pipelinerl_core.models.hub import is_hub_model
from pipelinerl_core.models.paths import builtin_recipe, resolve_model_path, weight_files
from pipelinerl_core.run.context import RunContext
from pipelinerl_core.run.records import EXPORT_ORIGIN

_WEIGHTS = (".safetensors", ".bin")
"""Of these files only size, first and last bytes count, because a model may have a terabyte."""
_END_BYTES = 1 << 20
_MODEL_FILES = re.compile(r"[^.].*\.(json|jinja|model|safetensors|bin)|(vocab|merges)\.txt")
_ROW_FILES = re.compile(r"(?!cache-)[^.].*\.(arrow|csv|json|jsonl|parquet|tsv|txt)(\.\w+)?")
"""Without caches, which the library datasets writes beside the rows."""


def local_files(config: RunConfig) -> dict[str, str]:
    """Setting -> digest of the file or directory that it names, of rows and models on this host."""
    return {key: _digest(path) for key, path in _paths(config) if path.exists()}


def own_files(config: RunConfig) -> dict[str, str]:
    """`local_files` without models of a hub, which this host may download later."""
    names = config.model_paths
    return {key: digest for key, digest in local_files(config).items() if not is_hub_model(names.get(key, ""))}


def check_local_files(run: RunContext) -> None:
    """Raise ConfigError if rows or a model have changed since the run started."""
    digests = local_files(run.config)
    for key, path in _paths(run.config):
        stored = run.record.files.get(key)
        where = str(path) if path.is_absolute() else f"{path} in the working directory {Path.cwd()}"
        if stored is not None and key not in digests:
            raise ConfigError(f"{key}: {where} is not there. Resume the run in the directory in which it was started")
        if stored is not None and digests[key] != stored:
            raise ConfigError(
                f"{key}: {where} is not what the run started with, and the run cannot continue with other rows or "
                "another model. Restore the file, resume the run in the directory in which it was started, or start "
                f"another run from its weights (`pipelinerl train --from {run.run_id}`)"
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
    """16 hex digits of sha256 over names and contents of a file, of a directory of rows, or of a model."""
    total = hashlib.sha256()
    if not path.is_dir():
        files = [path]
    elif (path / "config.json").exists():
        files = sorted(file for file in path.iterdir() if _MODEL_FILES.fullmatch(file.name))
    else:
        files = sorted(file for file in path.rglob("*") if _ROW_FILES.fullmatch(file.name))
    for file in files:
        name = file.relative_to(path).as_posix()  # of a single file: "."
        if file.is_file():
            total.update(f"{name}\0{_digest_of(file)}\0".encode())
    return total.hexdigest()[:16]


def _digest_of(file: Path) -> str:
    status = file.stat()
    return _file_digest(file, status.st_size, status.st_mtime_ns)


@lru_cache(maxsize=4096)
def _file_digest(file: Path, size: int, modified_at: int) -> str:
    """Computed once for a state of the file, because every arm of a comparison has the same rows."""
    with file.open("rb") as opened:
        if file.suffix not in _WEIGHTS:
            return hashlib.file_digest(opened, "sha256").hexdigest()
        parts = [opened.read(_END_BYTES)]
        opened.seek(max(0, size - _END_BYTES))
        parts.append(opened.read())
    return hashlib.sha256(b"".join([str(size).encode(), *parts])).hexdigest()


def weights_digest(directory: Path) -> str:
    """16 hex digits over config.json, without the version of transformers that wrote it, and the files of weights.

    Of a config.json that cannot be read nothing counts: the loading of the model refuses it.
    """
    try:
        settings = json.loads((directory / "config.json").read_text(encoding="utf-8"))
        settings.pop("transformers_version", None)
    except (OSError, ValueError, AttributeError):
        settings = None
    total = hashlib.sha256(json.dumps(settings, sort_keys=True).encode())
    for file in weight_files(directory):
        total.update(f"{file.name}\0{_digest_of(file)}\0".encode())
    return total.hexdigest()[:16]


def parent_of(config: RunConfig) -> str:
    """RUN@VERSION if model.path is an exported model, else an empty string."""
    directory = resolve_model_path(config.model.path)
    try:
        origin = json.loads((directory / EXPORT_ORIGIN).read_text(encoding="utf-8")) if directory else {}
        return f"{origin['run_id']}@{origin['version']}"
    except (OSError, ValueError, KeyError, TypeError):
        return ""
