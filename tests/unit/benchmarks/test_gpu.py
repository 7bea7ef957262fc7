"""`bench gpu`: what a part that cannot run costs the other parts, and what the result file says."""

import gc
import sys

import pytest
import torch
from transformers import Qwen2ForCausalLM

from benchmarks import gpu, report
from pipelinerl_core.engine.embedded.decoder import SlotDecoder
from pipelinerl_core.engine.embedded.engine import EmbeddedEngine
from pipelinerl_core.errors import EngineError
from pipelinerl_core.training.attention_choice import ATTENTION_NAMES
from pipelinerl_core.training.learner import TorchLearner


def row_of():
    return {
        "size": "tiny", "attention": "flex", "pack_tokens": 64, "step_seconds": 0.5, "peak_bytes": None,
        "tokens_per_second": 1000.0, "difference_mean": 0.0, "difference_max": 0.0,
    }  # fmt: skip


def raising(error):
    def measure():
        raise error

    return measure


def run(tmp_path, *measures, size="8,192 tokens per pack", options="--learner-tokens"):
    """Run parts; returns the exit code, the parts and the number of rows of the result, and the file."""
    result = {
        "date": "2000-01-01", "device": "none", "memory": "", "torch": "", "transformers": "", "dtype": "float32",
        "learner_tokens": 8192,
    }  # fmt: skip
    parts = [
        gpu.Part(table="attention", name=f"part {index}", size=size, options=options, measure=measure)
        for index, measure in enumerate(measures)
    ]
    out = tmp_path / "results.md"
    code = gpu.run(parts, result, out)
    statuses = [(part["status"], part["result"]) for part in result["parts"]]
    return code, statuses, len(result["attention"]), out.read_text() if out.exists() else None


OUT_OF_MEMORY = "out of memory at 8,192 tokens per pack: lower --learner-tokens"


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB.\nMore."), OUT_OF_MEMORY),
        (torch.OutOfMemoryError(), OUT_OF_MEMORY),
        (EngineError("the engine failed: OutOfMemoryError: CUDA out of memory."), OUT_OF_MEMORY),
        (report.NotMeasured("needs a GPU"), "needs a GPU"),
        (
            ModuleNotFoundError("No module named 'absent'", name="absent.part"),
            "the package absent is not installed. pip install absent",
        ),
    ],
)
def test_a_part_that_cannot_run_says_why_and_the_next_part_runs(tmp_path, capsys, error, reason):
    code, parts, num_rows, text = run(tmp_path, raising(error), row_of)
    assert code == 0
    assert parts[0] == ("not measured", reason)
    assert parts[1][0] == "measured"
    assert num_rows == 1
    assert f"| part 0 | not measured | {reason} |" in text
    assert f"[1/2] part 0\n    not measured: {reason}\n[2/2] part 1\n    measured: 1,000 tokens/s" in (
        capsys.readouterr().err
    )


@pytest.mark.parametrize(
    ("owner", "method", "index", "options"),
    [
        (EmbeddedEngine, "_step", 0, "4 slots and 32 tokens per completion: lower --slots or --max-tokens"),
        (SlotDecoder, "load", 0, "4 slots and 32 tokens per completion: lower --slots or --max-tokens"),
        (TorchLearner, "step", 2, "128 tokens per pack: lower --learner-tokens"),
        (TorchLearner, "step", 3, "128 tokens per pack: lower --learner-tokens"),
    ],
)
def test_real_parts_that_run_out_of_memory_free_their_memory(monkeypatch, tmp_path, owner, method, index, options):
    def run_out(*arguments, **options):
        raise torch.OutOfMemoryError("CUDA out of memory.")

    def num_models():
        return sum(issubclass(type(instance), Qwen2ForCausalLM) for instance in gc.get_objects())

    monkeypatch.setattr(owner, method, run_out)
    part = gpu.parts_of(gpu.parse(["--device", "cpu", "--dtype", "float32"]))[index]
    before = num_models()
    _, parts, _, _ = run(tmp_path, part.measure, size=part.size, options=part.options)
    assert parts == [("not measured", f"out of memory at {options}")]
    assert num_models() == before


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (RuntimeError("first line | of two\nsecond line"), "RuntimeError: first line | of two"),
        (ValueError(), "ValueError: no reason given"),
        # torch is installed, but is another version.
        (
            ModuleNotFoundError("No module named 'torch.new'", name="torch.new"),
            "ModuleNotFoundError: No module named",
        ),
    ],
)
def test_an_unexpected_error_is_one_line_and_the_exit_code_says_so(tmp_path, capsys, error, line):
    code, parts, num_rows, text = run(tmp_path, raising(error), row_of)
    assert code == gpu.EXIT_FAILURE
    assert parts[0][0] == "failed"
    assert parts[0][1].startswith(line)
    assert num_rows == 1
    assert f"| part 0 | failed | {line.replace('|', '/')}" in text
    assert "Traceback" in capsys.readouterr().err


