"""Log-probability and entropy of given tokens, from hidden states, in chunks of the vocabulary product.

The logits of all tokens, [N, V] in float32, are the largest tensor of a training step by far. Here they exist only
for one chunk at a time; the backward pass computes them again. There are two ways to cut:

* by tokens: [K, V] at a time. The head is used as a whole, so it has to be float32 or small.
* by tokens and vocabulary: [K, B] at a time, with a running log-sum-exp over the blocks of the vocabulary. Of a large
  bfloat16 head, and of its gradient, only a block is ever held in float32, and each block is converted once. On a GPU
  the head stays in bfloat16: `products` has the float32 result of bfloat16 operands.

Both compute the same but for rounding. A float32 head is cut by tokens, always in the same way: a recorded run is
replayed to the last bit.

Shapes: N = tokens, K = tokens of one chunk, C = hidden size, V = vocabulary, B = words of one block.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from pipelinerl_core.algo.products import add_product, operand_dtype, parts_of, product

# Logits held at once: 2^22 float32 values are 16 MiB, small beside activations and large enough for fast products.
MAX_CHUNK_LOGITS = 1 << 22
# Rows of a head that are held in float32 at once, where its own type is another: 14 MiB at a hidden size of 896.
MAX_BLOCK_WORDS = 1 << 12


def token_logprobs(
    hidden_NC: Tensor,
    head_VC: Tensor,
    targets_N: Tensor,
    *,
    temperature: float,
    chunk_tokens: int | None = None,
    block_words: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Log-probability of each target, and entropy of its distribution, softmax(head @ hidden / temperature).

    Args:
        hidden_NC: last hidden states, any floating type.
        head_VC: weight of the output layer, any floating type; the logits are float32 sums of exact products.
        targets_N: int64 token ids.
        temperature: divides the logits, as it did when the tokens were sampled.
        chunk_tokens: K; None takes what MAX_CHUNK_LOGITS allows. It changes memory, not results.
        block_words: B; None takes V for a float32 head and at most MAX_BLOCK_WORDS for others. It changes memory and
            the last bits of the results.

    Returns:
        logprobs_N and entropy_N, float32, both differentiable in hidden_NC and head_VC.

    Raises ValueError for shapes or types that do not fit.
    """
    _check(hidden_NC, head_VC, targets_N)
    num_words = head_VC.shape[0]
    if block_words is None:
        block_words = num_words if head_VC.dtype == torch.float32 else MAX_BLOCK_WORDS
    block_words = min(block_words, num_words)
    if chunk_tokens is None:
        chunk_tokens = max(1, MAX_CHUNK_LOGITS // block_words)
    is_whole = block_words == num_words and operand_dtype(hidden_NC, head_VC) == torch.float32
    function: Any = _TokenLogprobs if is_whole else _BlockLogprobs
    results: tuple[Tensor, Tensor] = function.apply(
        hidden_NC, head_VC, targets_N, temperature, chunk_tokens, block_words
    )
    return results


def _check(hidden_NC: Tensor, head_VC: Tensor, targets_N: Tensor) -> None:
    if hidden_NC.ndim != 2 or head_VC.ndim != 2 or hidden_NC.shape[1] != head_VC.shape[1]:
        raise ValueError(
            f"hidden states {tuple(hidden_NC.shape)} and head {tuple(head_VC.shape)} must be [N, C] and [V, C]"
        )
    if targets_N.shape != hidden_NC.shape[:1] or targets_N.dtype != torch.int64:
        raise ValueError(
            f"targets {tuple(targets_N.shape)} {targets_N.dtype} must be [{hidden_NC.shape[0]}] torch.int64"
        )


def _log_softmax(hidden_KC: Tensor, head_VC: Tensor, temperature: float) -> Tensor:
    logits_KV = hidden_KC.float() @ head_VC.T
    return torch.log_softmax(logits_KV.div_(temperature), dim=-1)


class _TokenLogprobs(torch.autograd.Function):
    """Cut by tokens. d logp_t / dz_v = [v = t] - p_v and dH / dz_v = -p_v (log p_v + H), z = logits / temperature."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden_NC: Tensor,
        head_VC: Tensor,
        targets_N: Tensor,
        temperature: float,
        chunk_tokens: int,
        block_words: int,
    ) -> tuple[Tensor, Tensor]:
        logprobs_N = torch.empty(len(targets_N), device=hidden_NC.device)
        entropy_N = torch.empty_like(logprobs_N)
        exact_VC = head_VC.float()
        for chunk in _slices(len(targets_N), chunk_tokens):
            logprobs_KV = _log_softmax(hidden_NC[chunk], exact_VC, temperature)
            logprobs_N[chunk] = logprobs_KV.gather(1, targets_N[chunk, None])[:, 0]
            entropy_N[chunk] = -(logprobs_KV.exp() * logprobs_KV).sum(-1)
            del logprobs_KV
        ctx.save_for_backward(hidden_NC, head_VC, targets_N, entropy_N)
        ctx.temperature, ctx.chunk_tokens = temperature, chunk_tokens
        ctx.set_materialize_grads(False)
        return logprobs_N, entropy_N

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, grad_logprobs_N: Tensor | None, grad_entropy_N: Tensor | None
    ) -> tuple[Tensor, Tensor | None, None, None, None, None]:
        hidden_NC, head_VC, targets_N, entropy_N = ctx.saved_tensors
        grad_hidden_NC = torch.empty_like(hidden_NC)
        # A frozen head, as with adapters, has no gradient, which would take as much memory as the head.
        grad_head_VC = torch.zeros_like(head_VC, dtype=torch.float32) if ctx.needs_input_grad[1] else None
        exact_VC = head_VC.float()
        for chunk in _slices(len(targets_N), ctx.chunk_tokens):
            logprobs_KV = _log_softmax(hidden_NC[chunk], exact_VC, ctx.temperature)
            probs_KV = logprobs_KV.exp()
            grad_KV = torch.zeros_like(probs_KV)
            if grad_logprobs_N is not None:
                grad_K = grad_logprobs_N[chunk]
                grad_KV.addcmul_(probs_KV, grad_K[:, None], value=-1.0)
                grad_KV.scatter_add_(1, targets_N[chunk, None], grad_K[:, None])
            if grad_entropy_N is not None:
                logprobs_KV.add_(entropy_N[chunk, None]).mul_(probs_KV)
                grad_KV.addcmul_(logprobs_KV, grad_entropy_N[chunk, None], value=-1.0)
            grad_KV.div_(ctx.temperature)
            grad_hidden_NC[chunk] = (grad_KV @ exact_VC).to(hidden_NC.dtype)
            if grad_head_VC is not None:
                grad_head_VC.addmm_(grad_KV.T, hidden_NC[chunk].float())
            del logprobs_KV, probs_KV, grad_KV  # not beside those of the next chunk
        grad_head_VC = None if grad_head_VC is None else grad_head_VC.to(head_VC.dtype)
        return grad_hidden_NC, grad_head_VC, None, None, None, None


class _BlockLogprobs(torch.autograd.Function):
    """Cut by tokens and vocabulary; the derivatives are those of _TokenLogprobs.

    Per token it keeps m = the largest z so far, s = sum exp(z - m) and t = sum exp(z - m) (z - m), so that in the
    end log-sum-exp = m + log s and entropy = log s - t / s, sums of small numbers whatever the size of z.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden_NC: Tensor,
        head_VC: Tensor,
        targets_N: Tensor,
        temperature: float,
        chunk_tokens: int,
        block_words: int,
    ) -> tuple[Tensor, Tensor]:
        dtype = operand_dtype(hidden_NC, head_VC)
        exact_NC = hidden_NC.to(dtype)
        targeted_N = torch.zeros(len(targets_N), device=hidden_NC.device)
        # The least finite number instead of -inf, for which the first rescaling would be inf * 0.
        largest_N = torch.full_like(targeted_N, torch.finfo(torch.float32).min)
        sum_N, moment_N = torch.zeros_like(targeted_N), torch.zeros_like(targeted_N)
        for block in _slices(len(head_VC), block_words):
            head_BC = head_VC[block].to(dtype)
            for chunk in _slices(len(targets_N), chunk_tokens):
                z_KB = product(exact_NC[chunk], head_BC.T).div_(temperature)
                place_KI, is_here_K = _place(targets_N[chunk], block)
                targeted_N[chunk] += z_KB.gather(1, place_KI)[:, 0].masked_fill(~is_here_K, 0.0)
                largest_K = torch.maximum(largest_N[chunk], z_KB.amax(-1))
                _rescale(sum_N[chunk], moment_N[chunk], largest_N[chunk] - largest_K)
                largest_N[chunk] = largest_K
                powers_KB = z_KB.sub_(largest_K[:, None]).exp()
                sum_N[chunk] += powers_KB.sum(-1)
                moment_N[chunk] += powers_KB.mul_(z_KB).sum(-1)
        log_sum_N = sum_N.log()
        entropy_N = log_sum_N - moment_N / sum_N
        ctx.save_for_backward(hidden_NC, head_VC, targets_N, largest_N + log_sum_N, entropy_N)
        ctx.temperature, ctx.chunk_tokens, ctx.block_words = temperature, chunk_tokens, block_words
        ctx.set_materialize_grads(False)
        return (targeted_N - largest_N) - log_sum_N, entropy_N

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, grad_logprobs_N: Tensor | None, grad_entropy_N: Tensor | None
    ) -> tuple[Tensor, Tensor | None, None, None, None, None]:
        hidden_NC, head_VC, targets_N, log_sum_exp_N, entropy_N = ctx.saved_tensors
        dtype = operand_dtype(hidden_NC, head_VC)
        exact_NC = hidden_NC.to(dtype)
        grad_hidden_NC = torch.zeros_like(exact_NC, dtype=torch.float32)
        grad_head_VC = torch.empty_like(head_VC) if ctx.needs_input_grad[1] else None
        for block in _slices(len(head_VC), ctx.block_words):
            head_BC = head_VC[block].to(dtype)
            grad_head_BC = torch.zeros_like(head_BC, dtype=torch.float32)
            for chunk in _slices(len(targets_N), ctx.chunk_tokens):
                z_KB = product(exact_NC[chunk], head_BC.T).div_(ctx.temperature)
                logprobs_KB = z_KB.sub_(log_sum_exp_N[chunk, None])
                grad_KB = logprobs_KB.exp()
                if grad_entropy_N is not None:
                    factor_KB = logprobs_KB.add_(entropy_N[chunk, None]).mul_(grad_entropy_N[chunk, None])
                    grad_KB.mul_(
                        factor_KB if grad_logprobs_N is None else factor_KB.add_(grad_logprobs_N[chunk, None])
                    )
                elif grad_logprobs_N is not None:
                    grad_KB.mul_(grad_logprobs_N[chunk, None])
                grad_KB.neg_()
                if grad_logprobs_N is not None:
                    place_KI, is_here_K = _place(targets_N[chunk], block)
                    grad_K = grad_logprobs_N[chunk].masked_fill(~is_here_K, 0.0)
                    grad_KB.scatter_add_(1, place_KI, grad_K[:, None])
                grad_KB.div_(ctx.temperature)
                for part_KB in parts_of(grad_KB, dtype):
                    add_product(grad_hidden_NC[chunk], part_KB, head_BC)
                    if grad_head_VC is not None:
                        add_product(grad_head_BC, part_KB.T, exact_NC[chunk])
            if grad_head_VC is not None:
                grad_head_VC[block] = grad_head_BC
        return grad_hidden_NC.to(hidden_NC.dtype), grad_head_VC, None, None, None, None


def _slices(length: int, size: int) -> Iterator[slice]:
    return (slice(start, min(start + size, length)) for start in range(0, length, size))


def _place(targets_K: Tensor, block: slice) -> tuple[Tensor, Tensor]:
    """[K, 1] column of each target in a block, and [K] whether it is in it; 0 where it is not."""
    is_here_K = (targets_K >= block.start) & (targets_K < block.stop)
    return (targets_K - block.start).masked_fill(~is_here_K, 0)[:, None], is_here_K


def _rescale(sum_K: Tensor, moment_K: Tensor, shift_K: Tensor) -> None:
    """From sums relative to the old largest value to sums relative to the new one, in place; shift = old - new."""
    moment_K.addcmul_(sum_K, shift_K).mul_(shift_K.exp())
    sum_K.mul_(shift_K.exp())
