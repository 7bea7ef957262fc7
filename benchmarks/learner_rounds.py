"""Steps of the learner, of a bare loop and of TRL, in turns on the same rollouts (part of `bench learner`).

Shapes: B = rollouts, P = longest prompt, C = longest completion, N = sampled tokens of a pack.
"""

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from benchmarks.engine_load import random_model, random_rollout
from benchmarks.sizes import SIZES
from pipelinerl_core.batching.assemble import assemble_rows
from pipelinerl_core.batching.collate import PackBatcher, num_forward_tokens
from pipelinerl_core.batching.pack import Packing, pack
from pipelinerl_core.config.engines import EmbeddedConfig
from pipelinerl_core.config.learners import TorchConfig
from pipelinerl_core.config.run import RunConfig
from pipelinerl_core.config.sections import RolloutsConfig
from pipelinerl_core.config.training import TrainerConfig
from pipelinerl_core.training.learner import TorchLearner
from pipelinerl_core.training.model import head_weight, hidden_states, prepare_model
from pipelinerl_core.training.optimizer import make_adam
from pipelinerl_core.types import Rollout, TrainingRow

Step = Callable[[], object]


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """A model, and the rollouts of one step."""

    name: str
    model: dict[str, Any]
    num_groups: int
    median_tokens: int
    """Median length of a completion; lengths are lognormal."""
    max_tokens: int
    pack_tokens: int
    group_size: int = 8
    spread: float = 0.75
    """Standard deviation of the logarithm of a completion's length."""
    prompt_tokens: tuple[int, int] = (8, 20)
    """Shortest and longest prompt. The rollouts of a group have one prompt."""

    def config(self) -> RunConfig:
        """The configuration of a run with such steps."""
        return step_config(self.num_groups, self.pack_tokens, self.group_size, self.max_tokens)

    def groups(self) -> list[list[Rollout]]:
        """Rollouts of random tokens by group; every call returns equal rollouts."""
        rng = np.random.default_rng(0)
        groups = []
        for group in range(self.num_groups):
            prompt = self._tokens(rng, int(rng.integers(*self.prompt_tokens, endpoint=True)))
            groups.append([self._rollout(rng, prompt, group, index) for index in range(self.group_size)])
        return groups

    def _tokens(self, rng: np.random.Generator, size: int) -> NDArray[np.int32]:
        return rng.integers(0, self.model["vocab_size"], size, dtype=np.int32)

    def _rollout(self, rng: np.random.Generator, prompt: NDArray[np.int32], group: int, index: int) -> Rollout:
        wanted = rng.lognormal(np.log(self.median_tokens), self.spread)
        completion = self._tokens(rng, int(np.clip(wanted, 2, self.max_tokens)))
        logprob = -np.log(self.model["vocab_size"])
        return random_rollout(prompt, completion, logprob, group=group, index=index, size=self.group_size)


def step_config(num_groups: int, pack_tokens: int, group_size: int, max_tokens: int) -> RunConfig:
    """The configuration of a run with steps of this size."""
    return RunConfig(
        trainer=TrainerConfig(steps=1000, groups_per_step=num_groups, pack_tokens=pack_tokens),
        rollouts=RolloutsConfig(group_size=group_size, max_tokens=max_tokens),
        engine=EmbeddedConfig(concurrency=group_size),
        learner=TorchConfig(lr=1e-4),
    )


WORKLOADS = {
    "quickstart": Workload(
        name="quickstart", model=SIZES["tiny"], num_groups=64, median_tokens=9, max_tokens=80, pack_tokens=2048
    ),
    "small": Workload(
        name="small", model=SIZES["small"], num_groups=8, median_tokens=96, max_tokens=480, pack_tokens=2048
    ),
    "prompts": Workload(
        name="prompts of 2,048 tokens",
        model=SIZES["small"] | {"max_position_embeddings": 4096},
        num_groups=2,
        median_tokens=64,
        max_tokens=64,
        pack_tokens=2048,
        spread=0.0,
        prompt_tokens=(2048, 2048),
    ),
}


