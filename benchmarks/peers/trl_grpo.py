"""TRL's GRPOTrainer on the same model, prompts, batch, reward and objective.

    make bench-peers
    python -m benchmarks.peers trl --out DIR [--seed S] [--model DIR] [KEY=VALUE ...]

The options of TRL can express PipelineRL's objective: loss_type=cispo is REINFORCE with a truncated importance ratio,
normalised by the tokens of the batch; epsilon_high is loss.ratio_max; and a reward weight of G / (G - 1) turns TRL's
baseline, the mean of the group, into the mean of the other rollouts. There is no KL term and no scaling by the
standard deviation. AdamW, learning rate, warm-up, decay and clipping follow the configuration.
"""

import logging
import math
import os
import sys
import warnings
from typing import Any

import torch
import torch.distributed as dist
from datasets import Dataset
from transformers import TrainerCallback

from benchmarks.peers.record import Recorder
from benchmarks.peers.task import PeerTask, open_task, peer_parser
from pipelinerl_core.config import RunConfig
from pipelinerl_core.config.losses import ReinforceLoss
from pipelinerl_core.errors import ConfigError
from pipelinerl_core.parent_death import die_with_parent
from pipelinerl_core.roles.runtime.process import configure_logging, exit_codes
from pipelinerl_core.training.optimizer import learning_rate, make_adam

try:
    from trl import GRPOConfig, GRPOTrainer
except ModuleNotFoundError:
    sys.exit("trl is not installed: run `make bench-peers`")

# Concurrent sequences of continuous batching.
_CONCURRENCY = 256
# Options of TRL that determine the objective and the speed; part of points.json.
_REPORTED = (
    "per_device_train_batch_size",
    "gradient_accumulation_steps",
    "steps_per_generation",
    "use_transformers_continuous_batching",
    "loss_type",
    "epsilon_high",
    "scale_rewards",
    "reward_weights",
    "beta",
    "num_iterations",
)


class Rewards:
    """TRL's reward function; stores the mean of the last batch."""

    __name__ = "verifier"  # read by TRL

    def __init__(self, task: PeerTask) -> None:
        self._task = task
        self.mean = 0.0

    def __call__(self, completions: list[str], index: list[int], **_: Any) -> list[float]:
        """One reward per completion."""
        tasks = [self._task.prompt(position).task for position in index]
        scores = [self._task.verify(text, task) for text, task in zip(completions, tasks, strict=True)]
        self.mean = sum(scores) / len(scores)
        return scores


class Record(TrainerCallback):
    """Reports every optimizer step to the recorder, and stops all processes when the recorder ends the run."""

    def __init__(self, recorder: Recorder | None, task: PeerTask, rewards: Rewards) -> None:
        """`recorder`: None in all processes except rank 0."""
        self._recorder = recorder
        self._task = task
        self._rewards = rewards

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Start the clock, after model and trainer are built."""
        if self._recorder is not None:
            self._recorder.start(self._task.model)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Record the step after the optimizer."""
        reward = torch.tensor(self._rewards.mean)
        should_stop = torch.tensor(0)
        if dist.is_initialized():
            dist.all_reduce(reward)
            reward /= dist.get_world_size()
        if self._recorder is not None:
            should_stop += self._recorder.after_step(self._task.model, reward.item())
        if dist.is_initialized():
            dist.broadcast(should_stop, src=0)
        control.should_training_stop = bool(should_stop)


