"""Task of a reference trainer: model, prompts, reward and numbers of a configuration; and the common command line."""

import argparse
import importlib
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks.peers.record import Recorder
from pipelinerl_core.config import RunConfig
from pipelinerl_core.config.verifier import verifier_name
from pipelinerl_core.engine.embedded.load import eos_of
from pipelinerl_core.errors import ConfigError
from pipelinerl_core.gym.tasks import evaluating, scored_tasks
from pipelinerl_core.models.paths import resolve_model_path
from pipelinerl_core.models.resolve import load_config
from pipelinerl_core.prompts import build_source
from pipelinerl_core.rewards.pool import VERIFIERS
from pipelinerl_core.roles.runtime.inference import build_codec
from pipelinerl_core.types import Int32Array, Prompt


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerTask:
    """The task of one reference trainer with one seed."""

    config: RunConfig
    model: Any
    tokenizer: Any
    prompt: Callable[[int], Prompt]
    """The prompt at a position of the training sequence, as in runs of PipelineRL."""
    encode: Callable[[Prompt], Int32Array]
    """The token ids of a prompt, with the chat template if the configuration asks for it."""
    end_token_ids: frozenset[int]
    """Tokens that end a completion and are part of it."""
    verify: Callable[[str, Mapping[str, Any]], float]
    """(text of a completion, task of its prompt) -> reward; in this process, without the cost of a worker."""
    out: Path
    every: int
    target: float
    max_seconds: float
    threads: int

    def recorder(self, name: str, settings: Mapping[str, Any]) -> Recorder:
        """A recorder that writes to `out`."""
        return Recorder(
            name,
            self.config,
            self.out,
            every=self.every,
            target=self.target,
            max_seconds=self.max_seconds,
            settings={**settings, "threads": self.threads},
        )


def peer_parser(description: str) -> argparse.ArgumentParser:
    """The arguments of every reference trainer."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--preset", default="quickstart", help="preset or TOML file of the compared runs")
    parser.add_argument("--model", help="model directory or builtin:..., default that of the preset")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, help="optimizer steps, default those of the preset")
    parser.add_argument("--every", type=int, default=5, help="store the weights of every k-th step")
    parser.add_argument("--out", type=Path, required=True, help="directory for weights and points.json")
    parser.add_argument("--target", type=float, default=0.5, help="target accuracy of the comparison")
    parser.add_argument("--max-seconds", type=float, default=600.0)
    cores_each = len(os.sched_getaffinity(0)) // int(os.environ.get("WORLD_SIZE", "1"))
    parser.add_argument("--threads", type=int, default=max(1, cores_each), help="of each process, default all cores")
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="settings, as for `train`")
    return parser


def open_task(arguments: argparse.Namespace) -> PeerTask:
    """Load configuration and model. Raises ConfigError."""
    overrides = [*arguments.overrides, f"seed={arguments.seed}"]
    overrides += [f"model.path={arguments.model}"] if arguments.model else []
    overrides += [f"trainer.steps={arguments.steps}"] if arguments.steps else []
    config = load_config(arguments.preset, overrides)
    path = resolve_model_path(config.model.path)
    if path is None:
        raise ConfigError(f"model.path={config.model.path}: not built yet. Run `pipelinerl prepare`")
    torch.set_num_threads(arguments.threads)
    torch.manual_seed(config.seed)
    tokenizer = AutoTokenizer.from_pretrained(path)
    model: Any = AutoModelForCausalLM.from_pretrained(path, dtype=getattr(torch, config.dtype), local_files_only=True)
    if evaluated := evaluating(scored_tasks(config)):
        raise ConfigError(
            f"prompts.tasks={', '.join(evaluated)}: reference trainers score without isolation. "
            "Set prompts.tasks without these tasks"
        )
    if config.mixture:
        raise ConfigError(
            f"mixture.{next(iter(config.mixture))}: reference trainers train on one task. Remove the mixture"
        )
    if config.environment.path:
        raise ConfigError(
            f"environment.path={config.environment.path}: reference trainers sample one turn. Remove environment.path"
        )
    if config.reward.function:
        raise ConfigError(
            f"reward.function={config.reward.function}: reference trainers score with built-in verifiers only. "
            "Remove reward.function"
        )
    module, _, function = VERIFIERS[verifier_name(config)][0].partition(":")
    return PeerTask(
        config=config,
        model=model,
        tokenizer=tokenizer,
        prompt=build_source(config).prompt,
        encode=build_codec(config).encode,
        end_token_ids=frozenset(eos_of(model)),
        verify=getattr(importlib.import_module(module), function),
        out=arguments.out,
        every=arguments.every,
        target=arguments.target,
        max_seconds=arguments.max_seconds,
        threads=arguments.threads,
    )
