"""Converts a model in a GGUF file to a directory of transformers, for `pipelinerl prepare`."""

from pathlib import Path
from typing import Any, Literal

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging as transformers_logging


def convert_gguf(file: Path, dtype: Literal["float32", "bfloat16"], directory: Path) -> None:
    """Write model, tokenizer and chat template of a GGUF file into `directory`, the weights dequantized."""
    transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    source: dict[str, Any] = {"gguf_file": file.name, "local_files_only": True}
    model: Any = AutoModelForCausalLM.from_pretrained(file.parent, dtype=torch.float32, **source)
    # The loader marks the model as quantized, and transformers refuses to save such a model.
    del model.config.quantization_config, model.hf_quantizer, model.quantization_method
    model.to(getattr(torch, dtype)).save_pretrained(directory)
    AutoTokenizer.from_pretrained(file.parent, **source).save_pretrained(directory)
