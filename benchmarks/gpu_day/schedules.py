"""Pipeline, with and without turns, conventional and a plain loop on one device: trained tokens per second.

Run: python -m benchmarks.gpu_day.schedules [--toy]

The model has the shape of SmolLM2-135M and random weights; rewards are random. Pipeline: engine and learner compute
side by side, or with placement.share_gpu=turns one after the other, each with the memory of the device; conventional:
the engine waits for each step, and both keep their memory. The plain loop (benchmarks/peers/sequential.py) generates,
then takes a step, in one process without scoring processes, store and commits.
"""

import argparse
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks.gpu_day.local_run import LocalRun
from benchmarks.gpu_day.models import write_random
from benchmarks.gpu_day.part import device_name, emit
from benchmarks.peers.sequential import PlainLoop
from benchmarks.peers.task import PeerTask
from pipelinerl_core.config import RunConfig
from pipelinerl_core.errors import PipelineRLError
from pipelinerl_core.models.resolve import load_config
from pipelinerl_core.prompts import build_source
from pipelinerl_core.roles.runtime.inference import build_codec
from pipelinerl_core.tools.audit import Audit

FULL = (
    "trainer.steps=6", "trainer.groups_per_step=16", "rollouts.max_tokens=128", "engine.concurrency=128",
    "trainer.pack_tokens=16384",
)  # fmt: skip
TOY = ("trainer.steps=3", "trainer.groups_per_step=4", "rollouts.max_tokens=16", "engine.concurrency=32")
SETTINGS = (
    "prompts.kind=largest_number", "rollouts.group_size=8", "rollouts.max_prompt_tokens=160", "eval.num_prompts=0",
    "learner.lr=1e-6", "weights.durable_every=100", "placement.share_gpu=true",
)  # fmt: skip
CONTESTANTS = {
    "pipeline": ("schedule.kind=pipeline",),
    "pipeline, turns": ("schedule.kind=pipeline", "placement.share_gpu=turns"),
    "conventional": ("schedule.kind=conventional", "schedule.max_lag=0"),
}
"""Name -> settings."""
RUN_SECONDS = 150.0
REWARD = '''"""Random rewards: a model with random weights has no others."""

import os


def score(text: str, answer: str) -> float:
    return float(os.urandom(1)[0] % 2)
'''


def main() -> int:
    """One row per contestant; the exit code is 1 if one fails."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--toy", action="store_true")
    options = parser.parse_args()
    device = device_name()
    size, dtype = ("small", "float32") if options.toy else ("135m", "bfloat16")
    rows: list[dict[str, Any]] = []
    problems: list[str] = []
    with tempfile.TemporaryDirectory(prefix="gpu-day-") as root:
        write_random(size, f"{root}/model", dtype=dtype, device=device)
        Path(root, "rewards.py").write_text(REWARD)
        settings = [*SETTINGS, *(TOY if options.toy else FULL), f"model.device={device}", f"model.dtype={dtype}"]
        settings += [f"model.path={root}/model", f"reward.function={root}/rewards.py:score"]
        for name, others in CONTESTANTS.items():
            config = load_config("quickstart", [*settings, *others])
            try:
                rows.append(run_row(name, f"file://{root}/{name.replace(', ', '-')}", config))
            except PipelineRLError as error:
                problems.append(f"{name}: {error}")
            emit(rows, problems=problems)  # a stage without time left has these rows
        try:
            rows.append(loop_row(config, f"{root}/model", device))
        except torch.OutOfMemoryError as error:
            problems.append(f"plain loop: {error}")
    return emit(rows, problems=problems)


class SteadySteps:
    """Counts the steps and their seconds after the first committed step, which includes the start of the actor."""

    def __init__(self) -> None:
        self.first = 0
        self.started = 0.0

    def __call__(self, run: LocalRun) -> None:
        """Note when the first step is committed."""
        if not self.first and run.committed > 0:
            self.first, self.started = run.committed, time.monotonic()


def run_row(name: str, url: str, config: RunConfig) -> dict[str, Any]:
    """A run of real processes, without its first step."""
    run, steady = LocalRun(url, config, RUN_SECONDS), SteadySteps()
    ended = run.train(steady)["ended"]
    audit = Audit(run.context.store, run.context.config).run().document
    if not audit["closes"]:
        raise PipelineRLError(f"the audit does not close: {audit['problems']}")
    return row_of(name, config, config.trainer.steps - steady.first, ended - steady.started)


def loop_row(config: RunConfig, model: str, device: str) -> dict[str, Any]:
    """The plain loop, without its first step."""
    policy: Any = AutoModelForCausalLM.from_pretrained(model, dtype=getattr(torch, config.dtype))
    task = PeerTask(
        config=config,
        model=policy.to(device),
        tokenizer=AutoTokenizer.from_pretrained(model),
        prompt=build_source(config).prompt,
        encode=build_codec(config).encode,
        end_token_ids=frozenset(),
        verify=lambda text, task: float(torch.rand(()).item() < 0.5),
        out=Path(model), every=0, target=0.0, max_seconds=RUN_SECONDS, threads=torch.get_num_threads(),
    )  # fmt: skip
    loop, steps, started = PlainLoop(task), 0, time.monotonic()
    warm = started
    while steps < config.trainer.steps and time.monotonic() < started + RUN_SECONDS:
        steps += 1
        loop.step(steps)
        if device == "cuda":
            torch.cuda.synchronize()
        if steps == 1:
            warm = time.monotonic()
    return row_of("plain loop", config, steps - 1, time.monotonic() - warm)


def row_of(name: str, config: RunConfig, steps: int, seconds: float) -> dict[str, Any]:
    """A row. A model with random weights samples no end token: all completions have the greatest length."""
    num_tokens = config.trainer.groups_per_step * config.rollouts.group_size * config.rollouts.max_tokens
    return {
        "contestant": name,
        "steps": steps,
        "sampled tokens of a step": num_tokens,
        "seconds per step": seconds / max(1, steps),
        "tokens/s": num_tokens * steps / seconds,
    }


if __name__ == "__main__":
    sys.exit(main())
