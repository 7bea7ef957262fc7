"""The whole model of a durable version whose file holds adapters alone, for `pipelinerl export`."""

import argparse
import sys
from pathlib import Path

from safetensors.torch import save_file

from pipelinerl_core.algo.adapters import Adapters
from pipelinerl_core.errors import ConfigError
from pipelinerl_core.roles.inference import base_weights
from pipelinerl_core.roles.process import configure_logging, exit_codes, limit_threads
from pipelinerl_core.run.context import RunContext, open_run
from pipelinerl_core.run.versions import find_commit
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


@exit_codes
def main() -> int:
    """Command line of the role."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--run", required=True)
    parser.add_argument("--version", required=True, help="last, or the number of a durable version")
    parser.add_argument("--file", type=Path, required=True, help="where to write")
    arguments = parser.parse_args()
    configure_logging()
    context = open_run(arguments.run)
    limit_threads(context.config.placement.threads)
    merge_version(context, arguments.version, arguments.file)
    return 0


if __name__ == "__main__":
    sys.exit(main())
