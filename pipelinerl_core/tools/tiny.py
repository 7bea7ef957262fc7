"""`pipelinerl train --tiny`: the same configuration with a small model, small data and small sizes, for a CPU."""

import hashlib
import json
import shutil
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from string import Formatter
from typing import Any
from uuid import uuid4

from pipelinerl_core.config import RunConfig
from pipelinerl_core.config.load import set_value
from pipelinerl_core.config.prompts import HuggingFacePrompts
from pipelinerl_core.config.sections import EmulationConfig, PlacementConfig
from pipelinerl_core.host import gpu_capability
from pipelinerl_core.models.paths import builtin_recipe
from pipelinerl_core.models.recipes import TINY_PREFIX, cache_directory, model_directory
from pipelinerl_core.models.resolve import build_config, override_config
from pipelinerl_core.models.tiny import BYTES_PER_TOKEN

STEPS = 3
_GROUPS, _GROUP_SIZE = 4, 4
_MAX_TOKENS = 16
_MAX_TURNS = 4
_EVAL_PROMPTS = 8
_HOST_KEYS = "kind gpus_per_actor gpu trainer_nodes trainer_host hub_host hub_port cores threads"
"""Keys of placement that describe other hosts than this one."""
_FIXED = ("model.path=", "model.device=", "prompts.", "loss.ref_model=", "loss.teacher=", "eval.sets", "mixture.")
"""Overrides that decide which settings are made small; all others win over the small values."""


def is_installed(module: str) -> bool:
    """Whether this interpreter can import a module; without importing it."""
    return find_spec(module) is not None


def tiny(config: RunConfig, overrides: Sequence[str] = ()) -> RunConfig:
    """The configuration with three steps, and small values of the settings that cost time or hardware.

    Kept are the kinds of engine, learner, loss, schedule and prompts, the transport of weights, LoRA, the reward and
    the environment. Without vLLM on this machine the engine is the embedded one. overrides: the overrides of the
    user, which win. Raises ConfigError if the model is not known.
    """
    values = config.model_dump(mode="json")
    for key, value in _small(config).items():
        set_value(values, key, value)
    small = build_config(values)
    return override_config(small, [override for override in overrides if not override.startswith(_FIXED)])


def replaced(config: RunConfig, small: RunConfig) -> str:
    """One line: the keys whose values differ, with the values of `small`."""
    before, after = config.model_dump(mode="json"), small.model_dump(mode="json")
    changes = [
        f"{section}.{name}={json.dumps(value) if isinstance(value, bool) else value}"
        for section, keys in after.items()
        if isinstance(keys, dict)
        for name, value in keys.items()
        if before[section].get(name) != value
    ]
    return f"--tiny replaces {', '.join(changes)}. The model is random, so its rewards mean nothing"


