"""The parity gate: engine and learner agree on real rollouts; a perturbed head is refused."""

import asyncio
import re

import numpy as np
import pytest
import torch

from pipelinerl_core.config import load_config
from pipelinerl_core.errors import ParityError
from pipelinerl_core.prompts import build_source
from pipelinerl_core.roles.inference import build_codec, build_engine
from pipelinerl_core.roles.replay import build_learner
from pipelinerl_core.roles.trainer import check_parity
from pipelinerl_core.testing.rollout_rows import build_rollout
from pipelinerl_core.types import EngineRequest, Rollout, Sampler
from pipelinerl_core.weights.files import serialize

pytestmark = pytest.mark.slow

TEMPERATURE = 0.7


def sample(config, perturbation: float) -> list[Rollout]:
    """Rollouts of an engine whose head is scaled by 1 + perturbation."""

    async def generate() -> list[Rollout]:
        engine, codec = build_engine(config), build_codec(config)
        with torch.no_grad():
            engine._decoder.model.get_output_embeddings().weight.mul_(1.0 + perturbation)

        async def one(index: int) -> Rollout:
            prompt = codec.encode(build_source(config).prompt(index))
            request = EngineRequest(
                request_id=str(index),
                prompt_token_ids=prompt,
                max_tokens=32,
                sampler=Sampler(seed=index, temperature=TEMPERATURE),
            )
            async for chunk in engine.generate(request):
                if chunk.completion is not None:
                    return as_rollout(prompt, chunk.completion)
            raise AssertionError("no completion")

        try:
            return list(await asyncio.gather(*(one(index) for index in range(40))))
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


def test_the_gate_prints_both_figures_and_refuses_a_perturbed_head(prepared_model, caplog):
    config = load_config("quickstart", [f"rollouts.temperature={TEMPERATURE}"])
    learner = build_learner(config)
    with caplog.at_level("INFO"):
        report = check_parity(learner, sample(config, 0.0), config)
    assert report.num_tokens > 100
    assert report.mean <= 1e-5
    assert report.max <= 1e-3
    assert re.search(r"parity gate: .*mean .* max ", caplog.text)
    with pytest.raises(ParityError, match=r"mean .* max "):
        check_parity(learner, sample(config, 0.01), config)


def test_equal_learners_publish_equal_bytes(prepared_model):
    config = load_config("quickstart")
    assert serialize(build_learner(config).weights()) == serialize(build_learner(config).weights())
