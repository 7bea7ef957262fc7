"""Throughput and lag in closed form: the model of the PipelineRL paper (arXiv:2509.19128, appendix A).

docs/planning.md has its symbols and formulas, and compares its results with the paper. Throughput is in tokens per
flash: the FLOPs of the forward pass of one token over the peak FLOPs of one accelerator. The model leaves out
attention FLOPs, memory of the KV cache, prompts, weight updates, groups and waiting.
"""

import math
from dataclasses import dataclass

import numpy as np

from pipelinerl_core.config import RunConfig
from pipelinerl_core.errors import ConfigError
from pipelinerl_core.planning.lengths import Lengths
from pipelinerl_core.planning.simulated_engine import Speeds
from pipelinerl_core.planning.simulator import Work
from pipelinerl_core.planning.utilization import UtilizationCurve

# Products of lengths and shares that are whole numbers differ from them by rounding.
_ROUNDING = 1e-9


@dataclass(frozen=True, slots=True, kw_only=True)
class System:
    """Accelerators and the work of an optimizer step."""

    accelerators: int
    """N."""
    batch: int
    """B, rollouts of an optimizer step."""
    lengths: Lengths
    """Lengths of completions."""
    utilization: UtilizationCurve
    """U(h)."""
    train_flashes: float
    """tau, flashes to train one token on one accelerator."""

    def __post_init__(self) -> None:
        """Raises ConfigError for numbers without meaning."""
        if self.accelerators < 2 or self.batch < 1 or not self.train_flashes > 0:
            raise ConfigError(
                f"{self.accelerators} accelerators, a batch of {self.batch} and {self.train_flashes:g} flashes per "
                "trained token: the model needs 2 accelerators, 1 rollout and a positive time at least"
            )

    @classmethod
    def of(cls, config: RunConfig, lengths: Lengths, *, prompt_tokens: float = 0.0) -> "System":
        """The emulated accelerators of a configuration; a flash is emulation.token_seconds.

        prompt_tokens: mean length of a prompt, which is trained with each completion.
        """
        emulation = config.emulation
        train_flashes = emulation.train_token_seconds / emulation.token_seconds
        return cls(
            accelerators=emulation.accelerators,
            batch=config.trainer.groups_per_step * config.rollouts.group_size,
            lengths=lengths,
            utilization=UtilizationCurve(((float(emulation.saturation), 1.0),)),
            train_flashes=train_flashes * (1 + prompt_tokens / lengths.mean),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Conventional:
    """Generate-then-train with G optimizer steps per phase, on all accelerators in turn."""

    steps: int
    """G."""
    generation: float
    """Tokens per flash while generating."""
    training: float
    """Tokens per flash while training."""

    @property
    def throughput(self) -> float:
        """Tokens per flash of whole phases: 1 / (1 / generation + 1 / training), equation 13."""
        return 1 / (1 / self.generation + 1 / self.training)

    @property
    def lag(self) -> int:
        """Lag of the last step of a phase: G - 1 optimizer steps.

        The text of appendix A has S - 1 for S = B G sequences. Lag counts optimizer steps, hence G - 1.
        """
        return self.steps - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Pipeline:
    """Generation beside training: `generators` accelerators with `sequences` sequences each; the others train."""

    sequences: int
    """H."""
    generators: int
    """I."""
    generation: float
    """Tokens per flash of the generators: U(H) I, equation 17."""
    training: float
    """Tokens per flash of the other accelerators: (N - I) / tau, equation 18."""
    lag: int
    """Lag of the first token of the longest completion in the worst case: ceil(H I L / (l B)) optimizer steps."""

    @property
    def throughput(self) -> float:
        """Tokens per flash of the slower part, equation 16."""
        return min(self.generation, self.training)


def conventional(system: System, steps: int) -> Conventional:
    """Conventional reinforcement learning with `steps` optimizer steps per phase (appendix A.2, equations 10 to 15).

    The generation of K = B G l tokens lasts sum over steps t = 1..L of h(t) / N / U(h(t) / N) flashes, where h(t)
    sequences are still running: the batch shrinks to the longest completion.
    """
    if steps < 1:
        raise ConfigError(f"{steps} optimizer steps per phase: a phase has at least 1. Set 1 or more")
    num_sequences = system.batch * steps
    running = num_sequences * system.lengths.running / system.accelerators
    flashes = float(system.utilization.step_flashes(running).sum())
    return Conventional(
        steps=steps,
        generation=num_sequences * system.lengths.mean / flashes,
        training=system.accelerators / system.train_flashes,
    )


def pipeline(system: System, sequences: int, generators: int) -> Pipeline:
    """PipelineRL with H = `sequences` on each of I = `generators` accelerators (appendix A.3, equations 16 to 18)."""
    if not 0 < generators < system.accelerators or sequences < 1:
        raise ConfigError(
            f"{sequences} sequences on {generators} of {system.accelerators} accelerators: at least one must "
            "generate 1 sequence, and one must train"
        )
    return Pipeline(
        sequences=sequences,
        generators=generators,
        generation=float(system.utilization.at(np.array([float(sequences)]))[0]) * generators,
        training=(system.accelerators - generators) / system.train_flashes,
        lag=math.ceil(sequences * generators / _sequences_per_lag(system) - _ROUNDING),
    )


def best_pipeline(system: System, max_lag: int) -> Pipeline:
    """The setting (H, I) with the highest throughput at a lag of `max_lag` at most.

    For each I, the smallest H that feeds the trainer, or else the largest H that the lag admits: a larger H only adds
    lag. Among equal throughputs, the setting with the smallest lag. Raises ConfigError if no setting exists.
    """
    most = math.floor(max_lag * _sequences_per_lag(system) + _ROUNDING)  # H I
    if most < 1:
        raise ConfigError(f"a lag of {max_lag} admits no sequence on any accelerator. Set a larger lag or batch")
    useful = math.ceil(system.utilization.saturation)
    utilization = system.utilization.at(np.arange(1, useful + 1, dtype=np.float64))
    settings = []
    for generators in range(1, min(system.accelerators, most + 1)):
        training = (system.accelerators - generators) / system.train_flashes
        enough = int(np.searchsorted(utilization * generators, training)) + 1
        settings.append(pipeline(system, min(enough, most // generators, useful), generators))
    return max(settings, key=lambda setting: (setting.throughput, -setting.lag, -setting.sequences))


def run_estimate(config: RunConfig, speeds: Speeds, work: Work) -> tuple[float, float]:
    """(steps per second, mean staleness) of a run by the closed forms, with measured times of decode and optimizer
    steps instead of flashes.

    Schedules that take turns: the sum of both times, and the mean lag of the steps of a phase. Otherwise the longer
    time, or the sum with share_gpu=turns, and `mean_staleness`. Swaps, commits, groups, window and pace are left out.
    """
    actors, slots = config.placement.actors, config.engine.concurrency
    batch = config.trainer.groups_per_step * config.rollouts.group_size
    training = speeds.train_seconds(round(batch * (work.prompt_tokens + work.lengths.mean))) + work.turn_seconds
    if config.takes_turns:
        steps = config.schedule.steps_per_phase if config.schedule.has_phases else 1
        running_L = batch * steps * work.lengths.running / actors
        # More sequences than slots are decoded one slotful after the other.
        generation = sum(h / min(h, slots) * speeds.decode_seconds(math.ceil(min(h, slots))) for h in running_L)
        return 1 / (generation / steps + training), (steps - 1) / 2
    generation = batch * work.lengths.mean * speeds.decode_seconds(slots) / slots / actors
    staleness = mean_staleness(
        balance=training / generation,
        concurrency=slots * actors,
        batch=batch,
        spread=work.lengths.spread(config.rollouts.group_size),
    )
    return 1 / (generation + training if config.gpu_turns else max(generation, training)), staleness


def _sequences_per_lag(system: System) -> float:
    """H I per step of lag: B l / L."""
    return system.lengths.mean * system.batch / system.lengths.longest


def mean_staleness(*, balance: float, concurrency: float, batch: float, spread: float, queue: float = 1.0) -> float:
    """Mean number of optimizer steps from the start of a rollout to its training.

    From Applied Compute, "Predicting and Controlling Staleness in Fully Asynchronous RL Training"
    (appliedcompute.com/research/staleness-in-fully-async-rl), with their symbols:

        generation  C M / (B max(1, rho))     updates between the start and the end of a group
        queue       rho                       if rho <= 1: the trainer takes all that is ready at each step
                    (2 q + rho - 1) / (2 rho) if rho > 1: the queue is full, and the oldest groups are dropped

    The scheduler of this project drops nothing when its window is full but stops granting groups. The second case is
    therefore an estimate only.

    balance: rho, throughput of generation over throughput of training, each measured alone.
    concurrency: C, sequences in flight. batch: B, rollouts of a step. queue: q, capacity of the queue in steps.
    spread: M, mean of the longest completion of a group over the mean length (`Lengths.spread`).
    """
    if min(balance, concurrency, batch, spread, queue) <= 0:
        raise ConfigError("mean staleness: balance, concurrency, batch, spread and queue must be above 0")
    generation = concurrency * spread / (batch * max(1.0, balance))
    waiting = balance if balance <= 1 else (2 * queue + balance - 1) / (2 * balance)
    return generation + waiting
