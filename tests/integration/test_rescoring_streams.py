"""The alarm on streams of the real engine and learner, with real faults, in both types of weights.

A run of a few steps is recorded in this process: at each version the embedded engine samples under the weights of the
trainer, and under wrong ones, and the learner scores the tokens. The alarm sees comparisons of about 26 tokens, as
with the default trainer.rescore_share in the quickstart. docs/off-policy.md has the figures of longer recordings.
"""

import asyncio
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest

from pipelinerl_core.algo.rescoring import Evidence, HealthyMean
from pipelinerl_core.batching.assemble import assemble_rows
from pipelinerl_core.config import RunConfig
from pipelinerl_core.interfaces import WeightUpdate
from pipelinerl_core.messages import Lease
from pipelinerl_core.models.resolve import load_config
from pipelinerl_core.prompts import build_source
from pipelinerl_core.roles.runtime.inference import build_codec, build_engine
from pipelinerl_core.roles.trainer.learners import build_alone
from pipelinerl_core.rollouts.player import SingleTurns
from pipelinerl_core.rollouts.runner import GroupRunner
from pipelinerl_core.types import Rollout, Score
from tests.models import published_by

pytestmark = pytest.mark.slow

STEPS = 7
FIRST = 4
"""Faults are recorded from this version on: a layer can be three versions old."""
NUM_TOKENS = 26
TARGETS = {"one version old": 8, "a layer three versions old": 15, "temperature off by 5 %": 15}
"""Comparisons within which each fault is an alarm in bfloat16; in float32 three suffice."""

Streams = dict[str, list[list[np.ndarray]]]
"""Kind of stream -> version -> rollout -> engine - trainer, [C] nats."""


class LengthScorer:
    """Rewards that differ within a group, so that training moves the weights."""

    async def score(self, prompt, text, completion=None):
        return Score(len(text) % 3 / 2)

    async def close(self):
        """Nothing to do."""


class Recording:
    """Trains, and samples under right and wrong weights."""

    def __init__(self, dtype: str) -> None:
        self._config = load_config("quickstart", [f"model.dtype={dtype}", "learner.warmup_steps=1"])
        self._learner, self._engine = build_alone(self._config), build_engine(self._config)
        self._source, self._codec = build_source(self._config), build_codec(self._config)
        self._num_groups = self._num_swaps = 0
        self._past = [self._weights()]

    def _weights(self):
        return {name: weight.clone() for name, weight in published_by(self._learner).items()}

    async def _sample(self, weights, num_groups: int, config: RunConfig | None = None) -> list[list[Rollout]]:
        self._num_swaps += 1
        await self._engine.swap(WeightUpdate(version=self._num_swaps, tensors=weights, num_bytes=0))
        runner = GroupRunner(
            {"": SingleTurns(self._engine, LengthScorer(), self._codec, config or self._config)}, actor="actor-0"
        )
        numbers = range(self._num_groups, self._num_groups + num_groups)
        self._num_groups += num_groups
        leases = [
            Lease(group_id=number, attempt=0, lease_id=str(number), deadline_seconds=0.0, group_size=8,
                  prompt=self._source.prompt(number))
            for number in numbers
        ]  # fmt: skip
        return list(await asyncio.gather(*map(runner.run, leases)))

    def _differences(self, groups: list[list[Rollout]]) -> list[np.ndarray]:
        rollouts = [rollout for group in groups for rollout in group]
        scores = self._learner.logprobs_of(rollouts)
        return [
            rollout.rollout_logprobs.astype(np.float64) - score
            for rollout, score in zip(rollouts, scores, strict=True)
        ]

    async def record(self) -> Streams:
        """Kind -> version -> rollouts."""
        hot = load_config("quickstart", [f"model.dtype={self._config.dtype}", "rollouts.temperature=1.05"])
        streams: Streams = {"healthy": [], **{kind: [] for kind in TARGETS}}
        for version in range(STEPS + 1):
            newest = self._past[-1]
            groups = await self._sample(newest, 48)
            streams["healthy"].append(self._differences(groups))
            if version >= FIRST:
                layer = {name: old if ".layers.1." in name else newest[name] for name, old in self._past[-4].items()}
                faults = [
                    await self._sample(self._past[-2], 16),
                    await self._sample(layer, 16),
                    await self._sample(newest, 16, hot),
                ]
                for kind, sampled in zip(TARGETS, faults, strict=True):
                    streams[kind].append(self._differences(sampled))
            stamped = [[restamped(rollout, version) for rollout in group] for group in groups]
            self._learner.step(assemble_rows(version + 1, stamped, self._config).rows)
            self._past.append(self._weights())
        await self._engine.close()
        return streams


def restamped(rollout: Rollout, version: int) -> Rollout:
    return replace(rollout, weight_spans=tuple(span._replace(version=version) for span in rollout.weight_spans))


@pytest.fixture(scope="module", params=["bfloat16", pytest.param("float32", marks=pytest.mark.campaign)])
def recorded(request, prepared_model) -> tuple[str, Streams]:
    return request.param, asyncio.run(Recording(request.param).record())


def comparisons(rollouts: list[np.ndarray], rng: np.random.Generator, num: int) -> Iterator[np.ndarray]:
    """Whole rollouts with NUM_TOKENS tokens together, or a few more; from short ones to long ones: lengths drift."""
    ordered = sorted(rollouts, key=len)
    for number in range(num):
        window = len(ordered) // 2
        start = int((len(ordered) - window) * number / num)
        tokens: list[np.ndarray] = []
        while sum(map(len, tokens)) < NUM_TOKENS:
            tokens.append(ordered[start + rng.integers(window)])
        yield np.concatenate(tokens)


def alarms(dtype: str, healthy_rollouts: list[np.ndarray], stream: Iterator[np.ndarray]) -> Iterator[bool]:
    """Whether the alarm is on, after each comparison."""
    healthy, evidence = HealthyMean(dtype), Evidence()
    healthy.measure({"actor-0": np.concatenate(healthy_rollouts[:200])})
    for differences in stream:
        evidence.add(differences, healthy.norm)
        if not evidence.is_alarm:
            healthy.follow(differences)
        yield evidence.is_alarm


@pytest.mark.parametrize("kind", TARGETS)
def test_a_fault_is_an_alarm_soon_and_its_end_ends_the_alarm(recorded, kind):
    dtype, streams = recorded
    rng, limit = np.random.default_rng(0), TARGETS[kind] if dtype == "bfloat16" else 3
    healthy = [rollout for version in streams["healthy"][FIRST:] for rollout in version]
    for start in range(40):
        wrong = streams[kind][start % len(streams[kind])]
        shuffled = [wrong[index] for index in rng.permutation(len(wrong))]
        stream = [*comparisons(shuffled, rng, limit), *comparisons(healthy, rng, 12)]
        alarmed = list(alarms(dtype, streams["healthy"][0], iter(stream)))
        assert any(alarmed[:limit]), (kind, start)
        assert not alarmed[-1], (kind, start)


def test_ten_thousand_healthy_comparisons_raise_no_alarm(recorded):
    dtype, streams = recorded
    rng = np.random.default_rng(0)
    healthy = [rollout for version in streams["healthy"] for rollout in version]
    assert not any(alarms(dtype, streams["healthy"][0], comparisons(healthy, rng, 10_000)))
