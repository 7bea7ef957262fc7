"""Memory of the log-probability step: in chunks, as the learner, and as log_softmax over the logits of all tokens.

Part of `bench learner` (--memory). A measurement is one forward and one backward pass. The figure is the peak of the
allocator of torch without inputs and outputs (log-probabilities and both gradients). The plain way is that of
transformers: logits in the model's type, converted to float32, log_softmax, gather. The learner computes entropy too.

Shapes: T = tokens, V = vocabulary, C = hidden size.
"""

import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from benchmarks import report
from pipelinerl_core.algo.logprobs import token_logprobs

Logprobs = Callable[[Tensor, Tensor, Tensor], Tensor]

NUM_WORDS = 151_936
HIDDEN_SIZE = 896
"""The head of Qwen2.5-0.5B."""
DTYPES = ("float32", "bfloat16")


def chunked(hidden_TC: Tensor, head_VC: Tensor, targets_T: Tensor) -> Tensor:
    """As the learner: `token_logprobs`."""
    return token_logprobs(hidden_TC, head_VC, targets_T, temperature=1.0)[0]


def plain(hidden_TC: Tensor, head_VC: Tensor, targets_T: Tensor) -> Tensor:
    """log_softmax over the logits of all tokens at once."""
    logprobs_TV = torch.log_softmax((hidden_TC @ head_VC.T).float(), -1)
    return logprobs_TV.gather(-1, targets_T[:, None])[:, 0]


CONTESTANTS: dict[str, Logprobs] = {"chunked": chunked, "plain": plain}


def measure(num_tokens: int, num_words: int = NUM_WORDS, hidden_size: int = HIDDEN_SIZE) -> list[dict[str, Any]]:
    """A row for each type and way: extra_bytes, output_bytes (equal for both ways) and seconds."""
    return [
        {"dtype": dtype, "way": way, **measure_way(function, dtype, num_tokens, num_words, hidden_size)}
        for dtype in DTYPES
        for way, function in CONTESTANTS.items()
    ]


def measure_way(function: Logprobs, dtype: str, num_tokens: int, num_words: int, hidden_size: int) -> dict[str, Any]:
    """One forward and backward pass of one way, after a forward pass over one token that warms up."""
    kind: torch.dtype = getattr(torch, dtype)
    generator = torch.Generator().manual_seed(0)
    hidden_TC = torch.randn(num_tokens, hidden_size, generator=generator).to(kind).requires_grad_()
    head_VC = torch.randn(num_words, hidden_size, generator=generator).mul_(hidden_size**-0.5).to(kind)
    targets_T = torch.randint(0, num_words, (num_tokens,), generator=generator)
    head_VC.requires_grad_()

    def both_ways() -> tuple[Tensor, ...]:
        logprobs_T = function(hidden_TC, head_VC, targets_T)
        return logprobs_T.detach(), *torch.autograd.grad(logprobs_T.sum(), (hidden_TC, head_VC))

    function(hidden_TC[:1], head_VC[:64], targets_T[:1] % 64)
    started = time.perf_counter()
    peak_bytes, outputs = peak_of(both_ways)
    seconds = time.perf_counter() - started
    output_bytes = sum(tensor.nbytes for tensor in outputs)
    return {"extra_bytes": peak_bytes - output_bytes, "output_bytes": output_bytes, "seconds": round(seconds, 1)}


def peak_of(function: Callable[[], tuple[Tensor, ...]]) -> tuple[int, tuple[Tensor, ...]]:
    """Peak bytes of tensors during a call, beyond the bytes before the call, and the result of the call."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        result = function()
    tracer: Any = profiled.profiler
    changes = [event for event in tracer.kineto_results.events() if event.name() == "[memory]"]
    held = peak = 0
    for change in sorted(changes, key=lambda event: event.start_ns()):
        held += change.nbytes()
        peak = max(peak, held)
    return peak, result


def table(rows: list[dict[str, Any]], num_tokens: int) -> list[str]:
    """The rows as lines of Markdown."""
    title = (
        f"Log-probabilities of {num_tokens:,} tokens, vocabulary {NUM_WORDS:,}, hidden size {HIDDEN_SIZE}, forward "
        "and backward: peak beyond inputs and outputs"
    )
    header = ("type", "ours", "log_softmax(logits)", "ratio", "seconds, ours", "log_softmax")
    cells = []
    by_way = {(row["dtype"], row["way"]): row for row in rows}
    for dtype in DTYPES:
        ours, peer = by_way[dtype, "chunked"], by_way[dtype, "plain"]
        ratio = f"{peer['extra_bytes'] / ours['extra_bytes']:.0f}"
        cells.append((dtype, _mib(ours), _mib(peer), ratio, f"{ours['seconds']:.0f}", f"{peer['seconds']:.0f}"))
    return [title, "", *report.markdown(header, cells)]


def _mib(row: dict[str, Any]) -> str:
    return f"{row['extra_bytes'] / 2**20:,.0f} MiB"
