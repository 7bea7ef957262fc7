"""Export of a weight version as a Hugging Face model directory."""

import json
import shutil
import stat
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pipelinerl_core.errors import EXIT_CONFIG, ConfigError, DeadlineExceeded, PipelineRLError
from pipelinerl_core.models.paths import resolve_model_path
from pipelinerl_core.run.context import RunContext, open_run
from pipelinerl_core.run.records import EXPORT_ORIGIN, WEIGHTS_FILE, Commit
from pipelinerl_core.run.versions import find_commit, is_stored, stored_weights
from pipelinerl_core.supervision.role_commands import ending_with_parent, module_command, role_environment
from pipelinerl_core.supervision.temporary_directories import own_temporary
from pipelinerl_core.tools.model_card import write_card

# All other files of the starting model are copied: configuration, tokenizer, chat template.
_OLD_WEIGHTS = ("*.safetensors", "*.safetensors.index.json", "*.bin", "*.bin.index.json", "*.pt", "*.pth", "*.gguf")
WRITE_SECONDS = 1800.0
"""Reading, merging adapters and writing take minutes for the largest models; steps that are trained again longer."""
_REPLAY_SECONDS = 24 * 3600.0


def export(url: str, directory: Path, version: str = "last") -> dict[str, Any]:
    """Write a version and the starting model's other files into a directory; returns what EXPORT_ORIGIN has.

    version: `first`, `last`, or the number of any step: a version that is not durable is trained again from the
    newest checkpoint before it. Raises ConfigError if the directory is not empty, there is no such version, or the
    starting model is not on this host.
    """
    run = open_run(url)
    try:
        directory = directory.expanduser()
    except RuntimeError as error:  # ~NAME of an unknown user
        raise ConfigError(f"{directory}: {error} Give a path without ~") from None
    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        raise ConfigError(f"{directory}: not an empty directory. Set a directory that does not exist yet")
    source = resolve_model_path(run.config.model.path)
    if source is None:
        raise ConfigError(
            f"model.path={run.config.model.path}: the starting model is not on this host, but the export needs its "
            "configuration and tokenizer. Run the export on a host with the model"
        )
    commit = find_commit(run, version, may_replay=True)
    try:
        shutil.copytree(source, directory, ignore=shutil.ignore_patterns(*_OLD_WEIGHTS), dirs_exist_ok=True,
                        copy_function=shutil.copyfile)  # fmt: skip
        for folder in (directory, *(path for path in directory.rglob("*") if path.is_dir())):
            folder.chmod(folder.stat().st_mode | stat.S_IRWXU)  # the model may be read-only
    except OSError as error:  # also an error of several files
        raise ConfigError(f"{directory}: cannot be written: {str(error)[:300]}") from None
    file = directory / WEIGHTS_FILE
    _write_model(run, commit, file)
    _set_dtype(directory / "config.json", run.config.dtype)
    origin = {
        "run_id": run.run_id,
        "run": url,
        "version": commit.step,
        "epoch": commit.epoch,
        "weights_digest": commit.weights_digest,
        "starting_model": run.config.model.path,
    }
    write_card(run, commit.step, source, directory)
    (directory / EXPORT_ORIGIN).write_text(json.dumps(origin, indent=1) + "\n")
    return {**origin, "directory": str(directory), "num_bytes": file.stat().st_size}


def _set_dtype(path: Path, dtype: str) -> None:
    """Note the data type of the written weights, to which transformers converts them."""
    entries = json.loads(path.read_text())
    entries.pop("torch_dtype", None)  # of older versions of transformers
    path.write_text(json.dumps({**entries, "dtype": dtype}, indent=2) + "\n")


def _write_model(run: RunContext, commit: Commit, file: Path) -> None:
    """Write all weights of a version to a file; after an error of `run_tool`, its directory is removed."""
    arguments = {"run": run.store.url, "version": str(commit.step), "file": str(file)}
    has_weights = is_stored({commit.step: commit}, commit.step, stored_weights(run.store))
    seconds = WRITE_SECONDS if has_weights else _REPLAY_SECONDS
    try:
        run_tool(run, "pipelinerl_core.tools.write_model", arguments, seconds)
    except PipelineRLError:
        shutil.rmtree(file.parent, ignore_errors=True)
        raise


def run_tool(
    run: RunContext, module: str, arguments: Mapping[str, str], seconds: float, env: Mapping[str, str] | None = None
) -> None:
    """Run a module in a child process: this process must not load torch. Raises ConfigError or PipelineRLError with
    the last line of the child, and DeadlineExceeded after `seconds`. env: further variables."""
    try:
        with own_temporary(role_environment(run.config.placement.threads, run.token)) as own:
            ended = subprocess.run(
                ending_with_parent(module_command(module, arguments)),
                env={**own, **(env or {})}, capture_output=True, text=True, check=False, timeout=seconds,
            )  # fmt: skip
    except subprocess.TimeoutExpired:
        raise DeadlineExceeded(f"{module} did not end within {seconds:.0f} s") from None
    if ended.returncode != 0:
        lines = ended.stderr.strip().splitlines() or [f"{module} ended with code {ended.returncode}"]
        raise (ConfigError if ended.returncode == EXIT_CONFIG else PipelineRLError)(lines[-1])
