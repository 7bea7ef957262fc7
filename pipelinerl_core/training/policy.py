"""The model as a policy: log-probability and entropy of every sampled token of a pack, and its loss.

Shapes: N = sampled tokens of a pack.
"""

from typing import Any

import torch
from torch import Tensor

from pipelinerl_core.algo.logprobs import token_logprobs
from pipelinerl_core.algo.losses import LossSums, compute_loss, select
from pipelinerl_core.algo.packed import PackedBatch
from pipelinerl_core.config.losses import LossConfig
from pipelinerl_core.training.lora import trained_parameters
from pipelinerl_core.training.model import head_weight, hidden_states


class Policy(torch.nn.Module):
    """A causal language model that is asked for log-probabilities only.

    The head is used inside of this module's forward, not through a forward of its own: a backend that shards
    parameters must be told (`head`).
    """

    def __init__(self, model: Any, *, temperature: float) -> None:
        super().__init__()
        self.model = model
        self._temperature = temperature

    @property
    def head(self) -> Tensor:
        """[V, C] weight of the output layer."""
        return head_weight(self.model)

    def forward(self, batch: PackedBatch) -> tuple[Tensor, Tensor]:
        """trainer_logprobs_N and entropy_N, float32."""
        return token_logprobs(
            hidden_states(self.model, batch), self.head, batch.target_ids_N, temperature=self._temperature
        )

    def trained(self) -> dict[str, Tensor]:
        """What the optimizer changes, by the model's own names, tied ones once."""
        return trained_parameters(self.model)


def pack_loss(
    batch: PackedBatch,
    trainer_logprobs_N: Tensor,
    entropy_N: Tensor,
    config: LossConfig,
    *,
    version: int,
    ref_logprobs_N: Tensor | None = None,
) -> LossSums:
    """The loss of one pack, from what the policy, weights `version`, says of its tokens."""
    tokens = select(
        trainer_logprobs_N,
        batch.rollout_logprobs_N,
        batch.advantages_N,
        batch.loss_weights_N,
        batch.loss_mask_N,
        entropy_N=entropy_N,
        sequence_N=batch.sequence_N,
        num_sequences=batch.layout.num_sequences,
        lags_N=version - batch.versions_N,
        ref_logprobs_N=ref_logprobs_N,
    )
    return compute_loss(tokens, config)