def test_the_file_is_written_after_each_part(tmp_path):
    seen = []

    def read_before():
        seen.append((tmp_path / "results.md").read_text())
        return row_of()

    code, _, _, text = run(tmp_path, row_of, read_before)
    assert code == 0
    assert "| part 0 | measured |" in seen[0]
    assert "| part 1 | not measured | the benchmark ended earlier |" in seen[0]
    assert "| part 1 | measured |" in text
    assert "packs of 8,192 tokens" in text
    assert [file.name for file in tmp_path.iterdir()] == ["results.md"]


def test_ctrl_c_keeps_the_parts_that_were_measured(tmp_path):
    code, parts, num_rows, text = run(tmp_path, row_of, raising(KeyboardInterrupt()), row_of)
    assert code == gpu.EXIT_INTERRUPTED
    assert [status for status, _ in parts] == ["measured", "not measured", "not measured"]
    assert num_rows == 1
    assert "| part 2 | not measured | the benchmark ended earlier |" in text


def test_the_defaults_of_a_gpu_and_of_a_cpu():
    on_gpu, on_cpu = gpu.parse([]), gpu.parse(["--device", "cpu", "--learner-tokens", "64"])
    assert on_gpu.learner_tokens == 8192
    assert [part.name for part in gpu.parts_of(on_gpu)] == [
        "engine embedded, 64 slots", "engine embedded, 256 slots", "engine vllm, 64 slots", "engine vllm, 256 slots",
        *(
            name
            for size in ("0.5b", "1.5b")
            for name in (f"learner {size}", *(f"attention {kind}, learner {size}" for kind in ATTENTION_NAMES))
        ),
    ]  # fmt: skip
    assert (on_cpu.size, on_cpu.slots, on_cpu.learner_sizes, on_cpu.learner_tokens) == ("tiny", [4], ["tiny"], 64)
    assert gpu.parts_of(gpu.parse(["--engines", "--learner-sizes"])) == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--device", "cpu", "--out", "/nowhere/results.md"], "no directory /nowhere that can be written"),
        (["--slots", "0"], "0 is less than 1"),
        (["--learner-tokens", "8k"], "invalid positive_integer value: '8k'"),
    ],
)
def test_wrong_options_end_the_benchmark_before_the_first_measurement(capsys, arguments, message):
    with pytest.raises(SystemExit) as ended:
        gpu.main(arguments)
    assert ended.value.code == 2
    assert message in capsys.readouterr().err


def test_an_old_python_or_a_python_without_torch_is_named(monkeypatch, capsys):
    monkeypatch.setattr(gpu, "find_spec", lambda package: None)
    with pytest.raises(SystemExit) as ended:
        gpu.main([])
    assert ended.value.code == 2
    assert capsys.readouterr().err == (
        f"bench gpu: {sys.executable} lacks torch and transformers. pip install torch transformers\n"
    )
    monkeypatch.setattr(sys, "version_info", (3, 10, 12))
    with pytest.raises(SystemExit) as ended:
        gpu.main([])
    assert ended.value.code == 2
    assert "Python 3.11 or later is needed" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("cuda", "is_available", "memory_error", "message"),
    [
        (None, False, None, "is built without CUDA"),
        ("13.0", False, None, "torch finds no GPU"),
        (
            "13.0",
            True,
            RuntimeError("CUDA error: out of memory\nmore"),
            "cannot be used: CUDA error: out of memory, or",
        ),
    ],
)
def test_without_a_usable_gpu_the_message_names_which_of_three_causes_applies(
    monkeypatch, capsys, cuda, is_available, memory_error, message
):
    monkeypatch.setattr(torch.version, "cuda", cuda)
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: is_available)
    if memory_error is not None:
        monkeypatch.setattr(torch.cuda, "mem_get_info", raising(memory_error))
    with pytest.raises(SystemExit) as ended:
        gpu.main([])
    assert ended.value.code == 2
    error = capsys.readouterr().err
    assert message in error
    assert "--device cpu" in error
    assert error.count("\n") == 1
