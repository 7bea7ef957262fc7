"""Measure the overhead of VLLMEngine: tokens per second and the pause of a swap, against bare AsyncLLM.

Run: `python -m benchmarks vllm [--model DIR] [--json]`. Both take turns on one engine core; the best of three rounds
counts. Bare AsyncLLM returns final outputs only. A bare swap is pause_generation(keep), the three calls of the weight
update and resume_generation, with the same file.
"""

import asyncio
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks import report
from benchmarks.engine_load import (
    complete_endlessly,
    count_tokens,
    random_model,
    random_prompts,
    start_vllm,
    update_of,
)
from pipelinerl_core.engine.vllm.core import VLLMCore
from pipelinerl_core.engine.vllm.engine import VLLMEngine
from pipelinerl_core.engine.vllm.weights import StagedWeights
from pipelinerl_core.interfaces import WeightUpdate
from pipelinerl_core.roles.runtime.process import exit_codes
from pipelinerl_core.types import Int32Array

try:
    from vllm import SamplingParams
    from vllm.distributed.weight_transfer.base import WeightTransferUpdateRequest
    from vllm.inputs.engine import tokens_input
    from vllm.sampling_params import RequestOutputKind
except ImportError:
    sys.exit("vLLM is not installed: run `make install ENGINE=vllm`")

SLOTS = 64
NUM_REQUESTS = 256
PROMPT_TOKENS = 12
MAX_TOKENS = 64
ROUNDS = 3
SWAPS = 15
DEADLINE_SECONDS = 300.0

Generate = Callable[[Int32Array], Awaitable[int]]


@exit_codes
def main() -> int:
    """Print a table, or one JSON document with --json."""
    parser = report.parser(__doc__)
    parser.add_argument("--model", type=Path, help="model directory (default: a random Qwen2 of 0.8 M parameters)")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        directory = options.model or Path(temporary)
        if options.model is None:
            random_model("tiny").save_pretrained(temporary)
        result = asyncio.run(asyncio.wait_for(measure(directory), DEADLINE_SECONDS))
    report.write(result, table, as_json=options.json)
    return 0


async def measure(directory: Path) -> dict[str, Any]:
    """Seconds until ready and until the first tokens, tokens per second, and pauses."""
    vocab_size = int(json.loads((directory / "config.json").read_text())["vocab_size"])
    started = time.perf_counter()
    engine, core, staged = await start_vllm(
        directory,
        slots=SLOTS,
        max_len=PROMPT_TOKENS + MAX_TOKENS,
        vocab_size=vocab_size,
        dtype="float32",
        kv_bytes=2**28,
    )
    start_seconds = time.perf_counter() - started
    try:
        prompts = random_prompts(NUM_REQUESTS, PROMPT_TOKENS, vocab_size)
        started = time.perf_counter()
        await count_tokens(engine, prompts[:8], max_tokens=MAX_TOKENS)
        first_seconds = time.perf_counter() - started
        speed = await _speeds(core, engine, prompts)
        pauses = await _pauses(core, engine, staged, prompts, update_of(directory, 0))
        return {
            "start_seconds": start_seconds,
            "first_tokens_seconds": first_seconds,
            **speed,
            **pauses,
            "slots": SLOTS,
            "vllm_preemptions": core.load.num_preemptions,
            **report.machine(),
        }
    finally:
        await engine.close()


def table(result: dict[str, Any]) -> str:
    """The measurement as text."""
    return "\n".join(
        [
            f"vLLM, {result['slots']} slots, {PROMPT_TOKENS} + {MAX_TOKENS} tokens, best of {ROUNDS}, "
            f"{report.conditions(result)}",
            f"engine up after {result['start_seconds']:.1f} s, "
            f"first tokens {result['first_tokens_seconds']:.1f} s later",
            f"tokens/s: bare AsyncLLM {result['bare']:,.0f}, adapter {result['adapter']:,.0f}: {result['ratio']:.2f}",
            f"pause of a swap in ms, median: bare {result['bare_pause_ms']:.1f}, adapter {result['pause_ms']:.1f}: "
            f"{result['pause_ratio']:.2f}",
            "",
        ]
    )


async def _speeds(core: VLLMCore, engine: VLLMEngine, prompts: Int32Array) -> dict[str, float]:
    best = {"bare": 0.0, "adapter": 0.0}
    contestants: dict[str, Generate] = {
        "bare": lambda part: _bare(core, part),
        "adapter": lambda part: count_tokens(engine, part, max_tokens=MAX_TOKENS),
    }
    for generate in contestants.values():
        await generate(prompts)  # warm up
    for _ in range(ROUNDS):
        for name, generate in contestants.items():
            started = time.perf_counter()
            num_tokens = await generate(prompts)
            best[name] = max(best[name], num_tokens / (time.perf_counter() - started))
    return {**best, "ratio": best["adapter"] / best["bare"]}


async def _pauses(
    core: VLLMCore, engine: VLLMEngine, staged: StagedWeights, prompts: Int32Array, update: WeightUpdate
) -> dict[str, float]:
    """Pauses of swaps during generation, through VLLMEngine and bare in turns."""
    staged.stage(update)
    adapter: list[float] = []
    bare: list[float] = []
    load = asyncio.create_task(complete_endlessly(engine, prompts, max_tokens=MAX_TOKENS))
    for version in range(1, SWAPS + 1):
        await asyncio.sleep(0.2)
        adapter.append((await engine.swap(replace(update, version=version))).pause_seconds)
        await asyncio.sleep(0.2)
        bare.append(await _bare_swap(core, str(staged.current), version))
    load.cancel()
    await asyncio.gather(load, return_exceptions=True)
    return {
        "pause_ms": statistics.median(adapter) * 1e3,
        "bare_pause_ms": statistics.median(bare) * 1e3,
        "pause_ratio": statistics.median(adapter) / statistics.median(bare),
    }


async def _bare(core: VLLMCore, prompts: Int32Array) -> int:
    """Tokens of AsyncLLM with final outputs only; the scheduler of vLLM queues requests beyond its slots."""
    params = SamplingParams(
        max_tokens=MAX_TOKENS,
        ignore_eos=True,
        logprobs=0,
        flat_logprobs=True,
        detokenize=False,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )

    async def complete_prompt(index: int, prompt: Int32Array) -> int:
        final = None
        async for output in core.llm.generate(tokens_input(prompt.tolist()), params, f"bare.{index}"):
            final = output
        return len(final.outputs[0].token_ids) if final is not None else 0

    return sum(await asyncio.gather(*(complete_prompt(index, prompt) for index, prompt in enumerate(prompts))))


async def _bare_swap(core: VLLMCore, path: str, version: int) -> float:
    started = time.perf_counter()
    await core.llm.pause_generation(mode="keep", clear_cache=False)
    await core.llm.start_weight_update()
    await core.llm.update_weights(WeightTransferUpdateRequest(update_info={"path": path}))
    await core.llm.finish_weight_update(str(version))
    await core.llm.resume_generation()
    return time.perf_counter() - started


if __name__ == "__main__":
    sys.exit(main())
