"""loss_weight: the one place where a loss is normalised, computed once for a whole optimizer step."""

from collections.abc import Sequence

from pipelinerl_core.config.losses import Normalization


def loss_weights(
    num_tokens: Sequence[Sequence[int]], *, normalization: Normalization, max_tokens: int
) -> list[list[float]]:
    """Weight of each token of each rollout, in the order of `num_tokens`.

    Args:
        num_tokens: sampled tokens of every trained rollout, by group, counted before the stale mask. Masking a stale
            token therefore removes its term and leaves the weight of every other token alone.
        normalization: `token` 1 / tokens of the step; `sequence` 1 / (rollouts * tokens of the rollout); `prompt`
            1 / (groups * tokens of the group); `constant` 1 / (rollouts * max_tokens).
        max_tokens: limit of a completion, used by `constant` only.

    A rollout without sampled tokens has weight 0: there is nothing that it could weigh.
    """
    num_groups = len(num_tokens)
    num_rollouts = sum(len(group) for group in num_tokens)
    step_tokens = sum(sum(group) for group in num_tokens)

    def weight(group: Sequence[int], own_tokens: int) -> float:
        if own_tokens == 0:
            return 0.0
        match normalization:
            case "token":
                return 1.0 / step_tokens
            case "sequence":
                return 1.0 / (num_rollouts * own_tokens)
            case "prompt":
                return 1.0 / (num_groups * sum(group))
            case "constant":
                return 1.0 / (num_rollouts * max_tokens)

    return [[weight(group, own_tokens) for own_tokens in group] for group in num_tokens]
