"""Run a reference trainer, alone on this machine, in the fastest environment (measured on two cores)."""

import os
import sys
from pathlib import Path

_MODULES = {"trl": "trl_grpo", "sequential": "sequential", "evaluate": "evaluate"}
# `make bench-peers` installs here the packages that only benchmarks need.
_PACKAGES = Path(__file__).parents[2] / ".bench-packages"
# Set for roles that share cores. A reference trainer has all cores, so its threads may wait in a busy loop.
_SHARED_CORES = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")


def main() -> int:
    """Replace this process by the reference trainer; returns 2 for an unknown name."""
    name, *arguments = sys.argv[1:] or [""]
    if name not in _MODULES:
        print(f"usage: python -m {__package__} {'|'.join(_MODULES)} --out DIR ... (or --help)", file=sys.stderr)  # noqa: T201
        return 2
    cores = len(os.sched_getaffinity(0))
    # Data-parallel processes of one thread are faster than one process of many threads: TRL is mostly Python.
    processes = cores if name == "trl" else 1
    inherited = {key: value for key, value in os.environ.items() if key not in _SHARED_CORES}
    environment = {
        **inherited,
        "OMP_NUM_THREADS": str(cores // processes),
        "PYTHONPATH": os.pathsep.join(filter(None, (os.environ.get("PYTHONPATH"), str(_PACKAGES)))),
        # Models are local, and no telemetry is sent.
        "HF_HUB_OFFLINE": "1",
        "HF_HUB_DISABLE_TELEMETRY": "1",
    }
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    command = [*(launcher if processes > 1 else []), "-m", f"{__package__}.{_MODULES[name]}", *arguments]
    os.execve(sys.executable, [sys.executable, *command], environment)


if __name__ == "__main__":
    sys.exit(main())
