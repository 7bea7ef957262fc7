"""What this host has: processors with units for bfloat16, GPUs, cores for roles, and addresses of its own.

placement.cores=own: the trainer gets the first placement.threads cores, actor-0 the next, and so on; other processes
use any core.
"""

import ipaddress
import logging
import os
import re
import shutil
import socket
import subprocess
from collections.abc import Sequence
from pathlib import Path

from pipelinerl_core.config.run import RunConfig
from pipelinerl_core.errors import ConfigError

logger = logging.getLogger(__name__)

_CPU = Path("/proc/cpuinfo")
_CPU_UNITS = frozenset({"amx_bf16", "avx512_bf16", "bf16"})
"""Flags of x86 processors, and of Arm processors."""


def cpu_has_bfloat16(cpu: Path = _CPU) -> bool:
    """Whether the CPU multiplies in bfloat16; False if the host does not list the flags of its CPU."""
    try:
        lines = cpu.read_text(encoding="utf-8").splitlines()
    except OSError:
        return False
    flags = next((line for line in lines if line.startswith(("flags", "Features"))), "")
    return not _CPU_UNITS.isdisjoint(flags.split())


def nvidia_smi(fields: Sequence[str], *options: str, seconds: float = 10.0) -> list[list[str]]:
    """A row of cells for each NVIDIA GPU; empty without a driver, or if the driver does not answer."""
    command = shutil.which("nvidia-smi")
    if command is None:
        return []
    query = [command, f"--query-gpu={','.join(fields)}", "--format=csv,noheader,nounits", *options]
    try:
        answer = subprocess.run(query, capture_output=True, text=True, timeout=seconds, check=True).stdout
    except (OSError, subprocess.SubprocessError) as error:
        logger.debug("nvidia-smi: %s", error)
        return []
    return [[cell.strip() for cell in line.split(",")] for line in answer.splitlines() if line.strip()]


def gpu_capability() -> float | None:
    """Lowest compute capability of the host's NVIDIA GPUs; None without a GPU."""
    try:
        return min((float(capability) for (capability,) in nvidia_smi(["compute_cap"])), default=None)
    except ValueError:
        return None


def is_loopback(host: str) -> bool:
    """Whether only this host can connect to an address. Every name other than localhost counts as reachable."""
    try:
        return host == "localhost" or ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def reachable_url(url: str) -> str:
    """A server's URL for other hosts: a wildcard address is replaced by the address of this host."""
    scheme, _, address = url.partition("://")
    host, _, port = address.rpartition(":")
    return f"{scheme}://{own_outgoing_address()}:{port}" if host in ("0.0.0.0", "[::]", "::") else url


def own_outgoing_address() -> str:
    """The address from which this host connects to others; its host name without a network."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # sends nothing: the call only selects the outgoing address
            return str(probe.getsockname()[0])
        except OSError:
            return socket.gethostname()


def own_cores(config: RunConfig, role: str) -> list[int] | None:
    """Numbers of the cores of `trainer` or `actor-<i>`; None with placement.cores=shared.

    Raises ConfigError if this host has too few cores for all roles, or cannot pin processes to cores.
    """
    if config.placement.cores == "shared":
        return None
    if not hasattr(os, "sched_getaffinity"):
        raise ConfigError(
            "placement.cores=own: this system cannot pin a process to cores, only Linux can. "
            "Set placement.cores=shared"
        )
    actors, threads = config.placement.actors, config.placement.threads
    available = sorted(os.sched_getaffinity(0))
    needed = (1 + actors) * threads
    if needed > len(available):
        raise ConfigError(
            f"placement.cores=own: (1 trainer + placement.actors={actors}) x placement.threads={threads} = {needed} "
            f"cores, but this process may use {len(available)}. Lower placement.actors or placement.threads, or set "
            "placement.cores=shared"
        )
    first = _role_index(role, actors) * threads
    return available[first : first + threads]


def _role_index(role: str, actors: int) -> int:
    """0 for the trainer, 1 + i for actor-i."""
    if role == "trainer":
        return 0
    match = re.fullmatch(r"actor-(\d+)", role)
    if match is None or int(match[1]) >= actors:
        raise ConfigError(
            f"placement.cores=own: no cores for {role!r}, only for trainer and actor-0 to actor-{actors - 1} "
            f"(placement.actors={actors}). Use one of these names, or set placement.cores=shared"
        )
    return 1 + int(match[1])
