"""Whether the files of a model directory are complete and belong together, from their headers: no weight is read."""

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

from pipelinerl_core.errors import ConfigError

_WEIGHTS = ("model.safetensors", "model.safetensors.index.json", "pytorch_model.bin", "pytorch_model.bin.index.json")
"""The file or the index of a model, in the order in which transformers looks for them."""
_ADAPTER = "adapter_config.json"
_QUANTIZED = ("I8", "U8", "F8", "F6", "F4")
_LFS = b"version https://git-lfs"
_LAYER = re.compile(r"\.\d+\.")
_FLOATS = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_AGAIN = "Download or copy the model again"


def check_model_files(directory: Path, key: str = "model.path") -> list[str]:
    """Raise ConfigError if a file is missing or damaged, or if the tensors are not those of config.json.

    The library that loads the model matches the tensors, without their values. key: the setting, for the message.
    Returns lines of text about what is unusual.
    """
    where = f"{key}={directory}"
    settings = _loaded(AutoConfig, directory, "config.json", where)
    if quantized := getattr(settings, "quantization_config", None):
        method = quantized.get("quant_method", "") if isinstance(quantized, dict) else ""
        raise ConfigError(_quantized(where, method or "quantization_config in config.json"))
    has_generation = (directory / "generation_config.json").exists()
    generation = _loaded(GenerationConfig, directory, "generation_config.json", where) if has_generation else settings
    notes = _end_notes(generation, settings, where)
    files = _weight_files(directory, where)
    if files[0].suffix == ".bin":
        return notes  # weights of torch, which have no header: the learner tells what is missing
    tensors = {name: tensor for file in files for name, tensor in _header(file, where)}
    try:
        with torch.device("meta"):
            kind = type(AutoModelForCausalLM.from_config(settings))  # type: ignore[no-untyped-call]
        model, info = kind.from_pretrained(
            None, config=settings, state_dict=tensors, device_map={"": "meta"}, ignore_mismatched_sizes=True,
            output_loading_info=True, local_files_only=True,
        )  # fmt: skip
    except Exception as error:  # noqa: BLE001 - the library raises any error for odd values
        raise ConfigError(f"{where}: cannot be loaded: {type(error).__name__}: {_line(error)}") from None
    check_tensors(model, info, where)
    return notes


def _end_notes(generation: Any, settings: Any, where: str) -> list[str]:
    """A line if no completion can end by itself. Raises ConfigError for end tokens that are no numbers."""
    chosen = getattr(generation, "eos_token_id", None)
    chosen = getattr(settings, "eos_token_id", None) if chosen is None else chosen
    ends = [] if chosen is None else chosen if isinstance(chosen, list | tuple) else [chosen]
    if not all(isinstance(token, int) for token in ends):
        raise ConfigError(f"{where}: eos_token_id={chosen!r} in its generation_config.json is no number of a token")
    if any(0 <= token < settings.vocab_size for token in ends):
        return []
    return [f"{where}: the model has no end token (eos_token_id={chosen}): each completion has max_tokens tokens"]


def check_tensors(model: Any, info: Mapping[str, Any], where: str) -> None:
    """Raise ConfigError if tensors are missing or have a wrong shape, which the library fills with random values, or
    if tensors of further layers are left out.

    info: what transformers tells about the loading of the model. where: setting and model, for the message.
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
    own, unexpected = {_LAYER.sub(".#.", name) for name in model.state_dict()}, sorted(info["unexpected_keys"])
    more = [name for name in unexpected if _LAYER.search(name) and _LAYER.sub(".#.", name) in own]
    if not more and len(unexpected) > len(own):  # not a few buffers or a value head
        more = unexpected
    predicts_more = getattr(model.config, "num_nextn_predict_layers", 0)  # layers after the last, which may be unused
    if more and not predicts_more:
        raise ConfigError(
            f"{where}: its files have {len(more)} tensors that config.json leaves out, for example {more[0]}. "
            "config.json and weights are of different models"
        )


def _loaded(kind: Any, directory: Path, name: str, where: str) -> Any:
    try:
        return kind.from_pretrained(directory, local_files_only=True)
    except Exception as error:  # noqa: BLE001 - the library raises any error for odd values
        raise ConfigError(f"{where}: its {name} is wrong: {_line(error)}") from None


def _weight_files(directory: Path, where: str) -> list[Path]:
    """The files that transformers loads: safetensors, else of torch. All are there, and none is empty."""
    first = next((name for name in _WEIGHTS if (directory / name).exists()), "")
    files = [first]
    if first.endswith(".json"):
        try:
            content = json.loads((directory / first).read_text(encoding="utf-8"))
            content["metadata"]  # the library demands the entry
            files = sorted(set(content["weight_map"].values()))
        except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
            reason = f"{type(error).__name__}: {_line(error)}"
            raise ConfigError(f"{where}: its {first} is damaged ({reason}). {_AGAIN}") from None
    elif not first and (directory / _ADAPTER).exists():
        raise ConfigError(f"{where}: an adapter without its base model. Merge the adapter into the model first")
    elif not first:
        raise ConfigError(f"{where}: has no weights ({' or '.join(_WEIGHTS[:2])}). {_AGAIN}")
    if absent := [name for name in files if not (directory / str(name)).is_file()]:
        raise ConfigError(f"{where}: {len(absent)} of {len(files)} files are missing, first {absent[0]}. {_AGAIN}")
    for name in files:
        with (directory / name).open("rb") as opened:
            beginning = opened.read(len(_LFS))
        if beginning == _LFS:
            raise ConfigError(
                f"{where}: {name} is a pointer of Git LFS. Run `git lfs pull` in the directory of the model"
            )
        if not beginning:
            raise ConfigError(f"{where}: {name} is not complete (no bytes). {_AGAIN}")
    return [directory / name for name in files]


def _header(file: Path, where: str) -> Iterator[tuple[str, torch.Tensor]]:
    """Name, and shape and type as a tensor without values, of each tensor of a file."""
    try:
        with safe_open(file, framework="pt") as opened:
            for name in opened.keys():  # noqa: SIM118
                part = opened.get_slice(name)
                kind, shape = part.get_dtype(), part.get_shape()
                if kind.startswith(_QUANTIZED) and len(shape) == 2:
                    raise ConfigError(_quantized(where, kind))
                yield name, torch.empty(shape, dtype=_FLOATS.get(kind, torch.int64), device="meta")
    except (OSError, SafetensorError) as error:
        raise ConfigError(f"{where}: {file.name} is not complete ({_line(error)}). {_AGAIN}") from None


def _quantized(where: str, method: str) -> str:
    return (
        f"{where}: its weights are quantized ({method}), and quantized weights cannot be trained. Take the model "
        "without quantization"
    )


def _line(error: Exception) -> str:
    return " ".join(str(error).split())[:300].rstrip(".")
