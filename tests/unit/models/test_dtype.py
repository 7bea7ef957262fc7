"""model.dtype=auto: which processors have units for bfloat16, and where the choice is stored."""

import pytest

from pipelinerl_core import host as processors
from pipelinerl_core.errors import ConfigError
from pipelinerl_core.models.resolve import build_config, override_config


@pytest.mark.parametrize(
    ("text", "has_units"),
    [
        ("processor : 0\nflags\t\t: fpu avx512f avx512_bf16 amx_tile\n", True),
        ("flags : fpu avx2 amx_bf16\n", True),
        ("Features\t: fp asimd bf16 i8mm\n", True),  # Arm
        ("flags : fpu avx2 avx512f\n", False),
        ("model name : bf16\n", False),
        ("", False),
    ],
)
def test_the_flags_of_a_cpu_show_whether_the_cpu_has_units(tmp_path, text, has_units):
    (tmp_path / "cpuinfo").write_text(text)
    assert processors.cpu_has_bfloat16(tmp_path / "cpuinfo") is has_units


def test_a_host_that_does_not_list_its_flags_counts_as_without_units(tmp_path):
    assert processors.cpu_has_bfloat16(tmp_path / "none") is False


def host(monkeypatch, *, cpu, gpu):
    monkeypatch.setattr(processors, "cpu_has_bfloat16", lambda: cpu)
    monkeypatch.setattr(processors, "gpu_capability", lambda: gpu)


@pytest.mark.parametrize(
    ("engine", "cpu", "gpu", "chosen"),
    [
        ("embedded", True, None, "bfloat16"),
        ("embedded", False, 9.0, "float32"),  # the embedded engine stays on the CPU
        ("vllm", False, 9.0, "bfloat16"),
        ("vllm", True, 7.5, "float32"),
        ("vllm", True, None, "bfloat16"),
    ],
)
def test_the_processor_that_computes_decides(monkeypatch, engine, cpu, gpu, chosen):
    host(monkeypatch, cpu=cpu, gpu=gpu)
    config = build_config({"model": {"dtype": "auto"}, "engine": {"kind": engine}})
    assert config.model.dtype == config.dtype == chosen


def test_a_stored_run_and_its_resume_keep_the_choice(monkeypatch):
    host(monkeypatch, cpu=True, gpu=None)
    stored = build_config({"model": {"dtype": "auto"}}).model_dump(mode="json")
    host(monkeypatch, cpu=False, gpu=None)
    assert override_config(build_config(stored), ["trainer.ranks=2"]).model.dtype == "bfloat16"


def test_rules_between_sections_apply_to_the_choice(monkeypatch):
    host(monkeypatch, cpu=False, gpu=None)
    values = {"model": {"dtype": "auto"}, "learner": {"attention": "varlen"}, "engine": {"kind": "vllm"}}
    with pytest.raises(ConfigError, match="flash attention, which does not support float32"):
        build_config(values)


def test_a_host_without_a_gpu_has_no_capability(monkeypatch):
    monkeypatch.setattr(processors.shutil, "which", lambda command: None)
    assert processors.gpu_capability() is None
