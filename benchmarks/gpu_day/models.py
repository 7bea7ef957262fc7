"""Directories of random models, which the roles of a run load."""

import gc
from pathlib import Path
from typing import Any

import torch

from benchmarks.engine_load import random_model
from pipelinerl_core.training.tiny_model import byte_tokenizer


def write_random(size: str, directory: str | Path, *, dtype: str, device: str) -> int:
    """Write a random model and a tokenizer of bytes; returns the number of parameters. Frees what it allocates."""
    model: Any = random_model(size, dtype=getattr(torch, dtype), device=device)
    model.save_pretrained(directory)
    byte_tokenizer().save_pretrained(directory)
    num_parameters: int = sum(parameter.numel() for parameter in model.parameters())
    del model
    gc.collect()
    if device == "cuda":
        torch.cuda.empty_cache()
    return num_parameters
