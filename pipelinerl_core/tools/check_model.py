"""Check that learner and engine can compute the architecture of the model, with a small, random model of it, and that
the files of each model on this host are complete.

stdin: the configuration (check_process.py).
"""

import copy
import logging
import sys
from collections.abc import Callable, Mapping
from typing import Any

import torch

from pipelinerl_core.check_process import run_check
from pipelinerl_core.config import RunConfig
from pipelinerl_core.engine.support import SUPPORT
from pipelinerl_core.errors import ConfigError, PipelineRLError
from pipelinerl_core.models.hub import hub_config, is_hub_model
from pipelinerl_core.models.paths import builtin_recipe, model_config_of, resolve_model_path
from pipelinerl_core.models.recipes import TINY_PREFIX, TinyModel
from pipelinerl_core.models.resolve import build_config
from pipelinerl_core.models.shapes import shape_of
from pipelinerl_core.models.tiny import shrunk
from pipelinerl_core.training.model import check_gradient, prepare_model, with_biases
from pipelinerl_core.training.model_files import check_model_files
from pipelinerl_core.training.tiny_model import random_model

_WINDOW = 3
"""Sliding window of the small model: shorter than the sequences of the checks."""


def check(config: RunConfig) -> list[str]:
    """Raise ConfigError, one line, if a role cannot load or compute a model of the configuration. Returns lines of
    text about the models."""
    lines: list[str] = []
    if isinstance(builtin_recipe(config.model.path), TinyModel | None):
        _check_architecture(config)
    for key, path in config.model_paths.items():
        directory = resolve_model_path(path)
        if builtin_recipe(path) is None and directory is not None and (directory / "config.json").is_file():
            lines += check_model_files(directory, key)
    return lines


def _check_architecture(config: RunConfig) -> None:
    path = config.model.path
    recipe = builtin_recipe(path)
    entries: Mapping[str, Any] | None
    if isinstance(recipe, TinyModel):
        path, entries = path.removeprefix(TINY_PREFIX), recipe.settings
    else:
        entries = model_config_of(path)
        if entries is None and is_hub_model(path):
            entries = hub_config(path)
    if entries is None:
        return  # no such model, which another check tells
    if problem := rope_problem(entries, config.rollouts.max_prompt_tokens + config.longest_completion):
        raise ConfigError(f"model.path={path}: {problem}")
    for role, problem in problems(entries, config.engine.kind).items():
        if problem:
            raise ConfigError(
                f"model.path={path}: {entries.get('model_type', 'models without a model_type')} cannot be {role}: "
                f"{problem}. docs/models.md has the families that run"
            )


def rope_problem(entries: Mapping[str, Any], longest: int) -> str:
    """Why sequences of `longest` tokens cannot be trained with the position embedding, empty if they can.

    longrope takes its long factors, and dynamic its frequencies, for a whole pass if any sequence in it is longer
    than the original length.
    """
    rope = entries.get("rope_parameters") or entries.get("rope_scaling") or {}
    kind = rope.get("rope_type") or rope.get("type")
    original = rope.get("original_max_position_embeddings") or entries.get("original_max_position_embeddings")
    if kind == "dynamic":
        original = original or entries.get("max_position_embeddings")
    if kind not in ("longrope", "dynamic") or not original or longest <= original:
        return ""
    return (
        f"with rope_type={kind}, log-probabilities depend on the other sequences of a pass if any has more than "
        f"{original} tokens, and sequences may have {longest}. Lower rollouts.max_tokens or "
        "rollouts.max_prompt_tokens"
    )


def problems(entries: Mapping[str, Any], engine: str) -> dict[str, str]:
    """ "loaded", "trained", "sampled" -> why the architecture cannot be, empty if it can.

    entries: of config.json.
    """
    if "text_config" in entries:
        return {"loaded": "its config.json has a text_config: it reads images or sound. Take a model of text only"}
    if shape_of(entries) is None:
        return {"loaded": "its config.json has not the sizes of a decoder with attention heads"}
    try:
        model = with_biases(random_model(_small(entries)).eval())
    except Exception as error:  # noqa: BLE001 - models of transformers raise any error
        return {"loaded": _line(error)}
    return {
        "trained": _problem(lambda: check_gradient(prepare_model(copy.deepcopy(model), "padded"))),
        "sampled": _problem(lambda: SUPPORT[engine](copy.deepcopy(model))),
    }


def _small(entries: Mapping[str, Any]) -> dict[str, Any]:
    small = shrunk(entries)
    if small.get("sliding_window"):
        small["sliding_window"] = _WINDOW
    return {**small, "vocab_size": 64, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2}


def _problem(check: Callable[[], object]) -> str:
    try:
        check()
    except Exception as error:  # noqa: BLE001 - models of transformers raise any error
        return _line(error)
    return ""


def _line(error: Exception) -> str:
    text = " ".join(str(error).split())
    if isinstance(error, PipelineRLError):
        return text
    return f"{type(error).__name__}: {text.partition('. ')[0][:300].rstrip('.')}"


def _check(given: Any) -> list[str]:
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    return check(build_config(given))


if __name__ == "__main__":
    sys.exit(run_check(_check))
