"""The choice of model.dtype=auto: bfloat16 if the processor has units for bfloat16, else float32.

This module must not import torch, so that a flow and `pipelinerl config` start fast.
"""

import shutil
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from pipelinerl_core.config.sections import RunConfig

Dtype = Literal["float32", "bfloat16"]

_CPU = Path("/proc/cpuinfo")
_CPU_UNITS = frozenset({"amx_bf16", "avx512_bf16", "bf16"})
"""Flags of x86 processors, and of Arm processors."""
_GPU_CAPABILITY = 8.0
"""Compute capability of the first NVIDIA GPUs with units for bfloat16 (Ampere)."""
_SECONDS = 10.0


def choose_dtype(config: "RunConfig") -> Dtype:
    """The data type for the processor of this host that computes: its GPU where the run uses a GPU, else its CPU."""
    capability = None if config.stays_on_cpu else gpu_capability()
    has_units = cpu_has_bfloat16() if capability is None else capability >= _GPU_CAPABILITY
    return "bfloat16" if has_units else "float32"


def cpu_has_bfloat16(cpu: Path = _CPU) -> bool:
    """Whether the CPU multiplies in bfloat16; False if the host does not list the flags of its CPU."""
    try:
        lines = cpu.read_text(encoding="utf-8").splitlines()
    except OSError:
        return False
    flags = next((line for line in lines if line.startswith(("flags", "Features"))), "")
    return not _CPU_UNITS.isdisjoint(flags.split())


def gpu_capability() -> float | None:
    """Lowest compute capability of the host's NVIDIA GPUs; None without a GPU."""
    command = shutil.which("nvidia-smi")
    if command is None:
        return None
    query = [command, "--query-gpu=compute_cap", "--format=csv,noheader"]
    try:
        answer = subprocess.run(query, capture_output=True, text=True, timeout=_SECONDS, check=True).stdout
        return min((float(line) for line in answer.split()), default=None)
    except (OSError, subprocess.SubprocessError, ValueError):
        return None
