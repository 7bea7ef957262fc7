"""`pipelinerl bench`: the benchmarks of the project."""

from typing import Annotated

import typer

from pipelinerl.flows.cli.child import run_module
from pipelinerl_core.errors import ConfigError

MODULES = ("adapters", "engine", "gpu", "learner", "stream", "vllm")
"""Benchmarks that are a module of pipelinerl_core.bench; `learning` is the compare flow."""


def bench(
    context: typer.Context,
    name: Annotated[
        str,
        typer.Argument(
            help="engine: tokens per second against its peers; vllm: what the adapter costs vLLM; "
            "gpu: engines on a GPU; learner: its step against a bare loop and TRL; "
            "adapters: versions of LoRA; stream: the channel and the hub; learning: schedules against each other."
        ),
    ],
) -> None:
    """Run a benchmark; what follows its name goes to the benchmark.

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
