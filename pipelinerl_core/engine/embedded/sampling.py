"""Drawing tokens: noise by a counter-based hash, inverse transform sampling, exact log-probabilities.

The uniform number of a token depends only on the seed of the sampler and the token's position in the completion, not
on the slot, the batch, or earlier draws. So another engine that continues a completion draws the same numbers.

The hash is SplitMix64 (Steele, Lea, Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014): the state
of a sequence is mix(seed), output i is mix(state + (i + 1) * golden gamma), all modulo 2^64.

Shape suffixes: R rows (one per decoded slot), V vocabulary, W blocks of the vocabulary, B tokens of a block, I = 1.
"""

import math

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

_GAMMA = np.uint64(0x9E3779B97F4A7C15)  # 2^64 / golden ratio, odd
_MULTIPLIER_1 = np.uint64(0xBF58476D1CE4E5B9)
_MULTIPLIER_2 = np.uint64(0x94D049BB133111EB)
_MASK_64 = (1 << 64) - 1


def noise_key(seed: int) -> np.uint64:
    """The hash state of one sequence; the seed is any Python int, modulo 2^64."""
    return np.uint64(_mix(np.array([seed & _MASK_64], np.uint64))[0])


def uniforms(keys: NDArray[np.uint64], positions: NDArray[np.int64]) -> NDArray[np.float64]:
    """Uniform numbers in [0, 1), multiples of 2^-52, one per (key, position in the completion)."""
    counters = (positions + 1).astype(np.uint64) * _GAMMA
    return (_mix(keys + counters) >> np.uint64(12)).astype(np.float64) * 2.0**-52


def _mix(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """SplitMix64's finaliser: a bijection of 64-bit words; each input bit flips about half of the output bits."""
    x = (x ^ (x >> np.uint64(30))) * _MULTIPLIER_1
    x = (x ^ (x >> np.uint64(27))) * _MULTIPLIER_2
    return x ^ (x >> np.uint64(31))


def sample(
    logits_RV: Tensor,
    temperature_R: NDArray[np.float32],
    top_p_R: NDArray[np.float32] | None,
    uniform_R: NDArray[np.float64],
) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
    """`draw` with arrays; a row of temperature 0 gets its most likely token, with log-probability 0."""
    device = logits_RV.device
    is_greedy_R = temperature_R == 0
    drawn = draw(
        logits_RV,
        torch.from_numpy(np.where(is_greedy_R, np.float32(1), temperature_R)).to(device),
        None if top_p_R is None else torch.from_numpy(top_p_R).to(device),
        torch.from_numpy(uniform_R).to(device),
    )
    token_ids_R, logprobs_R = (tensor.cpu().numpy() for tensor in drawn)
    if is_greedy_R.any():
        token_ids_R = np.where(is_greedy_R, logits_RV.argmax(dim=-1).cpu().numpy(), token_ids_R)
        logprobs_R = np.where(is_greedy_R & np.isfinite(logprobs_R), np.float32(0), logprobs_R)
    return token_ids_R, logprobs_R


def draw(
    logits_RV: Tensor, temperature_R: Tensor, top_p_R: Tensor | None, uniform_R: Tensor
) -> tuple[Tensor, Tensor]:
    """Draw one token per row: its id [R], and its log-probability [R] under the distribution it was drawn from.

    The distribution is softmax(logits / temperature), truncated to the nucleus and renormalised where top_p < 1
    (None: top_p is 1 everywhere). The drawn token is the first whose cumulative probability exceeds uniform * total,
    searched in two levels: the block of the vocabulary, then the token in the block. The probability of a block is a
    float32 sum, exact to about 1e-7; the cumulative sums are in float64, because a float32 sum stops growing in the
    tail of a large vocabulary. Because of "exceeds" and shares below 1 a token of probability zero is never drawn.
    """
    logprobs_RV = torch.log_softmax(logits_RV / temperature_R[:, None], dim=-1)
    if top_p_R is not None:
        logprobs_RV = _nucleus(logprobs_RV, top_p_R)
    num_rows, num_tokens = logits_RV.shape
    size = _block_size(num_tokens)
    probs_RWB = logprobs_RV.exp().view(num_rows, num_tokens // size, size)
    mass_RW = probs_RWB.sum(-1).double()
    end_RW = mass_RW.cumsum(-1)
    threshold_RI = uniform_R[:, None] * end_RW[:, -1:]
    block_RI = _first_above(end_RW, threshold_RI)
    rest_RI = threshold_RI - (end_RW - mass_RW).gather(1, block_RI)
    share_RI = (rest_RI / mass_RW.gather(1, block_RI)).clamp_(0.0, 1.0 - 2.0**-53)
    inner_RB = probs_RWB[torch.arange(num_rows, device=logits_RV.device), block_RI[:, 0]].double().cumsum(-1)
    token_ids_RI = block_RI * size + _first_above(inner_RB, share_RI * inner_RB[:, -1:])
    return token_ids_RI[:, 0], logprobs_RV.gather(1, token_ids_RI)[:, 0]


def _block_size(num_tokens: int) -> int:
    """Tokens of a block: a divisor of the vocabulary; all tokens if no divisor from 64 to 512 is a power of two."""
    divisor = math.gcd(num_tokens, 512)
    return divisor if divisor >= 64 else num_tokens


def _first_above(sums_RX: Tensor, threshold_RI: Tensor) -> Tensor:
    """[R, I] index of the first sum above the threshold."""
    # The clamp matters only for rows of NaN, which the engine detects by the log-probability.
    return torch.searchsorted(sums_RX, threshold_RI, right=True).clamp_(max=sums_RX.shape[1] - 1)


def _nucleus(logprobs_RV: Tensor, top_p_R: Tensor) -> Tensor:
    """Keep the fewest most likely tokens whose sum reaches top_p, renormalised. Rows with top_p 1 keep their bits.

    Holtzman et al., "The curious case of neural text degeneration", ICLR 2020.
    """
    sorted_RV, order_RV = logprobs_RV.sort(dim=-1, descending=True, stable=True)
    probs_RV = sorted_RV.exp().double()
    is_dropped_RV = probs_RV.cumsum(-1) - probs_RV >= top_p_R[:, None]
    is_dropped_RV[:, 0] = False
    kept_RV = logprobs_RV.masked_fill(is_dropped_RV.scatter(1, order_RV, is_dropped_RV), float("-inf"))
    return torch.where(top_p_R[:, None] < 1, torch.log_softmax(kept_RV, dim=-1), logprobs_RV)
