"""Why the trainer's log-probability of a token is not the one recorded when it was sampled.

Three causes are told apart by the version that sampled the token, and those before it in the same rollout:

    mismatch     sampled by the weights being trained, like all tokens before it: engine and trainer run other code
    stale_kv     sampled by the weights being trained, after tokens of older ones: with engine.kv=keep the keys and
                 values of those were computed by the older weights; mismatch is in it too
    staleness    sampled by older weights: the policy has moved since; the other two are in it too

Shapes: N = sampled tokens of a pack, M = those of them that are trained, S = its sequences.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

CAUSES = ("mismatch", "stale_kv", "staleness")
NUM_DIFFERENCE_SUMS = 3 * len(CAUSES)


def difference_sums(
    log_ratios_N: Tensor, lags_N: Tensor, sequence_N: Tensor, trained_M: Tensor, *, num_sequences: int
) -> Tensor:
    """[NUM_DIFFERENCE_SUMS] for each of CAUSES sum |d|, sum -d and tokens, one after the other, of the trained tokens
    of a pack; float64, without a gradient.

    Args:
        log_ratios_N: d = trainer_logprob - rollout_logprob, not clamped.
        lags_N: int64, steps from the weights that sampled a token to those being trained. No trained token is
            newer than the weights being trained (batching/assemble.py).
        sequence_N: int64, the sequence of each token. No sequence is in two packs.
        trained_M: int64, places of the trained tokens. The others are in no sum, but their age counts for those
            after them.
        num_sequences: S.
    """
    oldest_S = lags_N.new_zeros(num_sequences).scatter_reduce(0, sequence_N, lags_N, "amax")
    cause_N = (oldest_S[sequence_N] > 0).long().masked_fill(lags_N > 0, 2)
    # Selected, not multiplied by 0: the value at a masked token may be a nan.
    differences_M = log_ratios_N.detach().index_select(0, trained_M).double()
    columns = torch.stack([differences_M.abs(), -differences_M, torch.ones_like(differences_M)], dim=1)
    sums = columns.new_zeros(len(CAUSES), 3).index_add_(0, cause_N.index_select(0, trained_M), columns)
    return sums.flatten()


def difference_metrics(sums: Sequence[float]) -> dict[str, float]:
    """The metrics <cause>/abs, mean of |d|, and <cause>/kl, mean of -d, from sums over all packs and ranks.

    A cause without a token is left out.
    """
    metrics: dict[str, float] = {}
    for place, cause in enumerate(CAUSES):
        total_abs, total_kl, num_tokens = sums[3 * place : 3 * place + 3]
        if num_tokens:
            metrics |= {f"{cause}/abs": total_abs / num_tokens, f"{cause}/kl": total_kl / num_tokens}
    return metrics
