"""From a `model.path` to the directory, the recipe or the config.json of the model."""

import difflib
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pipelinerl_core.errors import ConfigError
from pipelinerl_core.models.hub import cached_model, download_model, hub_config, is_hub_model
from pipelinerl_core.models.recipes import (
    BUILTIN_MODELS,
    BUILTIN_PREFIX,
    TINY_PREFIX,
    PackagedModel,
    Recipe,
    SumsModel,
    TinyModel,
    model_directory,
)
from pipelinerl_core.models.shapes import KNOWN_MODELS, context_of, shape_of
from pipelinerl_core.models.tiny import shrunk

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json")
_INDEX_FILE, _SINGLE_FILE = "model.safetensors.index.json", "model.safetensors"
_SEED = re.compile(r"seed=(\d{1,9})")


def builtin_recipe(path: str) -> Recipe | None:
    """The recipe of a `builtin:` name, None for any other path; raises ConfigError for an unknown name.

    Example: builtin:sums?seed=1 is builtin:sums with other initial weights and demonstrations. Raises ConfigError too
    if the model after TINY_PREFIX is not known.
    """
    if not path.startswith(BUILTIN_PREFIX):
        return None
    if path.startswith(TINY_PREFIX):
        return _tiny_recipe(path.removeprefix(TINY_PREFIX))
    name, separator, options = path.partition("?")
    if name not in BUILTIN_MODELS:
        close = difflib.get_close_matches(name, BUILTIN_MODELS, n=1, cutoff=0)[0]
        raise ConfigError(f"model.path={path}: no such built-in model; did you mean {close}?")
    recipe, seed = BUILTIN_MODELS[name], _SEED.fullmatch(options)
    if separator and isinstance(recipe, PackagedModel):
        raise ConfigError(f"model.path={path}: {name} has no options. Set model.path={name}")
    if separator and seed is None:
        raise ConfigError(f"model.path={path}: the only option of a built-in model is its seed. Set {name}?seed=1")
    return recipe.model_copy(update={"seed": int(seed[1])}) if seed else recipe


def seeded_path(path: str, seed: int) -> str:
    """The path of a built-in model that has seeds with `seed`, unless the path has a seed; any other path
    unchanged."""
    has_seeds = isinstance(builtin_recipe(path), SumsModel) and "?" not in path
    return f"{path}?seed={seed}" if has_seeds else path


def resolve_model_path(path: str) -> Path | None:
    """The directory of the model and its tokenizer, or None if the directory does not exist (yet).

    A model of the hub is looked up in the local cache. Raises ConfigError for an unknown `builtin:` name.
    """
    recipe = builtin_recipe(path)
    if recipe is None and is_hub_model(path):
        return cached_model(path)
    directory = Path(path).expanduser() if recipe is None else model_directory(recipe)
    return directory if directory.is_dir() else None


def lacks_chat_template(path: str) -> bool:
    """Whether the model is known to have no chat template; False for a model that is not on this host."""
    if isinstance(builtin_recipe(path), SumsModel):
        return True
    directory = resolve_model_path(path)
    if directory is None or (directory / "chat_template.jinja").is_file():
        return False
    try:
        settings = json.loads((directory / "tokenizer_config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return not settings.get("chat_template")


def require_model(path: str) -> Path:
    """The directory of the model and its tokenizer; a model of the hub that this host lacks is downloaded.

    Raises ConfigError if the directory does not exist or the download fails.
    """
    directory = resolve_model_path(path)
    if directory is None and is_hub_model(path):
        return download_model(path)
    if directory is None:
        raise ConfigError(f"model.path={path}: not built yet. Run `pipelinerl prepare`")
    return directory


def model_config_of(path: str) -> Mapping[str, Any] | None:
    """config.json of `model.path` on this host, or the entry of KNOWN_MODELS; None: neither is there."""
    directory = resolve_model_path(path)
    if directory is None:
        return KNOWN_MODELS.get(re.split("[@?]", path)[0])  # without revision or seed
    try:
        return read_model_config(directory)
    except ConfigError:
        return None


def read_model_config(directory: Path) -> dict[str, Any]:
    """config.json of a model directory. Raises ConfigError."""
    try:
        entries = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        if isinstance(error, FileNotFoundError) and (directory / "adapter_config.json").is_file():
            raise ConfigError(
                f"model.path={directory}: an adapter without its base model. Merge the adapter into the model first"
            ) from None
        raise ConfigError(f"model.path={directory}: its config.json cannot be read: {error}") from None
    if not isinstance(entries, dict):
        raise ConfigError(f"model.path={directory}: its config.json is no JSON object")
    return entries


def end_tokens_of(directory: Path) -> Any:
    """eos_token_id of a model directory, from the file that engines prefer; None without one."""
    for name in ("generation_config.json", "config.json"):
        path = directory / name
        end_tokens = json.loads(path.read_text(encoding="utf-8")).get("eos_token_id") if path.is_file() else None
        if end_tokens is not None:
            return end_tokens
    return None


def within_context(directory: Path, num_tokens: int) -> int:
    """num_tokens, or the context of the model if that is shorter. Raises ConfigError."""
    return min(num_tokens, context_of(read_model_config(directory)) or num_tokens)


def _tiny_recipe(of: str) -> TinyModel:
    """The recipe of a small model of the architecture of `of`, a model.path.

    Raises ConfigError if the config.json of the model is unknown or describes no decoder.
    """
    entries = model_config_of(of) or (hub_config(of) if is_hub_model(of) else None)
    if entries is None:
        raise ConfigError(
            f"model.path={of}: --tiny reads the config.json of the model, which is neither on this host nor on a hub "
            "that this host can reach. Copy the file into a directory and set model.path to the directory, or set "
            f"model.path to a model of the same architecture that is known without a download: {_known_families()}"
        )
    if "text_config" in entries or shape_of(entries) is None:
        raise ConfigError(
            f"model.path={of}: its config.json has not the sizes of a text decoder (hidden_size, "
            "num_attention_heads, ...), so --tiny cannot shrink the model. Set model.path to a decoder"
        )
    directory = resolve_model_path(of)
    has_tokenizer = directory is not None and any((directory / name).is_file() for name in _TOKENIZER_FILES)
    return TinyModel(settings=shrunk(entries), tokenizer=str(directory) if has_tokenizer else "")


def _known_families() -> str:
    """A known model of each family."""
    families = {entries["model_type"]: name for name, entries in KNOWN_MODELS.items()}
    return ", ".join(sorted(families.values()))


def weight_files(directory: Path) -> list[Path]:
    """The safetensors files that transformers loads: the single file, else the files in the index, else all files."""
    single, index = directory / _SINGLE_FILE, directory / _INDEX_FILE
    if single.is_file() or not index.is_file():
        return [single] if single.is_file() else sorted(directory.glob("*.safetensors"))
    return [directory / name for name in sorted(set(json.loads(index.read_text())["weight_map"].values()))]
