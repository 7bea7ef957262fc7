"""Chunked log-probabilities against the plain computation."""

import pytest
import torch

from benchmarks.learner_memory import chunked, measure_way
from benchmarks.learner_memory import plain as plain_way
from pipelinerl_core.algo import logprobs as logprobs_module
from pipelinerl_core.algo.logprobs import token_logprobs

N, C, V = 13, 8, 21


def inputs(dtype=torch.float32):
    generator = torch.Generator().manual_seed(3)
    hidden = torch.randn(N, C, generator=generator).to(dtype).requires_grad_()
    head = torch.randn(V, C, generator=generator).to(dtype).requires_grad_()
    targets = torch.randint(0, V, (N,), generator=generator)
    weights = torch.randn(2, N, generator=generator)
    return hidden, head, targets, weights


def plain(hidden, head, targets, temperature):
    logprobs = torch.log_softmax(hidden.float() @ head.float().T / temperature, -1)
    return logprobs[torch.arange(len(targets)), targets], -(logprobs.exp() * logprobs).sum(-1)


def gradients(function, weights, hidden, head):
    logprobs, entropy = function()
    return torch.autograd.grad((weights[0] * logprobs + weights[1] * entropy).sum(), (hidden, head))


@pytest.mark.parametrize("chunk_tokens", [1, 4, N, 100, None])
def test_values_and_gradients_equal_the_plain_computation(chunk_tokens):
    hidden, head, targets, weights = inputs()

    def chunked():
        return token_logprobs(hidden, head, targets, temperature=0.7, chunk_tokens=chunk_tokens)

    for actual, wanted in zip(chunked(), plain(hidden, head, targets, 0.7), strict=True):
        torch.testing.assert_close(actual, wanted, rtol=1e-6, atol=1e-6)
    expected = gradients(lambda: plain(hidden, head, targets, 0.7), weights, hidden, head)
    for actual, wanted in zip(gradients(chunked, weights, hidden, head), expected, strict=True):
        torch.testing.assert_close(actual, wanted, rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize("block_words", [1, 4, 7, 20])
@pytest.mark.parametrize("chunk_tokens", [4, 100])
def test_blocks_of_the_vocabulary_change_rounding_only(block_words, chunk_tokens):
    hidden, head, targets, weights = inputs()

    def in_blocks():
        return token_logprobs(
            hidden, head, targets, temperature=0.7, chunk_tokens=chunk_tokens, block_words=block_words
        )

    for actual, wanted in zip(in_blocks(), plain(hidden, head, targets, 0.7), strict=True):
        torch.testing.assert_close(actual, wanted, rtol=1e-6, atol=1e-6)
    expected = gradients(lambda: plain(hidden, head, targets, 0.7), weights, hidden, head)
    for actual, wanted in zip(gradients(in_blocks, weights, hidden, head), expected, strict=True):
        torch.testing.assert_close(actual, wanted, rtol=1e-5, atol=2e-6)


def test_blocks_stand_logits_of_any_size():
    """Where exp() of the logits themselves would overflow, or vanish."""
    hidden, head, targets, _ = inputs()
    for scale, shift in ((300.0, 0.0), (1.0, 1000.0), (1.0, -1000.0)):
        far = torch.cat([scale * hidden, torch.full((N, 1), shift)], 1).detach().requires_grad_()
        with_shift = torch.cat([head, torch.ones(V, 1)], 1).detach()
        results = token_logprobs(far, with_shift, targets, temperature=1.0, block_words=4)
        for result, wanted in zip(results, plain(far, with_shift, targets, 1.0), strict=True):
            torch.testing.assert_close(result, wanted, rtol=1e-5, atol=2e-3)
        assert torch.isfinite(torch.autograd.grad(sum(result.sum() for result in results), far)[0]).all()


def test_a_float32_head_is_cut_by_tokens_as_when_runs_were_recorded(monkeypatch):
    hidden, head, targets, _ = inputs()
    wanted = token_logprobs(hidden, head, targets, temperature=0.7, chunk_tokens=5, block_words=V)
    monkeypatch.setattr(logprobs_module, "MAX_CHUNK_LOGITS", 5 * V)
    monkeypatch.setattr(logprobs_module, "MAX_BLOCK_WORDS", 4)
    results = token_logprobs(hidden, head, targets, temperature=0.7)
    assert all(torch.equal(a, b) for a, b in zip(results, wanted, strict=True))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_memory_does_not_grow_with_the_vocabulary(dtype):
    """Beyond inputs and outputs; the plain way holds [T, V] in float32 several times, 64 MiB each at V = 2^15."""
    num_tokens, hidden_size = 512, 16
    small, large = (
        measure_way(chunked, dtype, num_tokens, num_words, hidden_size)["extra_bytes"] for num_words in (2**13, 2**15)
    )
    assert large <= 1.05 * small + 2**20
    assert large < 4 * 4 * logprobs_module.MAX_CHUNK_LOGITS
    assert measure_way(plain_way, dtype, num_tokens, 2**15, hidden_size)["extra_bytes"] >= 2 * 4 * num_tokens * 2**15


def test_no_float32_copy_of_a_bfloat16_head_is_made():
    """Here one would take 64 MiB, and so would its gradient."""
    used = measure_way(chunked, "bfloat16", 16, 2**17, 128)["extra_bytes"]
    assert used < 16 * 2**20


@pytest.mark.parametrize("used", [0, 1])
@pytest.mark.parametrize("block_words", [None, 4])
def test_the_gradient_of_one_result_alone_is_exact(used, block_words):
    hidden, head, targets, weights = inputs()
    results = token_logprobs(hidden, head, targets, temperature=1.0, block_words=block_words)
    actual = torch.autograd.grad((weights[0] * results[used]).sum(), (hidden, head))
    wanted = torch.autograd.grad((weights[0] * plain(hidden, head, targets, 1.0)[used]).sum(), (hidden, head))
    for a, b in zip(actual, wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=2e-6)


def test_the_uniform_distribution_has_probability_one_over_v_and_entropy_log_v():
    logprobs, entropy = token_logprobs(torch.zeros(2, C), torch.ones(V, C), torch.tensor([0, 5]), temperature=1.0)
    log_v = torch.log(torch.tensor(float(V)))
    torch.testing.assert_close(logprobs, -log_v.expand(2))
    torch.testing.assert_close(entropy, log_v.expand(2))


@pytest.mark.parametrize("block_words", [None, 4])
def test_a_bfloat16_head_is_computed_in_float32(block_words):
    hidden, head, targets, _ = inputs(torch.bfloat16)
    logprobs, entropy = token_logprobs(hidden, head, targets, temperature=1.0, block_words=block_words)
    assert logprobs.dtype == entropy.dtype == torch.float32
    torch.testing.assert_close(logprobs, plain(hidden, head, targets, 1.0)[0], rtol=1e-6, atol=1e-6)
    logprobs.sum().backward()
    assert hidden.grad.dtype == head.grad.dtype == torch.bfloat16


@pytest.mark.parametrize("block_words", [None, 4])
def test_no_tokens_give_no_results_and_zero_gradients(block_words):
    hidden, head, *_ = inputs()
    none = torch.zeros(0, dtype=torch.int64)
    logprobs, _ = token_logprobs(hidden[:0], head, none, temperature=1.0, block_words=block_words)
    logprobs.sum().backward()
    assert len(logprobs) == 0
    assert head.grad.abs().sum() == 0


@pytest.mark.parametrize(
    ("hidden", "targets", "message"),
    [
        (torch.zeros(3, C + 1), torch.zeros(3, dtype=torch.int64), r"must be \[N, C\] and \[V, C\]"),
        (torch.zeros(3, C), torch.zeros(2, dtype=torch.int64), r"must be \[3\] torch.int64"),
        (torch.zeros(3, C), torch.zeros(3, dtype=torch.int32), "torch.int32 must be"),
    ],
)
def test_wrong_shapes_and_types_are_refused(hidden, targets, message):
    with pytest.raises(ValueError, match=message):
        token_logprobs(hidden, torch.zeros(V, C), targets, temperature=1.0)
