"""Whether the files of a model directory are complete and belong together, from their headers: no weight is read."""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

from pipelinerl_core.errors import ConfigError
from pipelinerl_core.models.paths import read_model_config

_SINGLE, _INDEX, _ADAPTER = "model.safetensors", "model.safetensors.index.json", "adapter_config.json"
_LFS = b"version https://git-lfs"
_AGAIN = "Download or copy the model again"


def check_model_files(directory: Path, key: str = "model.path") -> None:
    """Raise ConfigError if a file is missing or damaged, or if a tensor is missing or has a wrong shape.

    The library that loads the model matches the tensors, without their values. key: the setting, for the message.
    """
    where = f"{key}={directory}"
    entries = read_model_config(directory)
    if quantized := entries.get("quantization_config"):
        method = quantized.get("quant_method", "") if isinstance(quantized, dict) else ""
        raise ConfigError(
            f"{where}: its weights are quantized ({method or 'quantization_config in config.json'}), and quantized "
            "weights cannot be trained. Take the model without quantization"
        )
    settings = _loaded(AutoConfig, directory, "config.json", where)
    if (directory / "generation_config.json").exists():
        _loaded(GenerationConfig, directory, "generation_config.json", where)
    files = _weight_files(directory, where)
    if not files:
        return  # weights of torch, which have no header: the learner tells what is missing
    tensors = {name: tensor for file in files for name, tensor in _header(file, where)}
    try:
        with torch.device("meta"):
            kind = type(AutoModelForCausalLM.from_config(settings))  # type: ignore[no-untyped-call]
        _, info = kind.from_pretrained(
            None, config=settings, state_dict=tensors, device_map={"": "meta"}, ignore_mismatched_sizes=True,
            output_loading_info=True, local_files_only=True,
        )  # fmt: skip
    except Exception as error:  # noqa: BLE001 - the library raises any error for odd values
        raise ConfigError(f"{where}: cannot be loaded: {type(error).__name__}: {_line(error)}") from None
    check_tensors(info, where)


def check_tensors(info: Mapping[str, Any], where: str) -> None:
    """Raise ConfigError if tensors are missing or have a wrong shape: the library fills them with random values.

    info: what transformers tells about the loading. where: setting and model, for the message.
    """
    for name, own, wanted in sorted(info["mismatched_keys"]):
        raise ConfigError(
            f"{where}: tensor {name} has the shape {list(own)}, config.json demands {list(wanted)}. config.json and "
            "weights are of different models"
        )
    if missing := sorted(info["missing_keys"]):
        others = sorted(info["unexpected_keys"])
        unused = f", and have {len(others)} of no use, for example {others[0]}" if others else ""
        raise ConfigError(
            f"{where}: its files lack {len(missing)} tensors, for example {missing[0]}{unused}. The model "
            "was not saved completely, or config.json and weights are of different models"
        )


def _loaded(kind: Any, directory: Path, name: str, where: str) -> Any:
    try:
        return kind.from_pretrained(directory, local_files_only=True)
    except Exception as error:  # noqa: BLE001 - the library raises any error for odd values
        raise ConfigError(f"{where}: its {name} is wrong: {_line(error)}") from None


def _weight_files(directory: Path, where: str) -> list[Path]:
    """The safetensors files that transformers loads; empty if the model has weights in torch's format only."""
    index = directory / _INDEX
    if (directory / _SINGLE).exists():
        return [directory / _SINGLE]
    if not index.exists():
        if any(directory.glob("pytorch_model*.bin")):
            return []
        if (directory / _ADAPTER).exists():
            raise ConfigError(f"{where}: an adapter without its base model. Merge the adapter into the model first")
        raise ConfigError(f"{where}: has no weights ({_SINGLE} or {_INDEX}). {_AGAIN}")
    try:
        files = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise ConfigError(f"{where}: its {_INDEX} is damaged ({_line(error)}). {_AGAIN}") from None
    if absent := [name for name in files if not (directory / str(name)).is_file()]:
        raise ConfigError(f"{where}: {len(absent)} of {len(files)} files are missing, first {absent[0]}. {_AGAIN}")
    return [directory / name for name in files]


def _header(file: Path, where: str) -> Iterator[tuple[str, torch.Tensor]]:
    """Name, and shape and type as a tensor without values, of each tensor of a file."""
    try:
        with file.open("rb") as opened:
            if opened.read(len(_LFS)) == _LFS:
                raise ConfigError(
                    f"{where}: {file.name} is a pointer of Git LFS. Run `git lfs pull` in the directory of the model"
                )
        with safe_open(file, framework="pt") as opened:
            for name in opened.keys():  # noqa: SIM118
                part = opened.get_slice(name)
                yield name, torch.empty(part.get_shape(), dtype=_dtype(part), device="meta")
    except (OSError, SafetensorError) as error:
        raise ConfigError(f"{where}: {file.name} is not complete ({_line(error)}). {_AGAIN}") from None


def _dtype(part: Any) -> torch.dtype:
    """The type of a tensor's part; only its kind matters here, so that types without a name here are bytes."""
    names = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
    return names.get(part.get_dtype(), torch.uint8)


def _line(error: Exception) -> str:
    return " ".join(str(error).split())[:300].rstrip(".")
