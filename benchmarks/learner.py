"""Measure the learner: against a bare loop on the same packs, against TRL's GRPO step, pack fill, memory.

Run: `python -m benchmarks learner [--memory] [--json]`. One process with one compute thread; the contestants take
turns. Figures are medians over rounds, and ratios are medians of each round's ratio. Models have random weights.
TRL is measured if `make bench-peers` has installed TRL. --memory adds the memory of the log-probability step for
the head of Qwen2.5-0.5B, which takes minutes and 10 GB.
"""

import argparse
import importlib.util
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks import report
from pipelinerl_core.errors import ConfigError
from pipelinerl_core.roles.runtime.process import exit_codes

_PACKAGES = Path(__file__).parents[1] / ".bench-packages"
_WORKLOADS = ("quickstart", "small", "prompts")


@exit_codes
def main(arguments: Sequence[str] | None = None) -> int:
    """Print a table, or one JSON document with --json."""
    options = _parse(arguments)
    result = measure(options)
    report.write(result, table, as_json=options.json)
    return 0


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = report.parser(__doc__)
    parser.add_argument("--workloads", nargs="*", choices=_WORKLOADS, default=list(_WORKLOADS), help="default: all")
    parser.add_argument("--rounds", type=int, default=5, help="rounds after the first, which warms up")
    parser.add_argument("--no-trl", action="store_true", help="do not measure TRL even if TRL is installed")
    parser.add_argument("--memory", action="store_true", help="measure memory too")
    parser.add_argument("--memory-tokens", type=int, default=4096, help="tokens of the memory table")
    return parser.parse_args(arguments)


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """All requested measurements and their conditions. Raises ConfigError."""
    if options.rounds < 1 or options.memory_tokens < 1:
        raise ConfigError("--rounds and --memory-tokens must be at least 1")
    # Before transformers is imported: transformers checks only once which packages are installed.
    sys.path.append(str(_PACKAGES))
    from benchmarks import learner_memory, learner_rounds

    torch.set_num_threads(1)
    has_trl = importlib.util.find_spec("trl") is not None
    return {
        "workloads": [
            learner_rounds.measure_workload(
                learner_rounds.WORKLOADS[name], options.rounds, with_trl=has_trl and not options.no_trl
            )
            for name in options.workloads
        ],
        "trl": "left out" if options.no_trl else "measured" if has_trl else "not installed: run `make bench-peers`",
        "fill": learner_rounds.measure_fill(),
        "memory": learner_memory.measure(options.memory_tokens) if options.memory else [],
        "memory_tokens": options.memory_tokens,
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        **report.machine(),
    }


def table(result: dict[str, Any]) -> str:
    """The measurement as Markdown."""
    title = (
        f"1 thread, torch {result['torch']}, contestants in turns; load average {result['load_average']} on "
        f"{result['cores']} cores"
    )
    steps: list[tuple[str, ...]] = []
    for row in result["workloads"]:
        size = f"{row['workload']}: {row['num_parameters'] / 1e6:.1f} M parameters, {row['num_rollouts']} rollouts"
        steps.append((f"**{size}, {row['num_tokens']:,} tokens**", "", "", ""))
        steps += [
            (name, f"{speed:,}", _ratio(row["learner_over"], name), _ratio(row["learner_over_cpu"], name))
            for name, speed in row["tokens_per_second"].items()
        ]
        if result["trl"] != "measured":
            steps.append(("TRL", result["trl"], "", ""))
    header = ("pack_tokens, in mean lengths", "packing", "pack_fill", "attention slots per token", "packs")
    fill = [
        (row["multiple"], row["packing"], f"{row['pack_fill']:.3f}", f"{row['attention_slots_per_token']:.3f}",
         row["num_packs"])
        for row in result["fill"]
    ]  # fmt: skip
    lines = [title, "", *report.markdown(("step of", "tokens/s", "learner is faster by", "by CPU time"), steps)]
    lines += ["", *report.markdown(header, fill, num_text_columns=2)]
    if result["memory"]:
        from benchmarks.learner_memory import table as memory_table

        lines += ["", *memory_table(result["memory"], result["memory_tokens"])]
    return "\n".join(lines) + "\n"


def _ratio(ratios: dict[str, float], name: str) -> str:
    return f"{ratios[name]:.2f}" if name in ratios else ""


if __name__ == "__main__":
    sys.exit(main())
