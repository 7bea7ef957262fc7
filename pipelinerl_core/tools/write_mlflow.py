"""The child process of tools/promote.py: logs an export as a model of mlflow.transformers to $MLFLOW_TRACKING_URI."""

import os
import sys
from importlib.metadata import version
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"  # read when huggingface_hub is imported: MLflow looks for a licence on the hub

from huggingface_hub import ModelCard
from mlflow import MlflowClient
from mlflow.transformers import save_model

from pipelinerl_core.tools.model_card import CARD


def main(directory: Path, target: Path, model_id: str, max_tokens: int) -> None:
    """Write the model to a new directory `target`, and log it. max_tokens: of a completion of pyfunc by default."""
    packages = ("mlflow", "transformers", "torch")  # MLflow's own list has torchvision, too
    save_model(
        str(directory), str(target), task="text-generation", model_card=ModelCard.load(directory / CARD),
        model_config={"do_sample": False, "max_new_tokens": max_tokens, "return_full_text": False},
        pip_requirements=[f"{name}=={version(name).partition('+')[0]}" for name in packages],
    )  # fmt: skip
    (target / "LICENSE.txt").unlink(missing_ok=True)  # says that no licence was found; the card names the licence
    MlflowClient().log_model_artifacts(model_id, str(target))


if __name__ == "__main__":
    main(Path(sys.argv[2]), Path(sys.argv[4]), sys.argv[6], int(sys.argv[8]))