class BareLoop:
    """A hand-written training step: prebuilt packs, the learner's packed attention, plain log_softmax."""

    def __init__(self, workload: Workload, rows: Sequence[TrainingRow]) -> None:
        self._model = prepare_model(random_model(workload.model))
        self._packs = list(PackBatcher(workload.pack_tokens).rows(rows))
        self._config = workload.config().learner
        self._adam = make_adam(list(self._model.parameters()), self._config)

    def __call__(self) -> None:
        self._adam.zero_grad()
        for batch in self._packs:
            logits_NV = hidden_states(self._model, batch) @ head_weight(self._model).T
            logprobs_N = torch.log_softmax(logits_NV, -1).gather(-1, batch.target_ids_N[:, None])[:, 0]
            loss = -(batch.loss_weights_N * batch.advantages_N * logprobs_N).sum()
            loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(self._model.parameters(), self._config.clip_norm)
        self._adam.step()


def measure_workload(workload: Workload, rounds: int, *, with_trl: bool) -> dict[str, Any]:
    """Tokens per second of every contestant, and ratios to the learner: medians over rounds, taken in turns."""
    groups = workload.groups()
    rows = assemble_rows(1, groups, workload.config()).rows
    num_tokens = sum(num_forward_tokens(row.rollout) for row in rows)
    steps: dict[str, Step] = {
        "learner": _learner(workload, rows),
        "learner, prompts not shared": _learner(workload, rows, shares_prompts=False),
        "bare loop": BareLoop(workload, rows),
    }
    if with_trl:
        from benchmarks.learner_trl import TRLStep

        steps["TRL"] = TRLStep(random_model(workload.model), rows, workload.config())
    seconds = in_turns(steps, rounds)
    return {
        "workload": workload.name,
        "num_parameters": sum(parameter.numel() for parameter in random_model(workload.model).parameters()),
        "num_rollouts": len(rows),
        "num_tokens": num_tokens,
        "pack_tokens": workload.pack_tokens,
        "rounds": rounds,
        "tokens_per_second": {
            name: round(num_tokens / statistics.median(wall for wall, _ in timings))
            for name, timings in seconds.items()
        },
        # Medians of each round's ratio: other load on the machine slows both sides of one round.
        "learner_over": {
            name: round(statistics.median(_ratios(seconds, name, clock=0)), 3) for name in steps if name != "learner"
        },
        "learner_over_cpu": {
            name: round(statistics.median(_ratios(seconds, name, clock=1)), 3) for name in steps if name != "learner"
        },
    }


def measure_fill() -> list[dict[str, Any]]:
    """Fill of packs and padding of attention, 512 lognormal lengths; pack_tokens is a multiple of the mean length."""
    lengths = np.random.default_rng(0).lognormal(np.log(200), 0.75, 512).astype(int).clip(1, 4000).tolist()
    return [
        {"multiple": multiple, "packing": packing, **_fill(lengths, multiple * sum(lengths) // len(lengths), packing)}
        for multiple in (4, 8, 16)
        for packing in ("sorted", "filled")
    ]


def _fill(lengths: Sequence[int], pack_tokens: int, packing: Packing) -> dict[str, float]:
    packs = [[lengths[index] for index in indices] for indices in pack(lengths, pack_tokens, packing)]
    return {
        "pack_fill": round(sum(lengths) / sum(max(pack_tokens, sum(pack_lengths)) for pack_lengths in packs), 3),
        "attention_slots_per_token": round(
            sum(len(pack_lengths) * max(pack_lengths) for pack_lengths in packs) / sum(lengths), 3
        ),
        "num_packs": len(packs),
    }


def _learner(workload: Workload, rows: Sequence[TrainingRow], *, shares_prompts: bool = True) -> Step:
    batcher = PackBatcher(workload.pack_tokens, shares_prompts=shares_prompts)
    learner = TorchLearner(prepare_model(random_model(workload.model)), workload.config(), batcher=batcher)
    return lambda: learner.step(rows)


def in_turns(steps: dict[str, Step], rounds: int) -> dict[str, list[tuple[float, float]]]:
    """Seconds of wall time and of CPU time of each round after the first, which warms up."""
    seconds: dict[str, list[tuple[float, float]]] = {name: [] for name in steps}
    for round_ in range(1 + rounds):
        for name, step in steps.items():
            started, cpu_started = time.perf_counter(), time.process_time()
            step()
            if round_:
                seconds[name].append((time.perf_counter() - started, time.process_time() - cpu_started))
    return seconds


def _ratios(seconds: dict[str, list[tuple[float, float]]], other: str, *, clock: int) -> list[float]:
    """For each round: seconds of the other contestant / seconds of the learner; clock 0: wall time, 1: CPU time."""
    return [theirs[clock] / ours[clock] for ours, theirs in zip(seconds["learner"], seconds[other], strict=True)]
