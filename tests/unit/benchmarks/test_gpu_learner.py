"""Model-flop utilisation: the formula, and a tiny learner on the CPU."""

import pytest
from transformers import AttentionInterface

from benchmarks import gpu_attention, gpu_learner, report
from benchmarks.gpu_learner import measure_learner, model_flops, peak_tflops, table
from pipelinerl_core.training.attention import FLEX_ATTENTION, packed_attention
from pipelinerl_core.training.model import ModelDimensions, prepare_model

DIMENSIONS = ModelDimensions(
    num_parameters=1000, vocab_size=10, hidden_size=8, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=3,
)  # fmt: skip


def test_flops_are_six_per_weight_and_token_and_those_of_causal_attention():
    assert model_flops(DIMENSIONS, [5]) == 6 * 1000 * 5 + 6 * 2 * 12 * 25
    assert model_flops(DIMENSIONS, [5, 3]) == 6 * 1000 * 8 + 6 * 2 * 12 * (25 + 9)


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


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_tiny_learner_is_measured_on_the_cpu(monkeypatch, dtype):
    monkeypatch.setattr(gpu_learner, "ROUNDS", 1)
    row = measure_learner("tiny", device="cpu", dtype=dtype, pack_tokens=64)
    assert (row["num_tokens"], row["utilisation"], row["peak_bytes"]) == (256, None, None)  # 8 rollouts of 32 tokens
    assert row["tokens_per_second"] == pytest.approx(row["num_tokens"] / row["step_seconds"])
    assert row["model_tflops"] * 1e12 * row["step_seconds"] == pytest.approx(
        6 * row["num_parameters"] * 256 + 6 * 4 * 128 * 8 * 32**2
    )
    assert table([row])[-1].endswith("| - | - |")
    measured = {**row, "utilisation": 0.41, "peak_tflops": 989.0, "peak_bytes": 2**31}
    assert table([measured])[-1].endswith("| 41.0% of 989 | 2.0 |")


def test_the_kinds_of_attention_are_compared_with_padded(monkeypatch):
    monkeypatch.setattr(gpu_attention, "ROUNDS", 1)
    row = gpu_attention.measure_attention("tiny", "padded", device="cpu", dtype="float32", pack_tokens=64)
    assert row["tokens_per_second"] > 0
    assert (row["attention"], row["pack_tokens"], row["difference_max"]) == ("padded", 64, 0.0)
    assert gpu_attention.table([row])[2].startswith("| tiny | padded | 64 | 0.")


def test_the_differences_are_those_of_the_measured_kind(monkeypatch):
    def inexact(*arguments, **options):
        attended, weights = packed_attention(*arguments, **options)
        return 1.01 * attended, weights

    monkeypatch.setattr(gpu_attention, "ROUNDS", 1)
    monkeypatch.setattr(gpu_attention, "prepare_model", lambda model, kind: prepare_model(model, "padded"))
    monkeypatch.setitem(AttentionInterface._global_mapping, FLEX_ATTENTION, inexact)
    row = gpu_attention.measure_attention("tiny", "flex", device="cpu", dtype="float32", pack_tokens=64)
    assert 0 < row["difference_mean"] < row["difference_max"]


@pytest.mark.parametrize("kind", ["varlen", "flex"])
def test_a_kind_of_attention_that_cannot_be_used_says_why(kind):
    with pytest.raises(report.NotMeasured, match="needs a GPU"):
        gpu_attention.measure_attention("tiny", kind, device="cpu", dtype="float32", pack_tokens=64)
