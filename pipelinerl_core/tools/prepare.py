"""`pipelinerl prepare`: build or convert the built-in model of a configuration, into the cache and without network.

Run: python -m pipelinerl_core.tools.prepare --model builtin:sums [--json]
"""

import argparse
import contextlib
import fcntl
import json
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from pipelinerl_core.errors import ConfigError, DeadlineExceeded, PipelineRLError
from pipelinerl_core.models.hub import download_model, is_hub_model
from pipelinerl_core.models.paths import builtin_recipe, resolve_model_path
from pipelinerl_core.models.recipes import PackagedModel, Recipe, TinyModel, model_directory, packaged_file
from pipelinerl_core.prompts.sums import demonstrations

LOCK_SECONDS = 900.0
"""Longest wait for another process that builds the same model; a build takes about a minute."""
LOCK_POLL_SECONDS = 0.2


def prepare(path: str, report: Callable[[str], None]) -> Path:
    """The directory of the model that `path` names; a missing built-in model is built, a model of the hub downloaded.

    Raises ConfigError if `path` is neither a directory nor a built-in model, if the model's package is missing, or
    if the download fails.
    """
    if is_hub_model(path):
        return download_model(path)
    directory = resolve_model_path(path)
    if directory is not None:
        return directory
    recipe = builtin_recipe(path)
    if recipe is None:
        raise ConfigError(f"model.path={path}: no such directory. Set a directory of a model, or builtin:sums")
    return build(recipe, report)


def build(recipe: Recipe, report: Callable[[str], None]) -> Path:
    """Build a model into the cache unless the cache has it; of several processes, one builds and the others wait."""
    directory = model_directory(recipe)
    if directory.is_dir():
        return directory
    if isinstance(recipe, PackagedModel):
        packaged_file(recipe)  # raises before anything is written
    directory.parent.mkdir(parents=True, exist_ok=True)
    with _locked(directory.with_suffix(".lock"), report):
        if directory.is_dir():  # another process has built the model meanwhile
            return directory
        partial = directory.with_suffix(".partial")
        shutil.rmtree(partial, ignore_errors=True)  # left by a killed process
        partial.mkdir()
        if isinstance(recipe, PackagedModel):
            report(f"converting {recipe.file} (15 to 30 s) into {directory}")
            from pipelinerl_core.tools.convert_gguf import convert_gguf  # noqa: PLC0415  (torch takes long to import)

            convert_gguf(packaged_file(recipe), recipe.dtype, partial)
        elif isinstance(recipe, TinyModel):
            from pipelinerl_core.training.tiny_model import build_tiny_model  # noqa: PLC0415  (as above)

            build_tiny_model(recipe, partial)
        else:
            report(f"building {directory}")
            from pipelinerl_core.training.warm_start import build_model  # noqa: PLC0415  (as above)

            build_model(recipe, demonstrations(recipe), partial, report)
        (partial / "recipe.json").write_text(recipe.model_dump_json(indent=2) + "\n", encoding="ascii")
        partial.rename(directory)
    return directory


@contextlib.contextmanager
def _locked(path: Path, report: Callable[[str], None]) -> Iterator[None]:
    """Hold an exclusive file lock, which the kernel releases when the process ends. Raises DeadlineExceeded."""
    deadline = time.monotonic() + LOCK_SECONDS
    reported = False
    with path.open("w") as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise DeadlineExceeded(
                        f"waited {LOCK_SECONDS:.0f} s for {path}: another process builds the same model. "
                        "End the other process, or wait until it has ended, and call again"
                    ) from None
            if not reported:
                report(f"another process builds the same model; waiting for {path}")
                reported = True
            time.sleep(LOCK_POLL_SECONDS)
        yield


def main(arguments: list[str] | None = None) -> int:
    """Command line: prints the model's directory to stdout and progress to stderr; returns the exit code."""
    parser = argparse.ArgumentParser(prog="pipelinerl prepare", description="Build the model of a configuration.")
    parser.add_argument("--model", default="builtin:sums", help="model.path of the configuration")
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    options = parser.parse_args(arguments)
    started = time.monotonic()
    was_there = False
    try:
        was_there = resolve_model_path(options.model) is not None
        directory = prepare(options.model, _to_stderr)
    except PipelineRLError as error:
        _to_stderr(str(error))
        return 2 if isinstance(error, ConfigError) else 1
    seconds = round(time.monotonic() - started, 3)
    document = {"model": options.model, "path": str(directory), "built": not was_there, "seconds": seconds}
    sys.stdout.write((json.dumps(document) if options.json else str(directory)) + "\n")
    return 0


def _to_stderr(line: str) -> None:
    sys.stderr.write(line + "\n")
    sys.stderr.flush()


if __name__ == "__main__":
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # before torch is imported: other processes use the cores too
    os.environ.setdefault("GOMP_SPINCOUNT", "0")
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    sys.exit(main())
