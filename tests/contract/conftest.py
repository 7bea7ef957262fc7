"""Engines for the contract suite."""

import asyncio

import pytest

from pipelinerl_core.emulation.accelerators import emulated_clock
from pipelinerl_core.engine.embedded.engine import EmbeddedEngine
from pipelinerl_core.models.resolve import build_config
from tests.vllm_cores import DEADLINE_SECONDS, VLLMBuilder


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
# The emulated engine is the embedded one with another clock: tests/unit/emulation/test_accelerators.py.
KINDS = [
    "embedded",
    "embedded-deterministic",
    pytest.param("embedded-emulated", marks=[pytest.mark.slow, pytest.mark.campaign]),
]


class EmbeddedBuilder:
    """`await builder(model, slots=..., max_len=..., eos_token_ids=..., kv=...)`; `builder.run(coroutine)`."""

    def __init__(self, kind):
        self._kind = kind

    async def __call__(self, model, *, slots=4, max_len=96, eos_token_ids=(), kv="keep", weight_version=0):
        options = {"slots": slots, "max_len": max_len, "eos_token_ids": eos_token_ids, "kv": kv}
        return EMBEDDED[self._kind](model, weight_version=weight_version, **options)

    def run(self, coroutine):
        return asyncio.run(asyncio.wait_for(coroutine, DEADLINE_SECONDS))


@pytest.fixture(params=[*KINDS, pytest.param("vllm", marks=VLLM_MARKS)])
def build(request):
    """Builds an engine of each kind."""
    if request.param == "vllm":
        return VLLMBuilder(request.getfixturevalue("vllm_cores"))
    return EmbeddedBuilder(request.param)


@pytest.fixture(params=KINDS)
def seeded(request):
    """Builds an engine that draws the noise of a token from the seed of its request and its place alone."""
    return EmbeddedBuilder(request.param)
