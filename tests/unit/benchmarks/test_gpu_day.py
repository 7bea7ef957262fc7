"""The GPU day's formula of flops, and its kinds of attention with a tiny learner on the CPU."""

import pytest
from transformers import AttentionInterface

from benchmarks.gpu_day import attention
from benchmarks.gpu_day.steps import model_flops, peak_tflops
from pipelinerl_core.training.attention import ATTENTION_FUNCTIONS, FLEX_ATTENTION, PACKED_ATTENTION
from pipelinerl_core.training.model import prepare_model

DIMENSIONS = {"num_parameters": 1000, "num_layers": 2, "width": 12}


def test_flops_are_six_per_weight_and_token_and_those_of_causal_attention():
    assert model_flops(**DIMENSIONS, lengths=[5]) == 6 * 1000 * 5 + 6 * 2 * 12 * 25
    assert model_flops(**DIMENSIONS, lengths=[5, 3]) == 6 * 1000 * 8 + 6 * 2 * 12 * (25 + 9)


@pytest.mark.parametrize(
    ("name", "peak"),
    [
        ("NVIDIA H200", 989.0),
        ("NVIDIA H100 80GB HBM3", 989.0),
        ("NVIDIA H100 PCIe", 756.0),
        ("NVIDIA A100-SXM4-80GB", 312.0),
        ("Some other", None),
    ],
)
def test_the_peak_is_that_of_the_device(name, peak):
    assert peak_tflops(name) == peak


def measured(kind):
    return attention.measure("tiny", kind, device="cpu", dtype="float32", pack_tokens=64)


def test_the_kinds_of_attention_are_compared_with_padded(monkeypatch):
    monkeypatch.setattr(attention, "ROUNDS", 1)
    row = measured("padded")
    assert row["tokens/s"] > 0
    assert (row["attention"], row["tokens of a pack"], row["max"], row["result"]) == ("padded", 64, 0.0, "measured")
    assert attention.problems_of([row], 1e-3) == []


def test_the_differences_are_those_of_the_measured_kind(monkeypatch):
    def inexact(*arguments, **options):
        attended, weights = ATTENTION_FUNCTIONS[PACKED_ATTENTION](*arguments, **options)
        return 1.01 * attended, weights

    monkeypatch.setattr(attention, "ROUNDS", 1)
    monkeypatch.setattr(attention, "prepare_model", lambda model, kind: prepare_model(model, "padded"))
    monkeypatch.setitem(AttentionInterface._global_mapping, FLEX_ATTENTION, inexact)
    row = measured("flex")
    assert 0 < row["log-probabilities off padded: mean"] < row["max"]
    (problem,) = attention.problems_of([row], 1e-9)
    assert problem.startswith("attention flex: ")
    assert attention.problems_of([{**row, "log-probabilities off padded: mean": float("nan")}], 1.0)


@pytest.mark.parametrize("kind", ["varlen", "flex"])
def test_a_kind_of_attention_that_cannot_be_used_says_why(kind):
    row = measured(kind)
    assert row["result"].startswith("not run: ")
    assert "needs a GPU" in row["result"]
    assert attention.problems_of([row], 1e-3) == []
