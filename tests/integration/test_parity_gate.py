"""The parity gate: engine and learner agree on real rollouts; a perturbed head is refused."""

import asyncio
import re

import numpy as np
import pytest
import torch

from pipelinerl_core.errors import ParityError
from pipelinerl_core.models.resolve import load_config
from pipelinerl_core.prompts import build_source
from pipelinerl_core.roles.runtime.inference import build_codec, build_engine, open_engine
from pipelinerl_core.roles.trainer.learners import build_alone
from pipelinerl_core.roles.trainer.main import check_parity
from pipelinerl_core.types import Rollout
from tests.builders import completion_of, engine_request
from tests.models import file_of, published_by
from tests.rollout_rows import build_rollout

pytestmark = pytest.mark.slow

TEMPERATURE = 0.7


async def perturbed(config, perturbation: float):
    """The embedded engine, its head scaled by 1 + perturbation."""
    engine = build_engine(config)
    with torch.no_grad():
        engine._decoder.model.get_output_embeddings().weight.mul_(1.0 + perturbation)
    return engine


def sample(config, start) -> list[Rollout]:
    """Rollouts of the engine that `await start()` gives."""

    async def generate() -> list[Rollout]:
        engine, codec = await start(), build_codec(config)

        async def sample_rollout(index: int) -> Rollout:
            prompt = codec.encode(build_source(config).prompt(index))
            request = engine_request(str(index), prompt=prompt, max_tokens=32, seed=index, temperature=TEMPERATURE)
            return as_rollout(prompt, await completion_of(engine, request))

        try:
            return list(await asyncio.gather(*(sample_rollout(index) for index in range(40))))
        finally:
            await engine.close()

    return asyncio.run(generate())


def as_rollout(prompt, completion) -> Rollout:
    from dataclasses import replace

    return replace(
        build_rollout(np.random.default_rng(0), num_tokens=len(completion.token_ids)),
        prompt_token_ids=prompt,
        completion_token_ids=completion.token_ids,
        rollout_logprobs=completion.rollout_logprobs,
        weight_spans=completion.weight_spans,
        loss_mask=np.ones(len(completion.token_ids), dtype=np.bool_),
    )


def gate(learner, rollouts, config):
    return check_parity(rollouts, learner.logprobs_of(rollouts), config)


def test_the_gate_prints_both_figures_and_refuses_a_perturbed_head(prepared_model, caplog):
    config = load_config("quickstart", [f"rollouts.temperature={TEMPERATURE}"])
    learner = build_alone(config)
    with caplog.at_level("INFO"):
        report = gate(learner, sample(config, lambda: perturbed(config, 0.0)), config)
    assert report.num_tokens > 100
    assert report.mean <= 1e-5
    assert report.max <= 1e-3
    assert re.search(r"parity gate: .*mean .* max ", caplog.text)
    with pytest.raises(ParityError, match=r"mean .* max "):
        gate(learner, sample(config, lambda: perturbed(config, 0.01)), config)


VLLM_MARKS = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # see tests/contract
# Far below the bounds of a real model: the measured figures of this small model are below a fifth of these.
EXPECTED = {"float32": (5e-5, 5e-3), "bfloat16": (0.01, 0.25)}


@pytest.mark.parametrize("dtype", [pytest.param("float32", marks=pytest.mark.campaign), "bfloat16"])
@pytest.mark.parametrize("kind", ["embedded", pytest.param("vllm", marks=VLLM_MARKS)])
def test_every_engine_passes_with_every_type_of_weights(prepared_model, tmp_path, kind, dtype):
    overrides = [f"engine.kind={kind}", f"model.dtype={dtype}", f"rollouts.temperature={TEMPERATURE}"]
    config = load_config("quickstart", [*overrides, *(["engine.kv_gigabytes=0.25"] if kind == "vllm" else [])])
    rollouts = sample(config, lambda: open_engine(config, run_id=tmp_path.name, name="actor-0"))
    report = gate(build_alone(config), rollouts, config)
    print(f"{kind} {dtype}: mean {report.mean:.2g} max {report.max:.2g} over {report.num_tokens} tokens")  # noqa: T201
    mean, largest = EXPECTED[dtype]
    assert 0 < report.mean <= mean
    assert report.max <= largest


def test_equal_learners_publish_equal_bytes(prepared_model):
    config = load_config("quickstart")
    assert file_of(published_by(build_alone(config))) == file_of(published_by(build_alone(config)))
