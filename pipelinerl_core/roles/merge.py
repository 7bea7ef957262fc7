"""The whole model of a durable version whose file holds adapters alone, for `pipelinerl export`."""

import argparse
import sys
from pathlib import Path

from safetensors.torch import save_file

from pipelinerl_core.algo.adapters import Adapters
from pipelinerl_core.errors import ConfigError
from pipelinerl_core.roles.context import RunContext, open_run
from pipelinerl_core.roles.evaluator import find_commit
from pipelinerl_core.roles.inference import base_weights
from pipelinerl_core.roles.process import RUN, limit_threads, run_main
from pipelinerl_core.weights.subscribe import WeightSubscriber


def merge_version(context: RunContext, version: str, file: Path) -> None:
    """Write all weights of a version to `file`, in the type of the run.

    Raises ConfigError for a version that is not durable or holds all weights itself, StoreError for one that is
    damaged or whose base model is not the one that is here.
    """
    manifest = find_commit(context, version).manifest
    assert manifest is not None
    adapters, base = WeightSubscriber(context.store).read(manifest), base_weights(context.config)
    if base is None or not isinstance(adapters, Adapters):
        raise ConfigError(f"--version {version}: holds all weights, there is nothing to merge")
    whole = base.whole(adapters, f"weights of version {version}")
    save_file({name: tensor.contiguous() for name, tensor in whole.items()}, file, metadata={"format": "pt"})


def _merge(arguments: argparse.Namespace) -> None:
    context = open_run(arguments.run)
    limit_threads(context.config.placement.threads)
    merge_version(context, arguments.version, arguments.file)


def main() -> int:
    """Command line of the role."""
    version = {"required": True, "help": "last, or the number of a durable version"}
    file = {"type": Path, "required": True, "help": "where to write"}
    return run_main(__doc__, {**RUN, "--version": version, "--file": file}, _merge)


if __name__ == "__main__":
    sys.exit(main())
