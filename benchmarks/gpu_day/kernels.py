"""Kernels against plain computations on one device: products, log-probabilities with gradients, kinds of attention.

Run: python -m benchmarks.gpu_day.kernels

Attention: values and gradients of a small pack whose last sequence shares the prompt of another one, each kind
against padded attention. Log-probabilities: those of the learner against float64, with the gradients of hidden states
and head.
"""

import sys
from typing import Any

import torch
from torch import Tensor

from benchmarks.gpu_day.part import NO_CARD, device_name, emit, has_card
from pipelinerl_core.algo.logprobs import token_logprobs
from pipelinerl_core.algo.products import is_mixed_product_exact
from pipelinerl_core.training.attention_choice import Heads, missing_for, trial

HEADS = ((14, 2, 64), (12, 2, 128))
"""Heads of Qwen2.5-0.5B and 1.5B: queries, keys, size."""
TOKENS, HIDDEN, VOCABULARY = 256, 896, 8192
TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 2e-2}
"""Largest difference relative to the largest value."""


def main() -> int:
    """One row per check; the exit code is 1 if one fails."""
    device = torch.device(device_name())
    rows = [logprob_row(dtype, device) for dtype in TOLERANCE]
    rows += [
        attention_row(kind, heads, dtype, device)
        for kind in ("varlen", "flex")
        for heads in HEADS
        for dtype in TOLERANCE
    ]
    if has_card():
        exact = is_mixed_product_exact(device)
        rows.append(
            {
                "check": "bfloat16 product with float32 sums",
                "result": "equal" if exact else "missing",
                "difference": "-",
            }
        )
    problems = [f"{row['check']}: {row['result']}" for row in rows if row["result"] == "FAILS"]
    return emit(rows, problems=problems)


def attention_row(kind: str, heads: tuple[int, int, int], dtype: torch.dtype, device: torch.device) -> dict[str, Any]:
    """One kind of attention with shared prompts against padded attention, forward and backward."""
    shape = Heads(*heads, dtype, device)
    name = f"attention {kind}, {heads[0]} and {heads[1]} heads of {heads[2]}, {text_of(dtype)}"
    if device.type != "cuda":
        return {"check": name, "result": NO_CARD, "difference": "-"}
    missing = missing_for(kind, shape)
    if missing is not None:
        return {"check": name, "result": f"not run: {missing}", "difference": "-"}
    problem = trial(kind, shape)
    return {"check": name, "result": "FAILS" if problem else "equal", "difference": problem or "-"}


def logprob_row(dtype: torch.dtype, device: torch.device) -> dict[str, Any]:
    """Log-probabilities, entropies and gradients against float64."""
    generator = torch.Generator().manual_seed(5)
    hidden = torch.randn(TOKENS, HIDDEN, generator=generator).to(device, dtype)
    head = (HIDDEN**-0.5 * torch.randn(VOCABULARY, HIDDEN, generator=generator)).to(device, dtype)
    targets = torch.randint(0, VOCABULARY, (TOKENS,), generator=generator).to(device)
    leaves = [tensor.clone().requires_grad_() for tensor in (hidden, head)]
    actual = outcome(leaves, *token_logprobs(leaves[0], leaves[1], targets, temperature=0.7))
    exact = [tensor.double().requires_grad_() for tensor in (hidden, head)]
    logprobs_NV = torch.log_softmax(exact[0] @ exact[1].T / 0.7, -1)
    entropy_N = -(logprobs_NV.exp() * logprobs_NV).sum(-1)
    wanted = outcome(exact, logprobs_NV.gather(-1, targets[:, None])[:, 0], entropy_N)
    difference = max(
        ((result.double() - other).abs().max() / other.abs().max()).item()
        for result, other in zip(actual, wanted, strict=True)
    )
    return {
        "check": f"log-probabilities, entropies and gradients against float64, {text_of(dtype)}",
        "result": "equal" if difference <= TOLERANCE[dtype] else "FAILS",
        "difference": difference,
    }


def outcome(leaves: list[Tensor], logprobs_N: Tensor, entropy_N: Tensor) -> list[Tensor]:
    """The results, and the gradients of their sum."""
    gradients = torch.autograd.grad((logprobs_N + entropy_N).sum(), leaves)
    return [logprobs_N.detach(), entropy_N.detach(), *gradients]


def text_of(dtype: torch.dtype) -> str:
    """The name of a type as in a configuration."""
    return str(dtype).removeprefix("torch.")


if __name__ == "__main__":
    sys.exit(main())
