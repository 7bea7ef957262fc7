"""Chunked log-probabilities against the plain computation."""

import pytest
import torch

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

    for found, wanted in zip(chunked(), plain(hidden, head, targets, 0.7), strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-6, atol=1e-6)
    expected = gradients(lambda: plain(hidden, head, targets, 0.7), weights, hidden, head)
    for found, wanted in zip(gradients(chunked, weights, hidden, head), expected, strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize("used", [0, 1])
def test_the_gradient_of_one_result_alone_is_exact(used):
    hidden, head, targets, weights = inputs()
    found = torch.autograd.grad(
        (weights[0] * token_logprobs(hidden, head, targets, temperature=1.0)[used]).sum(), (hidden, head)
    )
    wanted = torch.autograd.grad((weights[0] * plain(hidden, head, targets, 1.0)[used]).sum(), (hidden, head))
    for a, b in zip(found, wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=2e-6)


def test_the_uniform_distribution_has_probability_one_over_v_and_entropy_log_v():
    logprobs, entropy = token_logprobs(torch.zeros(2, C), torch.ones(V, C), torch.tensor([0, 5]), temperature=1.0)
    log_v = torch.log(torch.tensor(float(V)))
    torch.testing.assert_close(logprobs, -log_v.expand(2))
    torch.testing.assert_close(entropy, log_v.expand(2))


def test_a_bfloat16_head_is_computed_in_float32():
    hidden, head, targets, _ = inputs(torch.bfloat16)
    logprobs, entropy = token_logprobs(hidden, head, targets, temperature=1.0)
    assert logprobs.dtype == entropy.dtype == torch.float32
    torch.testing.assert_close(logprobs, plain(hidden, head, targets, 1.0)[0], rtol=1e-6, atol=1e-6)
    logprobs.sum().backward()
    assert hidden.grad.dtype == head.grad.dtype == torch.bfloat16


def test_no_tokens_give_no_results_and_zero_gradients():
    hidden, head, *_ = inputs()
    logprobs, _ = token_logprobs(hidden[:0], head, torch.zeros(0, dtype=torch.int64), temperature=1.0)
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
