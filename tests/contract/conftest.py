"""Engines for the contract suite. vLLM's engine cores take 20 s to start, so the tests of a session share them."""

import asyncio
import gc
import threading
import warnings

import pytest

from pipelinerl_core.config import build_config
from pipelinerl_core.engine.embedded import EmbeddedEngine
from pipelinerl_core.interfaces import WeightUpdate
from pipelinerl_core.testing.emulation import emulated_clock
from pipelinerl_core.testing.models import VOCAB_SIZE

DEADLINE_SECONDS = 60
START_SECONDS = 120
# vLLM's attention on a CPU knows no smaller heads than 32.
LONGEST = 256


def _embedded(model, **options):
    return EmbeddedEngine(model, **options)


def _deterministic(model, **options):
    return EmbeddedEngine(model, deterministic=True, **options)


def _emulated(model, **options):
    """With the clock of an accelerator that is hardly slower than this machine."""
    emulation = {"accelerators": 2, "token_seconds": 2e-5, "saturation": 10}
    engine = EmbeddedEngine(model, **options)
    engine.set_clock(emulated_clock(build_config({"emulation": emulation})))
    return engine


# vLLM leaves its ZeroMQ context open.
VLLM_MARKS = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]
EMBEDDED = {"embedded": _embedded, "embedded-deterministic": _deterministic, "embedded-emulated": _emulated}


class EmbeddedBuilder:
    """`await builder(model, slots=..., max_len=..., eos_token_ids=..., kv=...)`; `builder.run(coroutine)`."""

    def __init__(self, kind):
        self._kind = kind

    async def __call__(self, model, *, slots=4, max_len=96, eos_token_ids=(), kv="keep", weight_version=0):
        options = {"slots": slots, "max_len": max_len, "eos_token_ids": eos_token_ids, "kv": kv}
        return EMBEDDED[self._kind](model, weight_version=weight_version, **options)

    def run(self, coroutine):
        return asyncio.run(asyncio.wait_for(coroutine, DEADLINE_SECONDS))


class VLLMCores:
    """Engine cores by architecture, on an event loop of their own."""

    def __init__(self, directory):
        self._directory = directory
        self._cores = {}
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="vllm-cores", daemon=True)
        self._thread.start()

    def run(self, coroutine, seconds=START_SECONDS + DEADLINE_SECONDS):
        return asyncio.run_coroutine_threadsafe(asyncio.wait_for(coroutine, seconds), self._loop).result()

    async def core(self, model):
        """A running engine core for models like this one, and the directory it was started from."""
        key = f"{model.config.model_type}-{model.config.tie_word_embeddings}"
        if key not in self._cores or self._cores[key][0].is_dead:
            self._cores[key] = await self._start(model, self._directory / key)
        return self._cores[key]

    async def _start(self, model, directory):
        from pipelinerl_core.engine.vllm_core import CoreSettings, VLLMCore

        class SharedCore(VLLMCore):
            async def close(self):
                """It outlives the engine: the next test takes it over."""
                if not self.is_dead:
                    await self.resume()

        model.save_pretrained(directory)
        core = SharedCore(
            CoreSettings(
                model=str(directory),
                dtype="float32",
                max_len=LONGEST,
                max_sequences=16,
                seed=0,
                kv_bytes=2**26,
                block_size=32,
                stream_interval=1,
            )
        )
        await core.start()
        return core, directory

    def close(self):
        from pipelinerl_core.engine.vllm_core import VLLMCore

        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ResourceWarning)  # of the ZeroMQ contexts
            for core, _ in self._cores.values():
                self.run(VLLMCore.close(core))
            gc.collect()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(timeout=10)


class VLLMBuilder:
    """As EmbeddedBuilder; one engine at a time on each core."""

    def __init__(self, cores):
        self._cores = cores
        self._engines = []

    async def __call__(self, model, *, slots=4, max_len=96, eos_token_ids=(), kv="keep", weight_version=0):
        from pipelinerl_core.engine.vllm import VLLMEngine
        from pipelinerl_core.engine.vllm_weights import StagedWeights

        core, directory = await self._cores.core(model)
        engine = VLLMEngine(
            core,
            StagedWeights(str(directory)),
            slots=slots,
            max_len=max_len,
            vocab_size=VOCAB_SIZE,
            eos_token_ids=eos_token_ids,
            weight_version=weight_version,
            kv=kv,
        )
        await engine.open()
        tensors = {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}
        await engine.swap(WeightUpdate(version=weight_version, tensors=tensors, num_bytes=1))
        self._engines.append(engine)
        return engine

    def run(self, coroutine):
        async def main():
            try:
                return await asyncio.wait_for(coroutine, START_SECONDS + DEADLINE_SECONDS)
            finally:
                while self._engines:
                    await self._engines.pop().close()

        return self._cores.run(main())


@pytest.fixture(scope="session")
def vllm_cores(tmp_path_factory):
    """Ended with the session."""
    cores = VLLMCores(tmp_path_factory.mktemp("vllm"))
    yield cores
    cores.close()


@pytest.fixture(params=[*sorted(EMBEDDED), pytest.param("vllm", marks=VLLM_MARKS)])
def build(request):
    """Builds an engine of each kind."""
    if request.param == "vllm":
        return VLLMBuilder(request.getfixturevalue("vllm_cores"))
    return EmbeddedBuilder(request.param)


@pytest.fixture(params=sorted(EMBEDDED))
def seeded(request):
    """Builds an engine that draws the noise of a token from the seed of its request and its place alone."""
    return EmbeddedBuilder(request.param)
