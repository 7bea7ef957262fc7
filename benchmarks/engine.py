"""Measure the embedded engine against transformers' continuous batching.

Run: `python -m benchmarks engine [--model DIR] [--json]`. One process with one compute thread; the engines take
turns, and the best of three rounds counts. Without --model the model is a random Qwen2 of 0.8 M parameters. Each
request has 12 prompt tokens and 64 completion tokens, without end tokens. Continuous batching has a small KV cache
and batch: by default transformers allocates all free memory for the cache and builds a dense mask over the cache.
Continuous batching also has no block sharing, because shared blocks would be wrong after a swap of weights.
"""

import asyncio
import logging
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, GenerationConfig
from transformers.generation.configuration_utils import ContinuousBatchingConfig
from transformers.utils import logging as transformers_logging

from benchmarks import report
from benchmarks.engine_load import count_tokens, random_model, random_prompts
from pipelinerl_core.engine.embedded.engine import EmbeddedEngine
from pipelinerl_core.errors import ConfigError, DeadlineExceeded
from pipelinerl_core.roles.runtime.process import exit_codes
from pipelinerl_core.types import Int32Array

SLOTS = (8, 64, 256)
PROMPT_TOKENS = 12
MAX_TOKENS = 64
ROUNDS = 3
# Requests per slot of one round. Every slot is refilled at least once, but for 256 slots, where continuous batching
# would take minutes.
REQUESTS_PER_SLOT = {8: 4, 64: 2, 256: 1}
DEADLINE_SECONDS = 120.0

Contestant = Callable[[Int32Array], int]


@exit_codes
def main() -> int:
    """Print a table, or one JSON document with --json."""
    parser = report.parser(__doc__)
    parser.add_argument("--model", type=Path, help="model directory (default: a random Qwen2 of 0.8 M parameters)")
    options = parser.parse_args()
    result = measure(options.model)
    report.write(result, table, as_json=options.json)
    return 0


def measure(model_directory: Path | None = None) -> dict[str, Any]:
    """Tokens per second of both engines for each number of slots, and the conditions. Raises ConfigError."""
    if model_directory is not None and not model_directory.is_dir():
        raise ConfigError(f"--model {model_directory}: no such directory")
    torch.set_num_threads(1)
    transformers: Any = transformers_logging  # untyped
    transformers.set_verbosity_error()
    transformers.disable_progress_bar()
    logging.getLogger("ContinuousBatchingLogger").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", module="transformers")
    rows = [_measure_slots(model_directory, slots) for slots in SLOTS]
    parameters = sum(parameter.numel() for parameter in _model(model_directory).parameters())
    return {
        "rows": rows,
        "num_parameters": parameters,
        "prompt_tokens": PROMPT_TOKENS,
        "max_tokens": MAX_TOKENS,
        "rounds": ROUNDS,
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        **report.machine(),
    }


def table(result: dict[str, Any]) -> str:
    """The measurement as Markdown."""
    header = ("slots", "embedded", "continuous batching", "ratio", "embedded, per CPU second", "continuous batching")
    keys = ("embedded", "continuous_batching", "embedded_per_cpu_second", "continuous_batching_per_cpu_second")
    rows = []
    for row in result["rows"]:
        speeds = [f"{row[key]:,}" for key in keys]
        rows.append((row["slots"], *speeds[:2], f"{row['ratio']:.1f}", *speeds[2:]))
    conditions = (
        f"tokens/s, {result['num_parameters']:,} parameters, {result['max_tokens']} tokens each, 1 thread, "
        f"best of {result['rounds']}; {report.conditions(result)}"
    )
    return "\n".join([conditions, "", *report.markdown(header, rows, num_text_columns=0), ""])


