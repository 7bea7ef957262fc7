"""`pipelinerl bench`: the benchmarks of the project."""

from typing import Annotated

import typer

from pipelinerl.flows.cli.child import run_module
from pipelinerl_core.errors import ConfigError

MODULES = (
    "adapters",
    "demo",
    "engine",
    "gpu",
    "learner",
    "predictions",
    "sandbox",
    "stream",
    "trainer",
    "vllm",
)
"""Benchmarks with a module in pipelinerl_core.bench; `learning` runs the compare flow."""


def bench(
    context: typer.Context,
    name: Annotated[
        str,
        typer.Argument(
            help="engine: tokens per second of the engines; vllm: overhead of the adapter over plain vLLM; "
            "gpu: engines on a GPU; learner: a step compared with a plain loop and TRL; adapters: versions of LoRA; "
            "sandbox: programs of a model per second; "
            "stream: the channel and the hub; trainer: what ranks wait for between steps; demo: a step of the preset "
            "smollm2; predictions: those of simulate beside runs; "
            "learning: schedules compared, or controls of the objective."
        ),
    ],
) -> None:
    """Run a benchmark. Arguments after its name are passed to the benchmark.

    Examples: `pipelinerl bench engine --json`, `pipelinerl bench learning --short`
    """
    if name == "learning":
        from pipelinerl.flows.cli.bench_learning import main

        main(context.args)
    elif name in MODULES:
        run_module(f"bench.{name}", {}, context.args)
    else:
        known = ", ".join(sorted((*MODULES, "learning")))
        raise ConfigError(f"bench {name}: no such benchmark; there are: {known}")
