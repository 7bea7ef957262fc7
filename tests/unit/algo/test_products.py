"""Products of bfloat16 operands with float32 results. The CPU has none: a product of converted operands stands in."""

import pytest
import torch

from pipelinerl_core.algo import products
from pipelinerl_core.algo.logprobs import token_logprobs

CPU = torch.device("cpu")
N, C, V = 40, 64, 300
# Rounding of one float32 sum. Tensor cores may truncate, which is at most twice as far off as rounding to nearest.
ULP = 2.0**-23


def converted(left, right):
    assert left.dtype == right.dtype == torch.bfloat16
    return left.float() @ right.float()


@pytest.fixture
def emulated(monkeypatch):
    """The path of a GPU, on the CPU."""
    monkeypatch.setattr(products, "has_mixed_product", lambda device: True)
    monkeypatch.setattr(products, "_mixed", converted)


@pytest.fixture
def probe():
    products.is_mixed_product_exact.cache_clear()
    yield products.is_mixed_product_exact
    products.is_mixed_product_exact.cache_clear()


def inputs(device=CPU):
    generator = torch.Generator().manual_seed(5)
    hidden = torch.randn(N, C, generator=generator).to(device, torch.bfloat16).requires_grad_()
    head = (0.3 * torch.randn(V, C, generator=generator)).to(device, torch.bfloat16).requires_grad_()
    targets = torch.randint(0, V, (N,), generator=generator).to(device)
    weights = torch.randn(2, N, generator=generator).to(device)
    return hidden, head, targets, weights


def in_float64(hidden, head, targets, weights, temperature):
    """Log-probabilities, entropies, and the gradients of hidden states and head."""
    hidden, head = (tensor.detach().double().requires_grad_() for tensor in (hidden, head))
    logprobs = torch.log_softmax(hidden @ head.T / temperature, -1)
    entropy = -(logprobs.exp() * logprobs).sum(-1)
    targeted = logprobs[torch.arange(len(targets)), targets]
    loss = (weights[0] * targeted + weights[1] * entropy).sum()
    return targeted.detach(), entropy.detach(), *torch.autograd.grad(loss, (hidden, head))


def check_logprobs(device, **cut):
    """Results and gradients of `token_logprobs` on a device against float64."""
    hidden, head, targets, weights = inputs(device)
    logprobs, entropy = token_logprobs(hidden, head, targets, temperature=0.7, **cut)
    gradients = torch.autograd.grad((weights[0] * logprobs + weights[1] * entropy).sum(), (hidden, head))
    exact_logprobs, exact_entropy, *exact = in_float64(hidden, head, targets, weights, 0.7)
    # A logit is a sum of C exact products, each addition off by at most ULP of the sum of magnitudes. The softmax
    # adds two such errors, and a sum of V terms in float32.
    magnitude = (hidden.double().abs() @ head.double().abs().T).amax() / 0.7
    bound = 2 * (C * magnitude + V) * ULP
    assert (logprobs - exact_logprobs).abs().max() < bound
    assert (entropy - exact_entropy).abs().max() < 20 * bound  # times |z - mean of z| of a distribution
    for gradient, wanted in zip(gradients, exact, strict=True):
        assert gradient.dtype == torch.bfloat16
        # 2^-8: the result is rounded to bfloat16; 2^-17 of each term by the division in two parts.
        assert ((gradient - wanted).abs() <= 2.0**-8 * wanted.abs() + 2.0**-15 * wanted.abs().max()).all()


@pytest.mark.parametrize("cut", [{}, {"block_words": 77, "chunk_tokens": 9}])
def test_log_probabilities_from_bfloat16_operands_are_those_of_float64(emulated, cut):
    check_logprobs(CPU, **cut)


def test_the_cpu_computes_as_when_runs_were_recorded(monkeypatch):
    def forbidden(left, right):
        raise AssertionError("no such product on a CPU")

    monkeypatch.setattr(products, "_mixed", forbidden)
    check_logprobs(CPU)
    check_logprobs(CPU, block_words=77)


def test_gradients_from_two_parts_are_those_of_a_float32_product(emulated):
    """Before the gradients are rounded: an element of the left side is off by 2^-17 at most, a sum by C * ULP."""
    generator = torch.Generator().manual_seed(6)
    left = torch.randn(N, C, generator=generator) * torch.logspace(-30, 3, C)
    right = torch.randn(C, V, generator=generator).bfloat16()
    total, only_high = torch.ones(N, V), torch.ones(N, V)
    parts = products.parts_of(left, torch.bfloat16)
    for part in parts:
        products.add_product(total, part, right)
    products.add_product(only_high, parts[0], right)
    exact = 1.0 + left.double() @ right.double()
    bound = (2.0**-17 + 2 * C * ULP) * (1.0 + left.double().abs() @ right.double().abs())
    assert ((total - exact).abs() <= bound).all()
    assert (only_high - exact).norm() > 100 * (total - exact).norm()


def test_float32_operands_are_multiplied_as_they_are(emulated):
    left, right, total = torch.randn(N, C), torch.randn(C, V), torch.ones(N, V)
    assert torch.equal(products.product(left, right), left @ right)
    (part,) = products.parts_of(left, torch.float32)
    products.add_product(total, part, right)
    assert torch.equal(total, torch.ones(N, V).addmm_(left, right))
    assert products.operand_dtype(left.bfloat16(), right) == torch.float32  # all of them must be bfloat16


def test_a_device_without_the_product_converts_its_operands(probe, monkeypatch, caplog):
    assert not probe(CPU)
    assert caplog.text.count("logits are computed from float32 operands") == 1
    probe(CPU)
    assert caplog.text.count("logits are computed from float32 operands") == 1
    monkeypatch.setattr(products, "_mixed", converted)
    assert not probe(CPU)  # it was asked once
    probe.cache_clear()
    assert probe(CPU)
    assert not products.has_mixed_product(CPU)


def test_a_product_whose_sums_are_rounded_to_bfloat16_is_not_taken(probe, monkeypatch):
    monkeypatch.setattr(products, "_mixed", lambda left, right: (left @ right).float())
    assert not probe(CPU)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@pytest.mark.parametrize("cut", [{}, {"block_words": 77, "chunk_tokens": 9}])
def test_a_gpu_has_the_product(cut):
    device = torch.device("cuda", 0)
    assert products.has_mixed_product(device)
    check_logprobs(device, **cut)
    hidden, head, *_ = inputs(device)
    actual = products.product(hidden.detach(), head.detach().T)
    exact = hidden.detach().double() @ head.detach().double().T
    magnitude = hidden.detach().double().abs() @ head.detach().double().abs().T
    assert ((actual - exact).abs() <= C * ULP * magnitude).all()
