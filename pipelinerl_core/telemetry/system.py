"""Samples CPU and memory of the host and of each role of a run, and the NVIDIA GPUs.

Names and units are the same as for MLflow's system metrics, so MLflow shows them on its page for system metrics.
MLflow's monitor is not used, because the monitor stops after the first outage of the server and does not separate
roles.
"""

import time
from collections.abc import Iterable, Sequence
from itertools import pairwise

import psutil

from pipelinerl_core.host import nvidia_smi

PREFIX = "system"

_MODULE = "pipelinerl_core.roles."
_MEGABYTE = 1e6
_MEBIBYTE = 2.0**20
_SMI_SECONDS = 5.0
_SMI_FIELDS = ("index", "utilization.gpu", "memory.used", "memory.total", "power.draw")


class SystemSampler:
    """Samples this host; call the object from one thread."""

    def __init__(self, run_url: str) -> None:
        """run_url: URL of the run; role processes of other runs are left out."""
        self._run_url = run_url
        self._flow = psutil.Process()
        self._cpu: dict[tuple[int, float], float] = {}
        psutil.cpu_percent(None)  # the first call starts the measurement
        self._sampled_at = time.monotonic()
        self._roles()

    def __call__(self) -> dict[str, float]:
        """Metric -> value; CPU is the mean since the previous call."""
        gpus = gpu_figures(nvidia_smi(_SMI_FIELDS, seconds=_SMI_SECONDS))
        memory = psutil.virtual_memory()
        return {
            f"{PREFIX}/cpu_utilization_percentage": psutil.cpu_percent(None),
            f"{PREFIX}/system_memory_usage_megabytes": memory.used / _MEGABYTE,
            f"{PREFIX}/system_memory_usage_percentage": 100.0 * memory.used / memory.total,
            **self._roles(),
            **{f"{PREFIX}/{key}": value for key, value in gpus.items()},
        }

    def _roles(self) -> dict[str, float]:
        """CPU (100 is one core) and resident memory of the flow and of each role with everything below it."""
        now = time.monotonic()
        seconds = max(now - self._sampled_at, 1e-3)
        self._sampled_at = now
        values: dict[str, float] = {}
        cpu: dict[tuple[int, float], float] = {}
        for process, role in self._processes():
            try:
                with process.oneshot():
                    times = process.cpu_times()
                    key = (process.pid, process.create_time())
                    memory = process.memory_info().rss / _MEGABYTE
            except psutil.Error:  # the process has just ended
                continue
            cpu[key] = times.user + times.system
            # A new process has started since the previous call, so all its CPU time counts.
            share = 100.0 * (cpu[key] - self._cpu.get(key, 0.0)) / seconds
            _add(values, f"{PREFIX}/{role}/cpu_utilization_percentage", share)
            _add(values, f"{PREFIX}/{role}/memory_usage_megabytes", memory)
        self._cpu = cpu
        return values

    def _processes(self) -> list[tuple[psutil.Process, str]]:
        """(process, role) of this process and its descendants; a child of a role process belongs to the role."""
        processes = [(self._flow, "flow")]
        roles = {self._flow.pid: "flow"}
        for process in self._flow.children(recursive=True):  # parents first
            try:
                role = self._role_of(process.cmdline()) or roles.get(process.ppid(), "flow")
            except psutil.Error:
                continue
            roles[process.pid] = role
            processes.append((process, role))
        return processes

    def _role_of(self, command: list[str]) -> str | None:
        """Role, or name of an actor, of a command line; None for other processes than roles of this run."""
        module = next((word.removeprefix(_MODULE) for word in command if word.startswith(_MODULE)), None)
        if module is None or self._run_url not in command:
            return None
        role = module.removesuffix(".main").replace(".", "_")  # trainer.node -> trainer_node
        options = dict(pairwise(command))
        return options.get("--name", role)


def gpu_figures(rows: Iterable[Sequence[str]]) -> dict[str, float]:
    """Metrics of rows (index, percent, MiB used, MiB in all, watts); missing values ("[N/A]") are left out.

    Example: ("0", "42", "1024", "4096", "70.5") has gpu_0_memory_usage_percentage 25.
    """
    values: dict[str, float] = {}
    for index, *cells in rows:
        busy, used, total, watts = (parse_number(cell) for cell in cells)
        megabytes = used * _MEBIBYTE / _MEGABYTE if used is not None else None
        percentage = 100.0 * used / total if used is not None and total else None
        figures = {
            "utilization_percentage": busy,
            "memory_usage_megabytes": megabytes,
            "memory_usage_percentage": percentage,
            "power_usage_watts": watts,
        }
        values |= {f"gpu_{index}_{name}": value for name, value in figures.items() if value is not None}
    return values


def parse_number(text: str) -> float | None:
    """None for a text that is no number."""
    try:
        return float(text)
    except ValueError:
        return None


def _add(values: dict[str, float], key: str, value: float) -> None:
    values[key] = values.get(key, 0.0) + value
