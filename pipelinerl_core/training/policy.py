"""The model as a policy: log-probability and entropy of every sampled token of a pack, and its loss.

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
from pipelinerl_core.training.model import head_weight, hidden_states

VALUE_HEAD = "value_head."
"""Beginning of the names of the value head's parameters; engines know nothing of it."""
# As in the reference implementation: small, so that values begin near 0.
_VALUE_STD = 1e-3


class PolicyOutput(NamedTuple):
    """What a policy says of the sampled tokens of a pack, float32."""

    trainer_logprobs_N: Tensor
    entropy_N: Tensor
    values_N: Tensor | None
    """Expected reward before the token is sampled, if there is a value head."""


class Policy(torch.nn.Module):
    """A causal language model that is asked for log-probabilities, and perhaps for values.

    The head is used inside of this module's forward, not through a forward of its own: a backend that shards
    parameters must be told (`head`).
    """

    def __init__(self, model: Any, *, temperature: float, value_seed: int | None = None) -> None:
        """`value_seed`: draw a value head of it, the same on every rank and at every start; None: there is none."""
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
        """What the optimizer changes, by the model's own names, tied ones once; and the value head."""
        found = trained_parameters(self.model)
        if self.value_head is not None:
            found |= {f"{VALUE_HEAD}{name}": parameter for name, parameter in self.value_head.named_parameters()}
        return found


def _value_head(model: Any, seed: int) -> torch.nn.Linear:
    with torch.random.fork_rng(devices=[]):  # torch's generator stays as it was
        head = torch.nn.Linear(head_weight(model).shape[1], 1)
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
) -> LossSums:
    """The loss of one pack, from what the policy, weights `version`, and a reference say of its tokens.

    With a value head the rows have rewards for advantages: A = R - V, without a gradient, and
    value_coefficient / 2 * sum(loss_weight * (V - R)^2) is added, which has one.
    """
    values_N = output.values_N
    advantages_N = batch.advantages_N if values_N is None else batch.advantages_N - values_N.detach()
    tokens = select(
        output.trainer_logprobs_N,
        batch.rollout_logprobs_N,
        advantages_N,
        batch.loss_weights_N,
        batch.trained_M,
        entropy_N=output.entropy_N,
        sequence_N=batch.sequence_N,
        num_sequences=batch.layout.num_sequences,
        lags_N=version - batch.versions_N,
        ref_logprobs_N=None if reference is None else _logprobs(reference, batch),
    )
    sums = compute_loss(tokens, config)
    if values_N is None:
        return sums
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
