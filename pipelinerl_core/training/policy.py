"""The model as a policy: log-probability and entropy of every sampled token of a pack, and the loss of a pack.

Shapes: N = sampled tokens of a pack.
"""

from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pipelinerl_core.algo.logprobs import token_logprobs
from pipelinerl_core.algo.losses import LossSums, compute_loss, select
from pipelinerl_core.algo.packed import PackedBatch
from pipelinerl_core.config.losses import LossConfig
from pipelinerl_core.training.lora import trained_parameters
from pipelinerl_core.training.model import head_weight, hidden_states, whole_shape

VALUE_HEAD = "value_head."
"""Prefix of the names of the value head's parameters. Engines have no value head."""
# Small, so that initial values are near 0; from ServiceNow's PipelineRL.
_VALUE_STD = 1e-3


class PolicyOutput(NamedTuple):
    """Outputs of a policy for the sampled tokens of a pack, float32."""

    trainer_logprobs_N: Tensor
    entropy_N: Tensor
    values_N: Tensor | None
    """Expected reward before the token is sampled; None without a value head."""


class Policy(torch.nn.Module):
    """A causal language model with an optional value head.

    `forward` uses the weight of the output layer directly, not through the forward of that layer. A backend that
    shards parameters must therefore gather `head` before `forward`.
    """

    def __init__(self, model: Any, *, temperature: float, value_seed: int | None = None) -> None:
        """`value_seed`: seed of the value head's initial weights, equal on all ranks; None: no value head."""
        super().__init__()
        self.model = model
        self._temperature = temperature
        self.value_head = None if value_seed is None else _value_head(model, value_seed)

    @property
    def head(self) -> Tensor:
        """[V, C] weight of the output layer."""
        return head_weight(self.model)

    def forward(self, batch: PackedBatch) -> PolicyOutput:
        """Log-probabilities, entropies and values of the sampled tokens."""
        hidden_NC = hidden_states(self.model, batch)
        logprobs_N, entropy_N = token_logprobs(
            hidden_NC, self.head, batch.target_ids_N, temperature=self._temperature
        )
        values_N = None
        if self.value_head is not None:
            values_N = self.value_head(hidden_NC.to(self.value_head.weight.dtype))[:, 0].float()
        return PolicyOutput(logprobs_N, entropy_N, values_N)

    def trained(self) -> dict[str, Tensor]:
        """Name -> trained parameter of the model (tied parameters once) and of the value head."""
        parameters = trained_parameters(self.model)
        if self.value_head is not None:
            parameters |= {f"{VALUE_HEAD}{name}": parameter for name, parameter in self.value_head.named_parameters()}
        return parameters


def _value_head(model: Any, seed: int) -> torch.nn.Linear:
    with torch.random.fork_rng(devices=[]):  # torch's generator stays as it was
        head = torch.nn.Linear(whole_shape(head_weight(model))[1], 1)
        torch.nn.init.normal_(head.weight, std=_VALUE_STD, generator=torch.Generator().manual_seed(seed))
    torch.nn.init.zeros_(head.bias)
    return head.to(device=model.device, dtype=model.dtype)


def pack_loss(
    batch: PackedBatch,
    output: PolicyOutput,
    config: LossConfig,
    *,
    version: int,
    reference: Policy | None = None,
    teacher: Policy | None = None,
) -> LossSums:
    """The loss of one pack from the output of the policy (weights `version`) and, if given, of a reference policy.

    With a teacher, the advantage of each token has its term (docs/algorithms.md), without a gradient. With a value
    head the rows contain rewards R instead of advantages: the advantage is R - V without a gradient, and
    value_coefficient / 2 * sum(loss_weight * (V - R)^2) is added to the loss with a gradient.
    """
    values_N = output.values_N
    advantages_N = batch.advantages_N if values_N is None else batch.advantages_N - values_N.detach()
    kl_teacher = None
    if teacher is not None:
        gaps_N = output.trainer_logprobs_N.detach() - _logprobs(teacher, batch)
        advantages_N = config.reward_coefficient * advantages_N - config.teacher_coefficient * gaps_N
        kl_teacher = gaps_N.index_select(0, batch.trained_M).sum()
    tokens = select(
        output.trainer_logprobs_N,
        batch.rollout_logprobs_N,
        advantages_N,
        batch.loss_weights_N,
        batch.trained_M,
        entropy_N=output.entropy_N,
        sequence_N=batch.sequence_N,
        num_sequences=batch.num_sequences,
        lags_N=version - batch.versions_N,
        ref_logprobs_N=None if reference is None else _logprobs(reference, batch),
    )
    sums = replace(compute_loss(tokens, config), kl_teacher=kl_teacher)
    if values_N is None:
        return sums
    if config.sequence_ratio_max:
        tokens = tokens.without_far_sequences(config.sequence_ratio_max)
    rewards_M = batch.advantages_N.index_select(0, batch.trained_M)
    squares_M = (values_N.index_select(0, batch.trained_M) - rewards_M).square()
    error = (tokens.loss_weights_M * squares_M).sum()
    return replace(
        sums, loss=sums.loss + 0.5 * config.value_coefficient * error, value_error=squares_M.detach().sum()
    )


@torch.no_grad()
def _logprobs(policy: Policy, batch: PackedBatch) -> Tensor:
    logprobs_N: Tensor = policy(batch)[0]
    return logprobs_N
