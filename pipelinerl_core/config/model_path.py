"""Directories of models, and the recipes of the built-in models that `pipelinerl prepare` builds.

This module must not import torch, so that a flow can check cheaply whether a model exists.
"""

import difflib
import hashlib
import json
import os
import re
from importlib.metadata import version
from pathlib import Path

from pipelinerl_core.config.hub_models import cached_model, download_model, is_hub_model
from pipelinerl_core.config.section import Section
from pipelinerl_core.config.sections import SumsPrompts
from pipelinerl_core.errors import ConfigError

BUILTIN_PREFIX = "builtin:"


class SumsModel(Section):
    """Recipe of a small Qwen2 model, pretrained on synthetic answers to sums: some with running sums, most
    guessed."""

    revision: int = 1
    """Raise when a change of the code of demonstrations or training changes the built model."""
    seed: int = 0
    """Seed of the initial weights and of the demonstrations."""
    alphabet: str = "0123456789+=,. "
    """One token per character, after the padding token (id 0) and the end token (id 1)."""
    hidden_size: int = 128
    intermediate_size: int = 384
    num_layers: int = 4
    num_heads: int = 4
    num_kv_heads: int = 2
    max_positions: int = 256
    initializer_range: float = 0.06
    """Standard deviation of the initial weights; with the usual 0.02 a model of this width learns more slowly."""
    lengths: tuple[int, ...] = SumsPrompts().lengths
    """Numbers of summands of the demonstrations."""
    worked_out_share: float = 0.35
    """Share of demonstrations that write running sums; the others write a guess near the sum."""
    early_worked_out_share: float = 0.8
    """The share in the early steps, which teach addition; the later steps set how often the model guesses."""
    early_steps: int = 240
    guess_error: int = 6
    """Largest distance of a guess from the sum."""
    steps: int = 400
    rows: int = 64
    """Demonstrations per step."""
    lr: float = 2e-3
    warmup_steps: int = 50


BUILTIN_MODELS = {"builtin:sums": SumsModel()}
_SEED = re.compile(r"seed=(\d{1,9})")


def cache_directory() -> Path:
    """$PIPELINERL_CACHE, or ~/.cache/pipelinerl."""
    return Path(os.environ.get("PIPELINERL_CACHE") or Path.home() / ".cache" / "pipelinerl")


def digest(recipe: SumsModel) -> str:
    """16 hex digits, a hash of the recipe and of the versions of the libraries that compute the weights."""
    libraries = {name: version(name) for name in ("torch", "transformers", "tokenizers")}
    text = json.dumps([recipe.model_dump(mode="json"), libraries], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def model_directory(recipe: SumsModel) -> Path:
    """The directory of a built model; the directory exists only if the model is complete."""
    return cache_directory() / "models" / digest(recipe)


def builtin_recipe(path: str) -> SumsModel | None:
    """The recipe of a `builtin:` name, None for any other path; raises ConfigError for an unknown name.

    Example: builtin:sums?seed=1 is builtin:sums with other initial weights and demonstrations.
    """
    if not path.startswith(BUILTIN_PREFIX):
        return None
    name, separator, options = path.partition("?")
    if name not in BUILTIN_MODELS:
        close = difflib.get_close_matches(name, BUILTIN_MODELS, n=1, cutoff=0)[0]
        raise ConfigError(f"model.path={path}: no such built-in model; did you mean {close}?")
    seed = _SEED.fullmatch(options)
    if separator and seed is None:
        raise ConfigError(f"model.path={path}: the only option of a built-in model is its seed. Set {name}?seed=1")
    recipe = BUILTIN_MODELS[name]
    return recipe.model_copy(update={"seed": int(seed[1])}) if seed else recipe


def seeded_path(path: str, seed: int) -> str:
    """The path of a built-in model with `seed`, unless the path has a seed; any other path unchanged."""
    return path if builtin_recipe(path) is None or "?" in path else f"{path}?seed={seed}"


def resolve_model_path(path: str) -> Path | None:
    """The directory of the model and its tokenizer, or None if the directory does not exist (yet).

    A model of the hub is looked up in the local cache. Raises ConfigError for an unknown `builtin:` name.
    """
    recipe = builtin_recipe(path)
    if recipe is None and is_hub_model(path):
        return cached_model(path)
    directory = Path(path).expanduser() if recipe is None else model_directory(recipe)
    return directory if directory.is_dir() else None


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