def _small(config: RunConfig) -> dict[str, Any]:
    """Key -> value in place of the configured value."""
    path = TINY_PREFIX + config.model.path
    recipe = builtin_recipe(path)  # raises if the model is not known
    assert recipe is not None
    rollouts, engine, trainer, placement = config.rollouts, config.engine, config.trainer, config.placement
    has_workers = engine.has_workers
    is_missing = bool(engine.package) and not is_installed(engine.package)
    on_gpu = (
        has_workers and not is_missing and gpu_capability() is not None
    )  # vLLM's build for GPUs has no CPU kernels
    actors, group_size = min(2, placement.actors), min(_GROUP_SIZE, rollouts.group_size)
    groups = min(_GROUPS, trainer.groups_per_step)
    small: dict[str, Any] = {
        "model.path": path,
        "model.device": "cuda" if on_gpu else "cpu",
        **_small_prompts(config),
        "rollouts.group_size": group_size,
        "rollouts.max_tokens": min(_MAX_TOKENS, rollouts.max_tokens),
        "rollouts.max_prompt_tokens": BYTES_PER_TOKEN * rollouts.max_prompt_tokens,
        # A random model is rarely right: with equal rewards, no group would be trained, or none with a backward pass.
        "rollouts.filter_zero_variance": False,
        "trainer.skip_zero_advantage": False,
        "reward.overlong_tokens": min(_MAX_TOKENS // 2, config.reward.overlong_tokens),
        "engine.concurrency": max(1, min(engine.concurrency, group_size * groups // actors)),
        "trainer.steps": STEPS,
        "trainer.ranks": min(2, trainer.ranks),
        "trainer.groups_per_step": groups,
        "loss.ref_model": config.loss.ref_model and str(model_directory(recipe)),
        "loss.teacher": config.loss.teacher and str(model_directory(recipe)),
        "weights.broadcast_host": "",
        # The evaluations of vLLM start two more engines, half a minute each.
        "eval.num_prompts": 0 if has_workers and not is_missing else min(_EVAL_PROMPTS, config.eval.num_prompts),
        "eval.every_steps": 0,
        "eval.max_tokens": 0,
        "placement.actors": actors,
        "placement.lease_seconds": max(60.0, placement.lease_seconds),
        "placement.share_gpu": bool(placement.share_gpu),  # vLLM refuses turns on a CPU
        **{f"placement.{key}": PlacementConfig.model_fields[key].default for key in _HOST_KEYS.split()},
        **{f"emulation.{key}": value for key, value in EmulationConfig().model_dump().items()},
    }
    if config.learner.attention in ("varlen", "flex"):  # for GPUs only
        small["learner.attention"] = "auto"
    if is_missing:
        transport = "shm" if config.weights.is_broadcast else config.weights.transport
        small |= {"engine.kind": "embedded", "weights.transport": transport}
    else:
        small |= {f"engine.{key}": value for key, value in engine.tiny.items()}
    if config.mixture:
        small["mixture"] = _small_parts(config)
    if any(part.environment.path for part in config.parts.values()):
        small["rollouts.max_tokens"] = BYTES_PER_TOKEN * rollouts.max_tokens  # counts the messages, too
    if config.environment.path:
        small["environment.turn_tokens"] = _MAX_TOKENS
        small["environment.max_turns"] = min(_MAX_TURNS, config.environment.max_turns)
    return small


def _small_parts(config: RunConfig) -> dict[str, Any]:
    """The parts of a mixture with small data and short turns."""
    parts: dict[str, Any] = {}
    for name, part in config.parts.items():
        values = config.mixture[name].model_dump(mode="json")
        values["max_tokens"] = 0
        if small_prompts := _small_prompts(part):
            values["prompts"] = {**part.prompts.model_dump(mode="json"), "path": small_prompts["prompts.path"]}
        if part.reward.overlong_tokens:
            values["reward"] = {
                **part.reward.model_dump(mode="json"),
                "overlong_tokens": min(_MAX_TOKENS // 2, part.reward.overlong_tokens),
            }
        if part.environment.path:
            turns = min(_MAX_TURNS, part.environment.max_turns)
            limits = {"turn_tokens": _MAX_TOKENS, "max_turns": turns}
            values["environment"] = {**part.environment.model_dump(mode="json"), **limits}
        parts[name] = values
    return parts


def _small_prompts(config: RunConfig) -> dict[str, Any]:
    """Data sets that would be downloaded are replaced by generated ones."""
    prompts = config.prompts
    if not isinstance(prompts, HuggingFacePrompts) or Path(prompts.path).expanduser().is_dir():
        return {}
    return {"prompts.path": str(_write_data(prompts)), "eval.sets": {}}


def _write_data(prompts: HuggingFacePrompts) -> Path:
    """A directory with a data set that has the configuration, the splits and the columns of the section."""
    columns = {name for _, name, _, _ in Formatter().parse(prompts.template) if name} or {prompts.prompt_column}
    splits = list(dict.fromkeys(text.partition("[")[0] for text in (prompts.split, prompts.held_out_split) if text))
    entries = [f"  - split: {split}\n    path: {split}.jsonl\n" for split in splits]
    name = prompts.config_name or "default"
    files = {"README.md": f"---\nconfigs:\n- config_name: {name}\n  data_files:\n{''.join(entries)}---\n"}
    rows = list(_rows(prompts, columns))
    for number, split in enumerate(splits):
        files[f"{split}.jsonl"] = "".join(f"{json.dumps(row)}\n" for row in rows[number :: len(splits)])
    digest = hashlib.sha256(json.dumps(files).encode()).hexdigest()[:16]
    directory = cache_directory() / "data" / digest
    if not directory.is_dir():
        partial = directory.with_name(f"{digest}.{uuid4().hex}")
        partial.mkdir(parents=True)
        for file, text in files.items():
            (partial / file).write_text(text, encoding="utf-8")
        try:
            partial.rename(directory)
        except OSError:  # another process has written the same meanwhile
            shutil.rmtree(partial)
    return directory


def _rows(prompts: HuggingFacePrompts, columns: set[str]) -> Iterator[dict[str, Any]]:
    """Sums of two numbers, with the answer in the form of well-known data sets: "#### 5", "\\boxed{5}" or "5"."""
    for first in range(1, 9):
        for second in range(1, 10 - first):
            total = first + second
            answer = str(total)
            if "gsm8k" in prompts.path.lower():
                answer = f"The sum of {first} and {second} is {total}.\n#### {total}"
            elif prompts.answer_column == "solution":
                answer = f"The sum of {first} and {second} is $\\boxed{{{total}}}$."
            row: dict[str, Any] = {}
            question = f"What is {first} + {second}?"
            for column in sorted(columns):
                _set(row, column, question)
            _set(row, prompts.answer_column, answer)
            yield row


def _set(row: dict[str, Any], column: str, text: str) -> None:
    """A column, or a field of a struct column: `meta.answer`."""
    *outer, name = column.split(".")
    for part in outer:
        row = row.setdefault(part, {})
    row[name] = text
