"""All weights of a version as one safetensors file, for `pipelinerl export`."""

import argparse
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from pipelinerl_core.algo.adapters import Adapters
from pipelinerl_core.models.paths import require_model, weight_files
from pipelinerl_core.roles.runtime.inference import base_weights
from pipelinerl_core.roles.runtime.process import RUN, limit_threads, run_main
from pipelinerl_core.run.context import RunContext, open_run
from pipelinerl_core.run.versions import find_commit, is_stored, stored_weights
from pipelinerl_core.tools.replay import replayed_weights
from pipelinerl_core.weights.base import BaseWeights
from pipelinerl_core.weights.subscribe import WeightSubscriber


def write_model(context: RunContext, version: str, file: Path) -> None:
    """Write all weights of a version to `file`, in the data type of the run, adapters merged into the starting model.

    The header has the metadata `format: pt`, which many readers of safetensors files require. The steps of a version
    that is not durable are trained again. Raises ConfigError without such a version, StoreError if it is damaged or
    was trained from another base model than this host's, and PipelineRLError if this host computes other weights.
    """
    commit = find_commit(context, version, may_replay=True)
    if commit.manifest is not None and is_stored({commit.step: commit}, commit.step, stored_weights(context.store)):
        weights: Mapping[str, Tensor] = WeightSubscriber(context.store).read(commit.manifest)
    else:
        weights = replayed_weights(context, commit).tensors
    if isinstance(weights, Adapters):
        base = base_weights(context.config)
        assert base is not None
        weights = base.whole(weights, f"weights of version {version}")
    written = {**_buffers(require_model(context.config.model.path)), **weights}
    save_file({name: tensor.contiguous() for name, tensor in written.items()}, file, metadata={"format": "pt"})
    umask = os.umask(0)
    os.umask(umask)
    file.chmod(0o666 & ~umask)  # save_file lets only the owner read


def _buffers(directory: Path) -> dict[str, Tensor]:
    """The stored tensors of a starting model that no step changes, such as corrections of a router."""
    if not weight_files(directory):
        return {}
    with torch.device("meta"):
        any_model: Any = AutoModelForCausalLM
        model = any_model.from_config(AutoConfig.from_pretrained(directory))
    base = BaseWeights(directory)
    return {name: base.tensor(name) for name, _ in model.named_buffers() if name in base}


def _merge(arguments: argparse.Namespace) -> None:
    context = open_run(arguments.run)
    limit_threads(context.config.placement.threads)
    write_model(context, arguments.version, arguments.file)


def main() -> int:
    """Command line of the export's child process."""
    version = {"required": True, "help": "last, or the number of a step"}
    file = {"type": Path, "required": True, "help": "where to write"}
    return run_main(__doc__, {**RUN, "--version": version, "--file": file}, _merge)


if __name__ == "__main__":
    sys.exit(main())
