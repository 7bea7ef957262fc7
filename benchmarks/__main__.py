"""Run a benchmark: `make bench NAME=engine ARGS=--json`, or `python -m benchmarks engine --json` in a checkout.

    age          what the number of steps of a run costs its readers
    checkpoint   a checkpoint: how long training stops, memory, and reading
    demo         CPU seconds of a step of the preset smollm2 beside bare loops
    engine       tokens per second of the embedded engine and of transformers' continuous batching
    learner      a step beside a plain loop and TRL
    learning     schedules compared at the same accuracy, or controls of the objective
    memory       memory of trainer and actor on a CPU, predicted and measured
    preemption   goodput of runs whose machines end and come back
    predictions  predictions of `simulate` beside measured runs
    sandbox      programs of a model per second
    sql          SQL over a million rollouts: seconds and memory
    stream       the channel and the hub
    swap         a weight version from the learner to the engine, beside one copy of its bytes
    vllm         overhead of the adapter over plain vLLM

The benchmark receives the arguments after its name; `python -m benchmarks engine --help` lists the arguments.
"""

import subprocess
import sys

from pipelinerl_core.supervision.role_commands import ending_with_parent, role_environment
from pipelinerl_core.supervision.temporary_directories import own_temporary

NAMES = tuple(line.split()[0] for line in (__doc__ or "").splitlines() if line.startswith("    "))


def main(arguments: list[str]) -> int:
    """Run the benchmark of this name with one compute thread; returns its exit code, and 2 for an unknown name."""
    name, *rest = arguments or ["--help"]
    if name in ("-h", "--help"):
        sys.stdout.write(__doc__ or "")
        return 0
    if name not in NAMES:
        sys.stderr.write(f"bench {name}: no such benchmark; there are: {', '.join(NAMES)}\n")
        return 2
    with own_temporary(role_environment(1, "")) as environment:
        command = ending_with_parent([sys.executable, "-m", f"benchmarks.{name}", *rest])
        return subprocess.run(command, env=environment, check=False).returncode


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except KeyboardInterrupt:
        sys.exit(130)