def trainer_settings(
    task: PeerTask, *, rows: int = 128, steps_per_generation: int = 1, continuous_batching: bool = True
) -> Any:
    """TRL's options. `rows` of a batch go through one forward pass; gradients are accumulated.

    The defaults are the fastest. 512 rollouts on two cores, two processes of one thread: 4.3 s per step; with 32 rows
    in one pass 4.7 s, with plain `generate` 6.0 s. One process of two threads: 5.8 s, with plain `generate` 7.4 s.
    Two steps per generation take 1.2 times the CPU time of one step, because TRL scores each rollout again.
    """
    config = task.config
    batch = config.trainer.groups_per_step * config.rollouts.group_size
    processes = int(os.environ.get("WORLD_SIZE", "1"))
    rows = math.gcd(rows, batch // processes)
    passes = batch // (rows * processes)
    return grpo_config(
        config,
        str(task.out / "trl"),
        ddp_backend="gloo" if processes > 1 else None,
        seed=config.seed,
        max_steps=config.trainer.steps,
        per_device_train_batch_size=rows,
        gradient_accumulation_steps=passes,
        steps_per_generation=steps_per_generation * passes,
        reward_weights=[config.rollouts.group_size / (config.rollouts.group_size - 1)],
        num_iterations=1,
        max_grad_norm=config.learner.clip_norm,
        shuffle_dataset=False,
        use_transformers_continuous_batching=continuous_batching,
        transformers_continuous_batching_config=_cache_settings(config, _CONCURRENCY),
        dataloader_num_workers=0,
    )


def grpo_config(config: RunConfig, directory: str, **others: Any) -> Any:
    """TRL's options for the objective of a configuration, on the CPU and without logs. others: further options."""
    if not isinstance(config.loss, ReinforceLoss):
        raise ConfigError(f"loss.kind={config.loss.kind}: TRL is compared on reinforce. Set loss.kind=reinforce")
    return GRPOConfig(
        output_dir=directory,
        use_cpu=True,
        bf16=False,
        num_generations=config.rollouts.group_size,
        max_completion_length=config.rollouts.max_tokens,
        temperature=config.rollouts.temperature,
        loss_type="cispo",
        epsilon_high=config.loss.ratio_max,
        scale_rewards="none",
        beta=0.0,
        gradient_checkpointing=False,
        logging_strategy="no",
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        **others,
    )


def _cache_settings(config: RunConfig, num_sequences: int) -> dict[str, Any]:
    """A KV cache for `num_sequences`; by default each step allocates all free memory, which takes seconds."""
    page_size = 16
    num_pages = -(-(config.rollouts.max_prompt_tokens + config.rollouts.max_tokens) // page_size) + 1
    return {
        "page_size": page_size,
        "num_blocks": num_sequences * num_pages,
        "max_batch_tokens": 512,
        "max_requests_per_batch": num_sequences,
        "allow_block_sharing": False,
    }


def train(task: PeerTask, settings: Any) -> None:
    """Train until the recorder ends the run."""
    config = task.config
    optimizer = make_adam(list(task.model.parameters()), config.learner)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda done: learning_rate(done + 1, config.learner, config.trainer.steps) / config.learner.peak_lr
    )
    num_prompts = config.trainer.steps * config.trainer.groups_per_step
    dataset = Dataset.from_list([{"prompt": task.prompt(i).text, "index": i} for i in range(num_prompts)])
    rewards = Rewards(task)
    reported = {name: getattr(settings, name) for name in _REPORTED}
    is_first = os.environ.get("RANK", "0") == "0"
    recorder = task.recorder("trl", {**reported, "processes": settings.world_size}) if is_first else None
    GRPOTrainer(
        model=task.model,
        reward_funcs=rewards,
        args=settings,
        train_dataset=dataset,
        processing_class=task.tokenizer,
        callbacks=[Record(recorder, task, rewards)],
        optimizers=(optimizer, schedule),
    ).train()


@exit_codes
def main() -> int:
    """Command line."""
    if "RANK" in os.environ:  # started by torch.distributed.run, which may be killed
        die_with_parent(os.getppid())
    configure_logging()
    for name in ("transformers", "ContinuousBatchingLogger"):
        logging.getLogger(name).setLevel(logging.ERROR)
    warnings.filterwarnings("ignore")
    parser = peer_parser((__doc__ or "").splitlines()[0])
    parser.add_argument("--rows", type=int, default=128, help="rollouts in one forward pass")
    parser.add_argument("--steps-per-generation", type=int, default=1, help="optimizer steps on one generation")
    parser.add_argument("--generation", choices=["continuous", "plain"], default="continuous", help="way of batching")
    arguments = parser.parse_args()
    task = open_task(arguments)
    settings = trainer_settings(
        task,
        rows=arguments.rows,
        steps_per_generation=arguments.steps_per_generation,
        continuous_batching=arguments.generation == "continuous",
    )
    train(task, settings)
    return 0


if __name__ == "__main__":
    sys.exit(main())