def _measure_slots(model_directory: Path | None, slots: int) -> dict[str, Any]:
    embedded_model = _model(model_directory)
    vocab_size = embedded_model.get_output_embeddings().weight.shape[0]
    num_requests = slots * REQUESTS_PER_SLOT[slots]
    prompts = random_prompts(num_requests, PROMPT_TOKENS, vocab_size)
    embedded = _Embedded(embedded_model, slots)
    continuous = _ContinuousBatching(_model(model_directory), slots)
    contestants: dict[str, Contestant] = {"embedded": embedded, "continuous_batching": continuous}
    best = dict.fromkeys(contestants, (0.0, 0.0))
    try:
        for contestant in contestants.values():
            contestant(prompts[: min(8, num_requests)])  # warm up: caches, threads, first-touch memory
        for _ in range(ROUNDS):
            for name, contestant in contestants.items():
                best[name] = max(best[name], _tokens_per_second(contestant, prompts))
    finally:
        continuous.close()
    row: dict[str, Any] = {"slots": slots}
    for name, (per_second, per_cpu_second) in best.items():
        row |= {name: round(per_second), f"{name}_per_cpu_second": round(per_cpu_second)}
    row["ratio"] = round(best["embedded"][0] / best["continuous_batching"][0], 2)
    return row


def _tokens_per_second(contestant: Contestant, prompts: Int32Array) -> tuple[float, float]:
    """Tokens per second of wall time and of CPU time; other load on the machine affects CPU time less."""
    start, cpu_start = time.perf_counter(), time.process_time()
    num_tokens = contestant(prompts)
    return num_tokens / (time.perf_counter() - start), num_tokens / (time.process_time() - cpu_start)


def _model(model_directory: Path | None) -> Any:
    model: Any
    if model_directory is not None:
        model = AutoModelForCausalLM.from_pretrained(
            model_directory, dtype=torch.float32, attn_implementation="sdpa", local_files_only=True
        )
        return model.eval()
    return random_model("tiny")


class _Embedded:
    """The embedded engine; a call generates for all prompts and returns the number of tokens."""

    def __init__(self, model: Any, slots: int) -> None:
        self._engine = EmbeddedEngine(model, slots=slots, max_len=PROMPT_TOKENS + MAX_TOKENS, eos_token_ids=())

    def __call__(self, prompts: Int32Array) -> int:
        generated = count_tokens(self._engine, prompts, max_tokens=MAX_TOKENS)
        return asyncio.run(asyncio.wait_for(generated, DEADLINE_SECONDS))


class _ContinuousBatching:
    """transformers' manager, whose loop runs in its own thread; the calling thread only waits."""

    def __init__(self, model: Any, slots: int) -> None:
        page_size = 16
        generation: Any = GenerationConfig
        pages_per_request = -(-(PROMPT_TOKENS + MAX_TOKENS) // page_size)
        self._manager = model.init_continuous_batching(
            generation_config=generation(
                max_new_tokens=MAX_TOKENS, do_sample=True, temperature=1.0, top_k=0, eos_token_id=-1, pad_token_id=0
            ),
            continuous_batching_config=ContinuousBatchingConfig(
                return_logprobs=True,
                num_blocks=slots * (pages_per_request + 1),
                page_size=page_size,
                max_batch_tokens=512,
                max_requests_per_batch=slots,
                allow_block_sharing=False,
            ),
        )
        self._manager.start()

    def __call__(self, prompts: Int32Array) -> int:
        self._manager.add_requests(prompts.tolist(), max_new_tokens=MAX_TOKENS)
        num_tokens, num_finished, deadline = 0, 0, time.monotonic() + DEADLINE_SECONDS
        while num_finished < len(prompts):
            result = self._manager.get_result(timeout=5)
            if result is not None and result.is_finished():
                num_finished += 1
                num_tokens += len(result.generated_tokens)
            if time.monotonic() > deadline or not self._manager.is_running():
                raise DeadlineExceeded(
                    f"continuous batching finished {num_finished} of {len(prompts)} requests in {DEADLINE_SECONDS} s "
                    "or stopped, so the engines cannot be compared"
                )
        return num_tokens

    def close(self) -> None:
        """End the thread of the manager."""
        self._manager.stop(block=True)


if __name__ == "__main__":
    sys.exit(main())
