"""How each role is started: its command line, and the environment every child gets before any import."""

import os
import sys
from collections.abc import Mapping, Sequence

from pipelinerl_core import parent_death
from pipelinerl_core.run.context import TOKEN_VARIABLE

_ROLES = {
    "hub": "pipelinerl_core.roles.hub.main",
    "trainer": "pipelinerl_core.roles.trainer.main",
    "trainer_node": "pipelinerl_core.roles.trainer.node",
    "actor": "pipelinerl_core.roles.actor.main",
    "evaluator": "pipelinerl_core.roles.evaluator.main",
}

# Thread pools of the libraries in a role. Each defaults to all cores, for every role on the host.
_THREAD_VARIABLES = (
    "OMP_NUM_THREADS",
    "MKL_NUM_THREADS",
    "OPENBLAS_NUM_THREADS",
    "NUMEXPR_NUM_THREADS",
    "RAYON_NUM_THREADS",
)
# OpenMP's default spin-wait made two roles on two cores 10 to 30 times slower.
_PASSIVE_WAIT = {"OMP_WAIT_POLICY": "PASSIVE", "GOMP_SPINCOUNT": "0", "TOKENIZERS_PARALLELISM": "false"}


def role_environment(threads: int, token: str) -> dict[str, str]:
    """This process's environment with the thread limits and the token of a role."""
    limits = dict.fromkeys(_THREAD_VARIABLES, str(threads))
    # The first one is never set again: vLLM could not name its processes then, whose titles lie where it was.
    first = {"PYTHONUNBUFFERED": "1"}
    return {**first, **os.environ, **_PASSIVE_WAIT, **limits, **first, TOKEN_VARIABLE: token}


def role_command(role: str, arguments: Mapping[str, str]) -> list[str]:
    """Command line of a role of a run: `python -m MODULE --key value ... --parent-pid PID`."""
    return [*module_command(_ROLES[role], arguments), "--parent-pid", str(os.getpid())]


def module_command(module: str, arguments: Mapping[str, str]) -> list[str]:
    """`python -m MODULE --key value ...`: a tool or a benchmark, which loads libraries that this process does not."""
    options = [text for key, value in arguments.items() for text in (f"--{key}", value)]
    return [sys.executable, "-m", module, *options]


def guarded(command: Sequence[str]) -> list[str]:
    """The command, killed by the kernel as soon as the thread that starts it is gone."""
    return [sys.executable, "-I", "-S", parent_death.__file__, str(os.getpid()), *command]
