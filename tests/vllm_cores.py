"""vLLM's engine cores for tests: they take 20 s to start, so the tests of a session share them."""

import asyncio
import gc
import logging
import threading
import warnings

from pipelinerl_core.interfaces import WeightUpdate
from tests.models import VOCAB_SIZE

DEADLINE_SECONDS = 60
START_SECONDS = 120
LONGEST = 256


class VLLMCores:
    """Engine cores by architecture and settings, on an event loop of their own."""

    def __init__(self, directory):
        self._directory = directory
        self._cores = {}
        # It logs the death of a core with its traceback, in which pytest would keep the core's ZeroMQ context alive.
        logging.getLogger("vllm.v1.engine.async_llm").setLevel(logging.CRITICAL)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="vllm-cores", daemon=True)
        self._thread.start()

    def run(self, coroutine, seconds=START_SECONDS + DEADLINE_SECONDS):
        return asyncio.run_coroutine_threadsafe(asyncio.wait_for(coroutine, seconds), self._loop).result()

    async def core(self, model, **settings):
        """A running engine core for models like this one, and the directory it was started from."""
        of = (f"{model.config.model_type}-{model.config.tie_word_embeddings}", *settings.items())
        key = "-".join(str(part) for part in of)
        if key not in self._cores or self._cores[key][0].is_dead:
            self._cores[key] = await self._start(model, self._directory / key, settings)
        return self._cores[key]

    async def _start(self, model, directory, settings):
        from pipelinerl_core.engine.vllm.core import CoreSettings, VLLMCore

        class SharedCore(VLLMCore):
            async def close(self):
                """It outlives the engine, if it lives: the next test takes it over."""
                if self.is_dead:
                    await super().close()
                else:
                    await self.resume()

        model.save_pretrained(directory)
        core = SharedCore(
            CoreSettings(
                model=str(directory),
                dtype="float32",
                max_len=LONGEST,
                seed=0,
                kv_bytes=2**26,
                block_size=32,
                **({"max_sequences": 16, "stream_interval": 1} | settings),
            )
        )
        await core.start()
        return core, directory

    def close(self):
        from pipelinerl_core.engine.vllm.core import VLLMCore

        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ResourceWarning)  # of the ZeroMQ contexts
            while self._cores:
                self.run(VLLMCore.close(self._cores.popitem()[1][0]))
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(timeout=10)
            self._loop.close()  # what it still holds must go while the filter holds
            gc.collect()


class VLLMBuilder:
    """`await builder(model, slots=..., ...)`; `builder.run(coroutine)`. One engine at a time on each core.

    settings: of the core, where they are not those of the contract suite.
    """

    def __init__(self, cores, **settings):
        self._cores = cores
        self._settings = settings
        self._engines = []

    async def __call__(self, model, *, slots=4, max_len=96, eos_token_ids=(), kv="keep", weight_version=0):
        from pipelinerl_core.engine.vllm.engine import VLLMEngine
        from pipelinerl_core.engine.vllm.weights import StagedWeights

        core, directory = await self._cores.core(model, **self._settings)
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
        """Its result. A core on which something failed is not passed on to the next test."""
        from pipelinerl_core.engine.vllm.core import VLLMCore

        async def main():
            try:
                return await asyncio.wait_for(coroutine, 2 * START_SECONDS)  # a test may kill its core
            except BaseException:
                for engine in self._engines:
                    await VLLMCore.close(engine._keeper.core)
                raise
            finally:
                while self._engines:
                    await self._engines.pop().close()

        return self._cores.run(main(), 2 * START_SECONDS + DEADLINE_SECONDS)
