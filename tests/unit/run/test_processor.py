"""The processor of a step: what of it decides the bits of a result."""

from pathlib import Path

from pipelinerl_core.run.processor import processor

X86 = "processor\t: 0\nmodel name\t: AMD EPYC 9R14\nflags\t\t: fpu avx2 avx512_bf16\n"
ARM = "processor\t: 0\nFeatures\t: fp asimd bf16\nCPU part\t: 0xd40\n"


def of(tmp_path, text):
    path = tmp_path / str(abs(hash(text)))
    path.write_text(text)
    return processor(path)


def test_model_instruction_sets_and_torch_are_named(tmp_path):
    description = of(tmp_path, X86)
    assert description.startswith("AMD EPYC 9R14 ")
    assert " torch 2." in description
    assert of(tmp_path, ARM).startswith("0xd40 ")


def test_machines_of_one_name_with_other_instruction_sets_differ(tmp_path):
    assert of(tmp_path, X86) != of(tmp_path, X86.replace("avx512_bf16", "avx512_bf16 amx_bf16"))
    assert of(tmp_path, X86) == of(tmp_path, X86.replace("avx2 avx512_bf16", "avx512_bf16 avx2"))


def test_a_host_without_the_file_has_a_name_too():
    assert " torch " in processor(Path("/proc/no-such-file"))
    assert processor() == processor()
