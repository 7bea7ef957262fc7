"""Command lines and environment variables of the roles, tools and checks that run as child processes."""

import os
import sys
from collections.abc import Mapping, Sequence

from pipelinerl_core import parent_death
from pipelinerl_core.config.mlflow_login import LOGIN_VARIABLES
from pipelinerl_core.run.context import TOKEN_VARIABLE

_ROLES = {
    "hub": "pipelinerl_core.roles.hub.main",
    "trainer": "pipelinerl_core.roles.trainer.main",
    "trainer_node": "pipelinerl_core.roles.trainer.node",
    "actor": "pipelinerl_core.roles.actor.main",
    "evaluator": "pipelinerl_core.roles.evaluator.main",
}

# Thread pools of the libraries in a role; by default, each pool uses all cores of the host.
_THREAD_VARIABLES = (
    "OMP_NUM_THREADS",
    "MKL_NUM_THREADS",
    "OPENBLAS_NUM_THREADS",
    "NUMEXPR_NUM_THREADS",
    "RAYON_NUM_THREADS",
)
# OpenMP's default spin-wait made two roles on two cores 10 to 30 times slower.
_PASSIVE_WAIT = {"OMP_WAIT_POLICY": "PASSIVE", "GOMP_SPINCOUNT": "0", "TOKENIZERS_PARALLELISM": "false"}
# Each step allocates the same tensors, gradients above all, for which glibc would fetch zeroed pages from the system
# again: a sixth of the CPU time of trainer and actor with 135 M parameters on a virtual machine. With these settings
# (glibc 2.35) a process keeps up to 2 GiB of free memory and asks for huge pages.
_TUNABLES = "GLIBC_TUNABLES"
ALLOCATOR = {
    _TUNABLES: "glibc.malloc.hugetlb=1:glibc.malloc.mmap_threshold=33554432:glibc.malloc.trim_threshold=2147483648"
}
# torch asks the driver's library whether there is a GPU; asking CUDA would make CUDA unusable in forked processes.
_CUDA = {"PYTORCH_NVML_BASED_CUDA_CHECK": "1"}


def role_environment(threads: int, token: str) -> dict[str, str]:
    """This process's environment, without a login of MLflow, with the thread limits and the token of a role."""
    limits = dict.fromkeys(_THREAD_VARIABLES, str(threads))
    # Must stay the first variable, unchanged: vLLM writes process titles to the memory where the environment begins.
    first = {"PYTHONUNBUFFERED": "1"}
    inherited = {name: value for name, value in os.environ.items() if name not in LOGIN_VARIABLES}
    own = os.environ.get(_TUNABLES)  # the last value of a setting counts; set, but empty: glibc's defaults
    tunables = ALLOCATOR if own is None else {_TUNABLES: own and f"{ALLOCATOR[_TUNABLES]}:{own}"}
    return {**first, **inherited, **tunables, **_PASSIVE_WAIT, **_CUDA, **limits, **first, TOKEN_VARIABLE: token}


def role_command(role: str, arguments: Mapping[str, str]) -> list[str]:
    """Command line of a role of a run: `python -m MODULE --key value ... --parent-pid PID`."""
    return [*module_command(_ROLES[role], arguments), "--parent-pid", str(os.getpid())]


def module_command(module: str, arguments: Mapping[str, str]) -> list[str]:
    """Command line of a module in a process of its own, which may load heavy libraries: `python -m MODULE --key
    value`."""
    options = [text for key, value in arguments.items() for text in (f"--{key}", value)]
    return [sys.executable, "-m", module, *options]


def ending_with_parent(command: Sequence[str]) -> list[str]:
    """The command, with the kernel set to kill it when the thread that starts it ends (parent_death.py)."""
    return [sys.executable, "-I", "-S", parent_death.__file__, str(os.getpid()), *command]
