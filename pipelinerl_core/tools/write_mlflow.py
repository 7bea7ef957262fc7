"""A model directory in the format of mlflow.transformers, for `pipelinerl promote` and tracking.register_as."""

import argparse
import os
import sys
from importlib.metadata import version
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"  # read when huggingface_hub is imported: MLflow looks for a licence on the hub

from huggingface_hub import ModelCard

from pipelinerl_core.roles.runtime.process import run_main
from pipelinerl_core.telemetry import mlflow as _variables  # noqa: F401 (before mlflow)
from pipelinerl_core.tools.model_card import CARD

from mlflow.transformers import save_model  # isort: skip

_PACKAGES = ("mlflow", "transformers", "torch")
"""What loading the model needs, in the versions of this process. MLflow's own list has torchvision, too."""
_GUESSED_LICENCE = "LICENSE.txt"
"""MLflow writes that no licence was found; the model card names the licence."""


def write_mlflow(directory: Path, target: Path, max_tokens: int) -> None:
    """Write the model of an exported directory to `target`, which must not exist.

    mlflow.pyfunc completes texts greedily, with at most `max_tokens` tokens unless its caller sets other values.
    """
    save_model(
        str(directory),
        str(target),
        task="text-generation",
        model_card=ModelCard.load(directory / CARD),
        model_config={"do_sample": False, "max_new_tokens": max_tokens, "return_full_text": False},
        pip_requirements=[f"{name}=={version(name).partition('+')[0]}" for name in _PACKAGES],
    )
    (target / _GUESSED_LICENCE).unlink(missing_ok=True)


def _write(arguments: argparse.Namespace) -> None:
    write_mlflow(arguments.directory, arguments.target, arguments.max_tokens)


def main() -> int:
    """Command line of the child process."""
    directory = {"type": Path, "required": True, "help": "directory of `pipelinerl export`"}
    target = {"type": Path, "required": True, "help": "directory to create"}
    limit = {"type": int, "required": True, "help": "tokens of a completion at most"}
    return run_main(__doc__, {"--directory": directory, "--target": target, "--max-tokens": limit}, _write)


if __name__ == "__main__":
    sys.exit(main())
