"""Which processor and which kernels compute the steps of a run: with equal ones, a step repeats bit by bit."""

import functools
import hashlib
import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

_CPU = Path("/proc/cpuinfo")
_NAMES = ("model name", "CPU part", "Processor")
_FLAGS = ("flags", "Features")


@functools.cache
def processor(cpu: Path = _CPU) -> str:
    """Model, instruction sets and version of torch. Example: "AMD EPYC 9R14 1f0c9a7e torch 2.13.0".

    Libraries choose their kernels by the instruction sets, which differ between machines of one model name.
    """
    try:
        lines = cpu.read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    name = _value(lines, _NAMES) or platform.machine()
    flags = hashlib.sha256(" ".join(sorted(_value(lines, _FLAGS).split())).encode()).hexdigest()[:8]
    try:
        torch = version("torch").partition("+")[0]
    except PackageNotFoundError:
        torch = "none"
    return f"{name} {flags} torch {torch}"


def _value(lines: list[str], names: tuple[str, ...]) -> str:
    values = (line.partition(":")[2].strip() for line in lines if line.partition(":")[0].strip() in names)
    return next(values, "")
