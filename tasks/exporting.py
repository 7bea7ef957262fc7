"""A weight version of a run as a model directory that any library reads."""

import hashlib
import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

from pipelinerl_core.config.model_path import resolve_model_path
from pipelinerl_core.errors import EXIT_CONFIG, ChecksumMismatch, ConfigError, DeadlineExceeded, PipelineRLError
from pipelinerl_core.records import ADAPTERS_FILE, WEIGHTS_FILE, Commit, holds_adapters
from pipelinerl_core.roles.context import RunContext, open_run
from pipelinerl_core.roles.history import counted_commit_keys, read_commit, read_epochs
from tasks.commands import guarded, role_command, role_environment
from tasks.scratch import own_temporary

ORIGIN = "pipelinerl.json"
"""Beside the model: the run, the version and the sha256 of what was served."""
# Of the starting model everything else is copied: configuration, tokenizer, chat template.
_OLD_WEIGHTS = ("*.safetensors", "*.safetensors.index.json", "*.bin", "*.bin.index.json", "*.pt", "*.pth", "*.gguf")
# What transformers asks of a file before it reads it.
_METADATA = {"format": "pt"}
_LENGTH_BYTES = 8
# Adapters are merged into every layer of the largest models well within it.
_MERGE_SECONDS = 1800.0


def export(url: str, directory: Path, version: str = "last") -> dict[str, Any]:
    """Write a durable version and the starting model's other files into a new directory; returns what ORIGIN says.

    version: a number, or `last`, the newest durable one. Raises ConfigError for a directory that has something in it,
    a version that is not durable, or a starting model that is not on this host.
    """
    run = open_run(url)
    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        raise ConfigError(f"{directory}: not an empty directory. Name one that is not there yet")
    source = resolve_model_path(run.config.model.path)
    if source is None:
        raise ConfigError(
            f"model.path={run.config.model.path}: the starting model is not on this host, and its configuration and "
            "tokenizer belong to the export. Run it where the model is"
        )
    commit = _find(run, version)
    data = _read(run, commit)
    shutil.copytree(source, directory, ignore=shutil.ignore_patterns(*_OLD_WEIGHTS), dirs_exist_ok=True)
    file = directory / WEIGHTS_FILE
    if commit.manifest is not None and holds_adapters(commit.manifest):
        _merge(run, commit, file)
    else:
        file.write_bytes(with_metadata(data))
    origin = {
        "run_id": run.run_id,
        "run": url,
        "version": commit.step,
        "epoch": commit.epoch,
        "weights_sha256": commit.weights_sha256,
        "starting_model": run.config.model.path,
    }
    (directory / ORIGIN).write_text(json.dumps(origin, indent=1) + "\n")
    return {**origin, "directory": str(directory), "num_bytes": file.stat().st_size}


def with_metadata(data: bytes) -> bytes:
    """A safetensors file with the note that transformers asks for in its header; the tensors are the same bytes.

    Format: eight bytes with the length of a JSON header, the header, the tensors.
    """
    length = int.from_bytes(data[:_LENGTH_BYTES], "little")
    header = json.loads(data[_LENGTH_BYTES : _LENGTH_BYTES + length])
    header["__metadata__"] = {**header.get("__metadata__", {}), **_METADATA}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _LENGTH_BYTES)  # tensors begin at a multiple of eight bytes
    return len(text).to_bytes(_LENGTH_BYTES, "little") + text + data[_LENGTH_BYTES + length :]


def _find(run: RunContext, version: str) -> Commit:
    keys = counted_commit_keys(run.store, read_epochs(run.store))
    for step in sorted(keys, reverse=True):
        if version in ("last", str(step)):
            commit = read_commit(run.store, keys[step])
            if commit.manifest is not None and commit.manifest.key:
                return commit
    raise ConfigError(
        f"--version {version}: not durable (the newest step is {max(keys, default=-1)}, weights.durable_every="
        f"{run.config.weights.durable_every}). `last` is the newest version that is"
    )


def _read(run: RunContext, commit: Commit) -> bytes:
    manifest = commit.manifest
    assert manifest is not None
    key = f"{manifest.key}/{ADAPTERS_FILE if holds_adapters(manifest) else WEIGHTS_FILE}"
    data = run.store.get(key)
    if hashlib.sha256(data).hexdigest() != commit.weights_sha256:
        raise ChecksumMismatch(f"{key}: not the bytes that were committed. Export another version")
    return data


def _merge(run: RunContext, commit: Commit, file: Path) -> None:
    """Adapters of a version and the starting model as one file; in a process of its own, this one has no torch.

    On failure the directory of the file is removed. Raises ConfigError, DeadlineExceeded or PipelineRLError.
    """
    arguments = {"run": run.store.url, "version": str(commit.step), "file": str(file)}
    try:
        with own_temporary(role_environment(run.config.placement.threads, run.token)) as own:
            ended = subprocess.run(
                guarded(role_command("merge", arguments)), env=own, capture_output=True, text=True, check=False,
                timeout=_MERGE_SECONDS,
            )  # fmt: skip
        if ended.returncode != 0:
            lines = ended.stderr.strip().splitlines() or [f"the merge ended with code {ended.returncode}"]
            raise (ConfigError if ended.returncode == EXIT_CONFIG else PipelineRLError)(lines[-1])
    except subprocess.TimeoutExpired:
        shutil.rmtree(file.parent)
        raise DeadlineExceeded(f"{file}: adapters were not merged within {_MERGE_SECONDS:.0f} s") from None
    except PipelineRLError:
        shutil.rmtree(file.parent)
        raise
