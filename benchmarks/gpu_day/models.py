"""Directories of random models, which the roles of a run load."""

import gc
from pathlib import Path
from typing import Any, NamedTuple

import torch

from benchmarks.engine_load import random_model
from benchmarks.gpu_day.engine import copy_seconds
from pipelinerl_core.training.tiny_model import byte_tokenizer


class Written(NamedTuple):
    """A written model."""

    num_parameters: int
    copy_seconds: float
    """Of a copy of all weights within the device."""


def write_random(size: str, directory: str | Path, *, dtype: str, device: str) -> Written:
    """Write a random model and a tokenizer of bytes. Frees what it allocates."""
    model: Any = random_model(size, dtype=getattr(torch, dtype), device=device)
    model.save_pretrained(directory)
    byte_tokenizer().save_pretrained(directory)
    weights = [parameter.detach() for parameter in model.parameters()]
    written = Written(sum(weight.numel() for weight in weights), copy_seconds(weights, device))
    del model, weights
    gc.collect()
    if device == "cuda":
        torch.cuda.empty_cache()
    return written
