"""The arguments that vLLM is started with."""

import ast
import asyncio
import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from unittest.mock import MagicMock

import pytest
import torch

from pipelinerl_core.engine.vllm import core, load
from pipelinerl_core.errors import ConfigError
from pipelinerl_core.models.resolve import load_config
from pipelinerl_core.supervision.role_commands import role_environment

VLLM = ("engine.kind=vllm", "model.dtype=bfloat16")


def settings(*overrides):
    return load.core_settings(Path("/model"), load_config("quickstart", [*VLLM, *overrides]), max_len=64, name="a.1")


def test_on_a_cpu_the_cache_is_small_and_nothing_is_compiled():
    engine_settings = settings()
    assert (
        engine_settings.kv_bytes,
        engine_settings.is_eager,
        engine_settings.batched_tokens,
        engine_settings.prefix_cache,
    ) == (2**30, True, None, True)


def test_on_a_gpu_the_keys_decide_and_a_shared_gpu_leaves_room_for_the_trainer(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    engine_settings = settings()
    assert (engine_settings.kv_bytes, engine_settings.is_eager, engine_settings.memory_share) == (None, False, 0.9)
    assert settings("placement.share_gpu=true").memory_share == 0.4
    assert settings("placement.share_gpu=true", "engine.memory_share=0.3").memory_share == 0.3
    by_turns = settings("placement.share_gpu=turns")
    assert (engine_settings.sleeps, by_turns.sleeps, by_turns.memory_share) == (False, True, 0.75)
    engine_settings = settings("engine.batched_tokens=4096", "engine.prefix_cache=false", "engine.tensor_parallel=2")
    assert (engine_settings.batched_tokens, engine_settings.prefix_cache, engine_settings.tensor_parallel) == (
        4096,
        False,
        2,
    )


def test_turns_on_one_gpu_put_vllm_to_sleep_with_its_requests_which_needs_a_gpu():
    with pytest.raises(ConfigError, match=r"vLLM cannot sleep on a CPU. Set placement\.share_gpu=false"):
        settings("placement.share_gpu=turns")
    calls = []

    class Llm:
        errored = False

        async def sleep(self, level, mode):
            calls.append(("sleep", level, mode))

        async def wake_up(self):
            calls.append("wake_up")

    async def turn():
        sleeping = core.VLLMCore(replace(settings(), sleeps=True))
        sleeping.llm = Llm()
        await sleeping.rest()
        await sleeping.wake()

    asyncio.run(turn())
    assert calls == [("sleep", 1, "keep"), "wake_up"]


def test_workers_are_spawned_and_vllm_is_not_imported_before_its_variables_are_set():
    assert core._ENVIRONMENT["VLLM_WORKER_MULTIPROC_METHOD"] == "spawn"
    for module in (core, load):
        imports = [
            node for node in ast.parse(Path(module.__file__).read_text()).body
            if isinstance(node, ast.Import | ast.ImportFrom)
        ]  # fmt: skip
        names = {alias.name for node in imports for alias in node.names} | {
            getattr(node, "module", "") for node in imports
        }
        assert not [name for name in names if name and name.split(".")[0] == "vllm"]


def test_an_actor_looks_for_a_gpu_without_initializing_cuda():
    """A stand-in for the CUDA runtime raises if torch asks it; the driver's library (NVML) may be asked."""
    program = (
        "import json, torch\n"
        "def initialized(*_): raise AssertionError('CUDA was initialized')\n"
        "torch._C._cuda_getDeviceCount = initialized\n"
        "torch.cuda._device_count_nvml = lambda: 2\n"
        "from pathlib import Path\n"
        "from pipelinerl_core.models.resolve import load_config\n"
        "from pipelinerl_core.engine.vllm.load import core_settings\n"
        "torch.backends.cuda.is_built = lambda: True\n"
        "torch.cuda._is_compiled = lambda: True\n"
        f"found = core_settings(Path('/model'), load_config('quickstart', {list(VLLM)!r}), max_len=64, name='a.1')\n"
        "print(json.dumps([found.is_eager, torch.cuda.is_initialized()]))\n"
    )
    environment = role_environment(1, "") | {"PYTHONPATH": os.environ.get("PYTHONPATH", "")}
    printed = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True, timeout=120
    )
    assert json.loads(printed.stdout) == [False, False]


@pytest.mark.parametrize("share", ["1.0", "-0.1"])
def test_a_share_is_a_share(share):
    with pytest.raises(ConfigError, match=r"engine\.memory_share"):
        settings(f"engine.memory_share={share}")


async def test_every_start_of_an_engine_core_draws_other_noise(monkeypatch):
    """A stand-in for vLLM notes the seeds; tests/integration/test_vllm_engine.py has the real vLLM."""
    seeds = []

    class AsyncLLM:
        @classmethod
        def from_engine_args(cls, arguments, stat_loggers):
            seeds.append(arguments.seed)
            return SimpleNamespace(output_handler=None, errored=False, shutdown=lambda timeout: None,
                                   output_processor=MagicMock())  # fmt: skip

    names = {
        "vllm": {"AsyncEngineArgs": SimpleNamespace},
        "vllm.config": {"WeightTransferConfig": SimpleNamespace},
        "vllm.v1.engine.async_llm": {"AsyncLLM": AsyncLLM},
        "pipelinerl_core.engine.vllm.plugin": {"BACKEND": "pipelinerl"},
    }
    for name, values in names.items():
        module = ModuleType(name)
        vars(module).update(values)
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(core, "_import_vllm", lambda: None)
    monkeypatch.setattr(core.VLLMCore, "_stat_logger", lambda self: None)
    for name in ("a.1", "a.1", "b.1"):
        started = core.VLLMCore(
            load.core_settings(Path("/model"), load_config("quickstart", [*VLLM]), max_len=64, name=name)
        )
        for _ in range(3):
            await started.start()
        await started.close()
    assert seeds[:3] == seeds[3:6], "the noise of an actor epoch depends on its name alone"
    assert len(set(seeds)) == 6
    assert all(0 <= seed < 2**31 for seed in seeds)
