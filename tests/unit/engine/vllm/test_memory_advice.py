"""A start of vLLM that fails for lack of memory names the keys that change it. The texts are those of vLLM 0.32."""

import asyncio
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch

from pipelinerl_core.engine.vllm import core
from pipelinerl_core.engine.vllm.core import CoreSettings, VLLMCore
from pipelinerl_core.engine.vllm.keeper import CoreKeeper
from pipelinerl_core.errors import EngineError, SwapError

ERRORS = [
    ValueError("No available memory for the cache blocks. Try increasing `gpu_memory_utilization`"),
    ValueError(
        "To serve at least one request with the model's max seq len (512), (2.0 GiB KV cache is needed, which"
    ),
    ValueError("Free memory on device cuda:0 (9.1/79.1 GiB) on startup is less than desired GPU memory utilization"),
    RuntimeError("Engine core initialization failed. See root cause above. Failed core proc(s): {}"),
    torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.30 GiB."),
]


def start_error(error, monkeypatch, **settings):
    def build(self):
        raise error

    monkeypatch.setattr(core, "_import_vllm", lambda: None)
    monkeypatch.setattr(VLLMCore, "_build", build)
    given = {"model": "m", "dtype": "bfloat16", "max_len": 512, "max_sequences": 64, "seed": 0} | settings
    with pytest.raises(EngineError) as raised:
        asyncio.run(VLLMCore(CoreSettings(**given)).start())
    return str(raised.value)


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: str(error)[:20])
def test_a_lack_of_memory_names_the_keys(error, monkeypatch):
    assert start_error(error, monkeypatch, kv_bytes=4 * 2**30) == (
        f"vLLM did not start: {type(error).__name__}: {error}. If the cause is memory, lower engine.memory_share "
        "(0.9) if others use the GPU, set engine.kv_gigabytes (4), lower engine.concurrency (64) or "
        "rollouts.max_tokens (sequences have up to 512 tokens), or raise engine.tensor_parallel (1)"
    )
    assert "engine.kv_gigabytes (unset: what memory_share leaves)" in start_error(error, monkeypatch)


def test_a_swap_after_a_restart_that_failed_does_not_hide_why(monkeypatch, caplog):
    async def main():
        core = VLLMCore(CoreSettings(model="m", dtype="bfloat16", max_len=8, max_sequences=1, seed=0))
        staged = SimpleNamespace(stage=lambda update: Path("x"), current=None, close=lambda: None)
        keeper = CoreKeeper(core, staged, version=1, on_open=lambda: None, on_failure=failures.append)
        keeper.restart("the core died")
        try:
            await keeper.swap(SimpleNamespace(group=0, version=2), clear_cache=False, in_pause=lambda: None)
        finally:
            await keeper.close()

    failures = []
    monkeypatch.setattr(core, "_import_vllm", lambda: None)
    monkeypatch.setattr(VLLMCore, "_build", Mock(side_effect=ERRORS[0]))
    with pytest.raises(SwapError, match="no swap to version 2: vLLM has ended"):
        asyncio.run(main())
    assert "could not be restarted: vLLM did not start: ValueError: No available memory" in failures[0]
    assert failures[0] in caplog.text


def test_other_errors_have_no_advice(monkeypatch):
    assert start_error(ValueError("no such model"), monkeypatch) == "vLLM did not start: ValueError: no such model"
