"""Measure engines and the learner on a GPU in bfloat16: tokens per second, pauses, parity, model-flop utilisation.

Run: `make bench-gpu`, or `python -m benchmarks.gpu`. The models have random weights; no files are
downloaded. torch and transformers are enough for the embedded engine. The learner also needs pydantic.

The benchmark consists of parts; each part adds a row to the result. If a part cannot run (a package is missing, or
the GPU has too little memory), the result says why, and the next part runs. After each part --out is written.
"""

import argparse
import gc
import os
import platform
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from benchmarks import report
from benchmarks.sizes import SIZES
from pipelinerl_core.errors import EXIT_CONFIG

ENGINES = ("embedded", "vllm")
ATTENTION_KINDS = ("padded", "varlen", "flex")
DEFAULTS: dict[str, dict[str, Any]] = {
    # With packs of 16,384 tokens the learner of the 1.5b model fills a GPU of 80 GB: take half of that.
    "cuda": {
        "size": "0.5b",
        "slots": [64, 256],
        "max_tokens": 256,
        "learner_sizes": ["0.5b", "1.5b"],
        "learner_tokens": 8192,
    },
    "cpu": {"size": "tiny", "slots": [4], "max_tokens": 32, "learner_sizes": ["tiny"], "learner_tokens": 128},
}
EXAMPLES = """examples:
  make bench-gpu                                             all parts; the result is in docs/results-gpu.md
  make bench-gpu ARGS="--learner-tokens 4096"                smaller packs, if the learner runs out of memory
  make bench-gpu ARGS="--engines embedded --learner-sizes"   the embedded engine alone
  make bench-gpu ARGS="--engines"                            the learner alone
  make bench-gpu ARGS="--device cpu"                         all parts with tiny models, without a GPU

exit codes: 0 no part failed (a missing package and too little memory are not failures), 1 a part failed, 2 no part
can run here, 130 Ctrl-C (the result has the parts that were measured before)
"""
MEASURED, NOT_MEASURED, FAILED = "measured", "not measured", "failed"
EXIT_FAILURE = 1
EXIT_INTERRUPTED = 130


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One measurement of the benchmark."""

    table: str
    """Key of the table in the result that gets the row."""
    name: str
    size: str
    """What the memory of the device must hold, for the message when the memory is too small."""
    options: str
    """Options that make the size smaller."""
    measure: Callable[[], dict[str, Any]]


def main(arguments: Sequence[str] | None = None) -> None:
    """Print a table, or one JSON document with --json; --out writes the table to a file too."""
    options = parse(arguments)
    problem = _problem(options)
    if problem is not None:
        sys.stderr.write(f"bench gpu: {problem}\n")
        sys.exit(EXIT_CONFIG)
    result = conditions_of(options)
    code = run(parts_of(options), result, options.out)
    report.write(result, table, as_json=options.json)
    sys.exit(code)


def parts_of(options: argparse.Namespace) -> list[Part]:
    """The parts in the order in which they run."""
    parts = [
        Part(
            table="rows",
            name=f"engine {kind}, {slots} slots",
            size=f"{slots} slots and {options.max_tokens:,} tokens per completion",
            options="--slots or --max-tokens",
            measure=partial(_measure_engine, kind, slots, options),
        )
        for kind in options.engines
        for slots in options.slots
    ]
    pack = {"size": f"{options.learner_tokens:,} tokens per pack", "options": "--learner-tokens"}
    how: dict[str, Any] = {"device": options.device, "dtype": options.dtype, "pack_tokens": options.learner_tokens}
    for size in options.learner_sizes:
        measure = partial(_measure, "learner", size, **how)
        parts.append(Part(table="learner", name=f"learner {size}", measure=measure, **pack))
        for kind in ATTENTION_KINDS:
            measure = partial(_measure, "attention", size, kind, **how)
            parts.append(Part(table="attention", name=f"attention {kind}, learner {size}", measure=measure, **pack))
    return parts


def run(parts: Sequence[Part], result: dict[str, Any], out: Path | None = None) -> int:
    """Measure the parts into `result`, write the table to `out` after each part; returns the exit code."""
    # The result of the parts that a crash or Ctrl-C prevents.
    entries = [{"part": part.name, "status": NOT_MEASURED, "result": "the benchmark ended earlier"} for part in parts]
    result |= {"parts": entries, "rows": [], "learner": [], "attention": []}
    try:
        for number, (part, entry) in enumerate(zip(parts, entries, strict=True), 1):
            sys.stderr.write(f"[{number}/{len(parts)}] {part.name}\n")
            started = time.perf_counter()
            try:
                row = part.measure()
            except Exception as error:  # noqa: BLE001 - the other parts do not depend on this part
                entry["status"], entry["result"] = _describe(error, part)
            else:
                result[part.table].append(row)
                entry["status"] = MEASURED
                entry["result"] = f"{row['tokens_per_second']:,.0f} tokens/s, {time.perf_counter() - started:.0f} s"
            sys.stderr.write(f"    {entry['status']}: {entry['result']}\n")
            _free_memory()  # here, because the exception kept tensors alive
            if out is not None:
                report.write_file(out, table(result))
    except KeyboardInterrupt:
        sys.stderr.write("    interrupted\n")
        return EXIT_INTERRUPTED
    return EXIT_FAILURE if any(entry["status"] == FAILED for entry in entries) else 0


def table(result: dict[str, Any]) -> str:
    """The measurement as Markdown."""
    lines = [
        f"`make bench-gpu`, {result['date']}: {result['device']}{result['memory']}, torch {result['torch']}, "
        f"transformers {result['transformers']}, {result['dtype']}, random weights, packs of "
        f"{result['learner_tokens']:,} tokens in the learner.",
        "",
        *report.markdown(
            ("part", "status", "result"),
            [(entry["part"], entry["status"], entry["result"].replace("|", "/")) for entry in result["parts"]],
            num_text_columns=3,
        ),
    ]
    if result["rows"]:
        from benchmarks import gpu_engine

        lines += ["", *gpu_engine.table(result["rows"])]
    if result["learner"]:
        from benchmarks import gpu_learner

        lines += ["", *gpu_learner.table(result["learner"])]
    if result["attention"]:
        from benchmarks import gpu_attention

        lines += ["", *gpu_attention.table(result["attention"])]
    return "\n".join(lines) + "\n"


def _describe(error: Exception, part: Part) -> tuple[str, str]:
    """Status and one line for a part that raised: missing packages and memory are no failures."""
    import torch

    line = (str(error).strip() or "no reason given").splitlines()[0]
    # An engine raises an error of its own, with the text of the error of its loop.
    if isinstance(error, torch.OutOfMemoryError) or "out of memory" in str(error).lower():
        return NOT_MEASURED, f"out of memory at {part.size}: lower {part.options}"
    if isinstance(error, report.NotMeasured):
        return NOT_MEASURED, line
    if isinstance(error, ModuleNotFoundError) and error.name:
        package = error.name.partition(".")[0]
        if find_spec(package) is None:  # otherwise another version of the package is needed
            return NOT_MEASURED, f"the package {package} is not installed. pip install {package}"
    traceback.print_exception(error)
    return FAILED, f"{type(error).__name__}: {line}"


def _free_memory() -> None:
    import torch

    gc.collect()
    with suppress(RuntimeError):  # after some errors of CUDA, every later call raises
        torch.cuda.empty_cache()


def _measure_engine(kind: str, slots: int, options: argparse.Namespace) -> dict[str, Any]:
    if kind == "vllm" and find_spec("vllm") is None:
        raise report.NotMeasured("the package vllm is not installed. make install ENGINE=vllm")
    return _measure("engine", kind, slots, options)


def _measure(name: str, *arguments: Any, **how: Any) -> dict[str, Any]:
    # Imported here, so that a missing package ends only the parts that need the package.
    measure = getattr(import_module(f"benchmarks.gpu_{name}"), f"measure_{name}")
    row: dict[str, Any] = measure(*arguments, **how)
    return row


def _problem(options: argparse.Namespace) -> str | None:
    """Why nothing can be measured; None: something can."""
    if sys.version_info < (3, 11):  # noqa: UP036 - `make bench-gpu` also runs with a Python that pip did not check
        return f"Python {platform.python_version()} is too old: Python 3.11 or later is needed"
    missing = [package for package in ("torch", "transformers") if find_spec(package) is None]
    if missing:
        return f"{sys.executable} lacks {' and '.join(missing)}. pip install {' '.join(missing)}"
    if options.out is not None and not os.access(options.out.parent, os.W_OK):
        return f"--out {options.out}: no directory {options.out.parent} that can be written"
    return _problem_of_gpu() if options.device == "cuda" else None


def _problem_of_gpu() -> str | None:
    import torch

    if not (torch.version.cuda or torch.version.hip):
        problem = (
            f"torch {torch.__version__} is built without CUDA. Install a build with CUDA: make install TORCH=cuda"
        )
    elif not torch.cuda.is_available():
        problem = "torch finds no GPU. Check that nvidia-smi lists a GPU"
    else:
        try:
            torch.cuda.mem_get_info()
        except RuntimeError as error:  # other processes use the whole GPU
            problem = f"the GPU cannot be used: {str(error).splitlines()[0]}"
        else:
            return None
    return f"{problem}, or set --device cpu, which tries the benchmark with tiny models"


def conditions_of(options: argparse.Namespace) -> dict[str, Any]:
    """What the result is about."""
    import torch

    device, memory = platform.processor() or "CPU", ""
    if options.device == "cuda":
        free, total = torch.cuda.mem_get_info()
        device = torch.cuda.get_device_name()
        memory = f", {free / 2**30:.1f} of {total / 2**30:.1f} GiB free at the start"
    return {
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
        "device": device,
        "memory": memory,
        "torch": torch.__version__,
        "transformers": version("transformers"),
        "dtype": options.dtype,
        "learner_tokens": options.learner_tokens,
    }


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The options of the benchmark, with the defaults of their device."""
    parser = argparse.ArgumentParser(
        prog="benchmarks gpu",
        description=__doc__,
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--device", choices=[*DEFAULTS], default="cuda", help="cpu: try the benchmark without a GPU (default: cuda)")
    add("--dtype", choices=["bfloat16", "float32"], default="bfloat16")
    add("--size", choices=[*SIZES], help="model of the engines (default: 0.5b; cpu: tiny)")
    add(
        "--slots",
        type=positive_integer,
        nargs="+",
        help="concurrent sequences of an engine (default: 64 256; cpu: 4)",
    )
    add("--max-tokens", type=positive_integer, help="length of a completion (default: 256; cpu: 32)")
    add("--engines", nargs="*", choices=ENGINES, default=ENGINES, help="default: both; without a name: none")
    add(
        "--learner-sizes",
        nargs="*",
        choices=[*SIZES],
        help="models of the learner (default: 0.5b 1.5b; cpu: tiny); without a name: none",
    )
    add(
        "--learner-tokens",
        type=positive_integer,
        help="tokens per pack, which is one forward pass of the learner (default: 8192; cpu: 128)",
    )
    add("--out", type=Path, help="write the table to this file after each part")
    add("--json", action="store_true", help="one JSON document on stdout")
    options = parser.parse_args(arguments)
    for name, value in DEFAULTS[options.device].items():
        if getattr(options, name) is None:
            setattr(options, name, value)
    return options


def positive_integer(text: str) -> int:
    """Type of an option; argparse shows the name of the function if the text is no integer."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{number} is less than 1")
    return number


if __name__ == "__main__":
    main()
