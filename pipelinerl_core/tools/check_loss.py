"""Check a loss and a function of advantages of the user with random tokens and rewards.

stdin: {"config": ..., "code": {key: text of its file or null}} (check_process.py).
"""

import random
import sys
from dataclasses import fields
from typing import Any

import torch

from pipelinerl_core.algo.losses.custom import custom
from pipelinerl_core.algo.losses.terms import TrainedTokens
from pipelinerl_core.algo.own import ScoredRollout, own_advantages
from pipelinerl_core.check_process import run_check
from pipelinerl_core.config.losses import CustomLoss, LossConfig
from pipelinerl_core.errors import ConfigError
from pipelinerl_core.models.resolve import build_config
from pipelinerl_core.sandbox.user_code import failure_line
from pipelinerl_core.training.own_functions import load_own_functions

NUM_TOKENS = 24
NUM_SEQUENCES = 3


def check(config: LossConfig, *, has_turns: bool = False) -> None:
    """Call the loaded functions. has_turns: rollouts are episodes of an environment. Raises ConfigError."""
    if isinstance(config, CustomLoss):
        _check_loss(config)
    if config.has_own_advantages:
        _check_advantages(config, has_turns)


def _check_loss(config: CustomLoss) -> None:
    subject = f"loss.function={config.function}"
    gradients = [_gradient(config, scale=1.0), _gradient(config, scale=1.0)]
    if not torch.equal(*gradients):
        raise ConfigError(
            f"{subject}: two calls with the same tokens have different gradients, so that no step could be replayed. "
            "Use no random numbers and no state"
        )
    try:
        _gradient(config, scale=1.0, num_tokens=0)
    except ConfigError as error:
        raise ConfigError(f"{error}; with no token, as in a pack whose tokens are all masked") from None
    if not gradients[0].any():
        raise ConfigError(f"{subject}: no gradient reaches the tokens. Compute the terms from trainer_logprobs_M")
    if config.skips_zero_advantage and _gradient(config, scale=0.0).any():
        raise ConfigError(f"{subject}: tokens of advantage 0 have a gradient. Set loss.skips_zero_advantage=false")


def _gradient(config: CustomLoss, *, scale: float, num_tokens: int = NUM_TOKENS) -> torch.Tensor:
    """[M] gradient of the loss by the log-probabilities of random tokens; scale: of the advantages."""
    subject = f"loss.function={config.function}"
    has_reference = config.kl_coefficient > 0
    tokens, given = (random_tokens(scale, num_tokens, has_reference=has_reference) for _ in range(2))
    gradient = None
    try:
        loss = custom(tokens, config).loss
        if loss.requires_grad:
            (gradient,) = torch.autograd.grad(loss, tokens.trainer_logprobs_M, allow_unused=True)
    except ConfigError:
        raise
    except Exception as error:  # noqa: BLE001 - any error of the user's terms
        raise ConfigError(f"{subject}: {failure_line(error)}") from None
    for field in fields(given):
        before, after = getattr(given, field.name), getattr(tokens, field.name)
        if isinstance(before, torch.Tensor) and not torch.equal(before, after):
            raise ConfigError(f"{subject}: changes {field.name}, which other terms read. Compute new tensors")
    if gradient is None:
        gradient = torch.zeros(num_tokens)
    if not loss.isfinite() or not gradient.isfinite().all():
        raise ConfigError(f"{subject}: loss or gradient of random tokens is not finite")
    return gradient


def random_tokens(scale: float = 1.0, num_tokens: int = NUM_TOKENS, *, has_reference: bool = False) -> TrainedTokens:
    """The same tokens of NUM_SEQUENCES sequences at each call; scale: of the advantages."""
    generator = torch.Generator().manual_seed(0)
    trainer_logprobs_M = -2 * torch.rand(num_tokens, generator=generator)
    reference_M = trainer_logprobs_M + 0.3 * torch.randn(num_tokens, generator=generator)
    return TrainedTokens(
        rollout_logprobs_M=trainer_logprobs_M + 0.3 * torch.randn(num_tokens, generator=generator),
        trainer_logprobs_M=trainer_logprobs_M.requires_grad_(),
        advantages_M=scale * torch.randn(num_tokens, generator=generator),
        loss_weights_M=torch.full((num_tokens,), 1 / NUM_TOKENS),
        entropy_M=torch.rand(num_tokens, generator=generator).requires_grad_(),
        ref_logprobs_M=reference_M if has_reference else None,
        sequence_M=torch.arange(num_tokens) * NUM_SEQUENCES // NUM_TOKENS,
        num_sequences=NUM_SEQUENCES,
        lags_M=torch.randint(0, 4, (num_tokens,), generator=generator),
    )


class _AnyComponents(dict[str, float]):
    """The trial does not know which components the reward has: each name has a value."""

    def __missing__(self, name: str) -> float:
        return 0.5


def _check_advantages(config: LossConfig, has_turns: bool) -> None:
    rng, num_turns = random.Random(0), 3 if has_turns else 1
    group = [
        ScoredRollout(
            reward=rng.random(), components=_AnyComponents(), num_turns=num_turns,
            turn_rewards=tuple(rng.random() for _ in range(num_turns)) if has_turns else (),
            num_tokens=rng.randint(1, 50), is_truncated=False,
        )
        for _ in range(4)
    ]  # fmt: skip
    if own_advantages(group, config) != own_advantages(group, config):
        raise ConfigError(
            f"loss.advantage_function={config.advantage_function}: two calls with the same group differ. Use no "
            "random numbers and no state"
        )


def _check(given: Any) -> list[str]:
    config = build_config(given["config"])
    load_own_functions(config.loss, given["code"])
    check(config.loss, has_turns=bool(config.environment.path))
    return []


if __name__ == "__main__":
    sys.exit(run_check(_check))
