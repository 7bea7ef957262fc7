"""Log-probability and entropy of given tokens, from hidden states, in chunks of the vocabulary product.

The logits of all tokens, [N, V] in float32, are the largest tensor of a training step by far. Here they exist only
for one chunk of tokens at a time; the backward pass computes them again.

Shapes: N = tokens, K = tokens of one chunk, C = hidden size, V = vocabulary.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

# Logits held at once: 2^22 float32 values are 16 MiB, small beside activations and large enough for fast products.
MAX_CHUNK_LOGITS = 1 << 22


def token_logprobs(
    hidden_NC: Tensor, head_VC: Tensor, targets_N: Tensor, *, temperature: float, chunk_tokens: int | None = None
) -> tuple[Tensor, Tensor]:
    """Log-probability of each target, and entropy of its distribution, softmax(head @ hidden / temperature).

    Args:
        hidden_NC: last hidden states, any floating type.
        head_VC: weight of the output layer, any floating type; the product is computed in float32.
        targets_N: int64 token ids.
        temperature: divides the logits, as it did when the tokens were sampled.
        chunk_tokens: K; None takes what MAX_CHUNK_LOGITS allows. It changes memory, not results.

    Returns:
        logprobs_N and entropy_N, float32, both differentiable in hidden_NC and head_VC.

    Raises ValueError for shapes or types that do not fit.
    """
    _check(hidden_NC, head_VC, targets_N)
    if chunk_tokens is None:
        chunk_tokens = max(1, MAX_CHUNK_LOGITS // head_VC.shape[0])
    results: tuple[Tensor, Tensor] = _TokenLogprobs.apply(  # type: ignore[no-untyped-call]
        hidden_NC, head_VC, targets_N, temperature, chunk_tokens
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
    logits_KV = hidden_KC.float() @ head_VC.float().T
    return torch.log_softmax(logits_KV.div_(temperature), dim=-1)


class _TokenLogprobs(torch.autograd.Function):
    """d logp_t / dz_v = [v = t] - p_v and dH / dz_v = -p_v (log p_v + H), with z = logits / temperature."""

    @staticmethod
    def forward(
        ctx: Any, hidden_NC: Tensor, head_VC: Tensor, targets_N: Tensor, temperature: float, chunk_tokens: int
    ) -> tuple[Tensor, Tensor]:
        logprobs_N = torch.empty(len(targets_N), device=hidden_NC.device)
        entropy_N = torch.empty_like(logprobs_N)
        for start in range(0, len(targets_N), chunk_tokens):
            chunk = slice(start, start + chunk_tokens)
            logprobs_KV = _log_softmax(hidden_NC[chunk], head_VC, temperature)
            logprobs_N[chunk] = logprobs_KV.gather(1, targets_N[chunk, None])[:, 0]
            entropy_N[chunk] = -(logprobs_KV.exp() * logprobs_KV).sum(-1)
        ctx.save_for_backward(hidden_NC, head_VC, targets_N, entropy_N)
        ctx.temperature, ctx.chunk_tokens = temperature, chunk_tokens
        ctx.set_materialize_grads(False)
        return logprobs_N, entropy_N

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, grad_logprobs_N: Tensor | None, grad_entropy_N: Tensor | None
    ) -> tuple[Tensor, Tensor, None, None, None]:
        hidden_NC, head_VC, targets_N, entropy_N = ctx.saved_tensors
        grad_hidden_NC = torch.empty_like(hidden_NC)
        grad_head_VC = torch.zeros_like(head_VC, dtype=torch.float32)
        for start in range(0, len(targets_N), ctx.chunk_tokens):
            chunk = slice(start, start + ctx.chunk_tokens)
            logprobs_KV = _log_softmax(hidden_NC[chunk], head_VC, ctx.temperature)
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
            grad_hidden_NC[chunk] = (grad_KV @ head_VC.float()).to(hidden_NC.dtype)
            grad_head_VC.addmm_(grad_KV.T, hidden_NC[chunk].float())
        return grad_hidden_NC, grad_head_VC.to(head_VC.dtype), None, None, None
