"""Scripted engine, scorer and learner: tokens with versions, and weights as a digest of all that was trained."""

import asyncio
import hashlib
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from pipelinerl_core.errors import EngineError, RewardError, SwapError, TrainingDiverged
from pipelinerl_core.interfaces import TensorMeta, WeightLayout, WeightUpdate
from pipelinerl_core.training.live_state import LiveState
from pipelinerl_core.types import (
    Chunk,
    Completion,
    EngineRequest,
    EngineStats,
    FinishReason,
    Prompt,
    Score,
    SwapReport,
    WeightSpan,
)
from pipelinerl_core.weights.files import take_snapshot
from tests.simulation.primitives import process, world
from tests.simulation.world import Process

TOKEN_SECONDS = 0.02
# A token is its version times this number, plus a smaller number.
_VOCABULARY = 97
# Of each token, by the trainer and by an engine with the weights of its version, nats.
LOGPROB = -0.5
_FOREIGN_LOGPROB = -3.0
# The loss of a step with any of these groups is not finite.
DIVERGING_GROUPS = frozenset({3, 17})
# The scorer fails on texts of these lengths, a 23rd of all.
_FAILING_CHARS = frozenset({3, 33, 53})


def versions_of(token_ids: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """[C] version that has sampled each of [C] tokens."""
    return token_ids // _VOCABULARY


def text_of(token_ids: np.ndarray[Any, Any]) -> str:
    """A text that does not depend on the versions."""
    return "x" * int((token_ids % _VOCABULARY).sum() % 69)


class ScriptedEngine:
    """Samples tokens that depend on the seed of the rollout, their position and the version, a few at a time."""

    def __init__(self, slots: int, count: Callable[[int], None] = lambda _: None) -> None:
        """count: called with the number of tokens after they are sampled."""
        self._process: Process = process()
        self._count = count
        self.weight_version = 0
        self.failure = ""
        """Why the engine has ended for good."""
        self._slots, self._running, self._waiting, self._num_tokens = slots, 0, 0, 0
        self._free = asyncio.Semaphore(slots)
        self._may_run = asyncio.Event()
        self._may_run.set()

    async def generate(self, request: EngineRequest) -> AsyncIterator[Chunk]:
        prior = request.prior
        start = len(prior.token_ids) if prior else 0
        spans = list(prior.weight_spans) if prior else []
        total = 1 + request.sampler.seed % request.max_tokens
        self._waiting += 1
        try:
            await self._free.acquire()
        finally:
            self._waiting -= 1
        self._running += 1
        try:
            token_ids = (np.arange(total, dtype=np.int64) * 7919 + request.sampler.seed) % _VOCABULARY
            ids, logprobs = token_ids.astype(np.int32), np.full(total, LOGPROB, np.float32)
            if prior is not None:
                logprobs[:start], ids[:start] = prior.rollout_logprobs, prior.token_ids
            while True:
                num = min(4, total - start)
                await asyncio.sleep(TOKEN_SECONDS * num)
                await self._may_run.wait()
                self._check()
                version, end = self.weight_version, start + num
                ids[start:end] += _VOCABULARY * version
                if self._process.engine_is_foreign:
                    logprobs[start:end] = _FOREIGN_LOGPROB
                self._sampled(num)
                if spans and spans[-1].version == version:
                    spans[-1] = WeightSpan(version, spans[-1].start, end)
                elif num:
                    spans.append(WeightSpan(version, start, end))
                completion = None
                if end == total:
                    completion = Completion(token_ids=ids, rollout_logprobs=logprobs, weight_spans=tuple(spans),
                                            finish_reason=FinishReason.STOP)  # fmt: skip
                yield Chunk(
                    request_id=request.request_id, token_ids=ids[start:end], rollout_logprobs=logprobs[start:end],
                    weight_version=version, completion=completion,
                )  # fmt: skip
                start = end
                if completion is not None:
                    return
        finally:
            self._running -= 1
            self._free.release()

    def _sampled(self, number: int) -> None:
        self._num_tokens += number
        self._count(number)

    def _check(self) -> None:
        """Raises EngineError once a fault has ended the engine."""
        if self._process.engine_fails:
            self.failure = "out of memory"
            raise EngineError(self.failure)

    async def swap(self, update: WeightUpdate) -> SwapReport:
        await asyncio.sleep(0.001)
        self._check()
        if self._process.failing_swaps:
            self._process.failing_swaps -= 1
            raise SwapError("out of memory")
        self.weight_version = update.version
        return SwapReport(
            version=update.version, pause_seconds=0.001, num_bytes=update.num_bytes, num_running=self._running
        )

    def flush(self) -> None: ...

    def set_pace(self, delay_seconds: float) -> None: ...

    def set_paused(self, is_paused: bool) -> None:
        (self._may_run.clear if is_paused else self._may_run.set)()

    def stats(self) -> EngineStats:
        return EngineStats(running=self._running, waiting=self._waiting, slots=self._slots, kv_usage=0.0,
                           num_tokens=self._num_tokens, num_steps=0, running_seconds=0.0)  # fmt: skip

    async def close(self) -> None: ...


class ScriptedScorer:
    """A reward that depends on the text only."""

    def __init__(self, *, fails: bool) -> None:
        """fails: on a few texts."""
        self._fails = fails

    async def score(self, prompt: Prompt, text: str, completion: Completion | None = None) -> Score:
        await asyncio.sleep(0.001)
        if self._fails and len(text) in _FAILING_CHARS:
            raise RewardError("no reward for this text")
        return Score(float(len(text) % 2))

    async def close(self) -> None: ...


class ScriptedRescorer:
    """Every version gives each token the same probability."""

    def trained_weights(self, weights: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return dict(weights)

    def set_trained_weights(self, weights: Mapping[str, torch.Tensor]) -> None: ...

    def logprobs_of(self, rollouts: Sequence[Any]) -> list[Any]:
        return [np.full(rollout.num_tokens, LOGPROB, np.float32) for rollout in rollouts]


class ScriptedLearner:
    """The weights are a digest of the batches that were trained, in order."""

    rescorer = ScriptedRescorer()

    def __init__(self, dtype: str, *, step_seconds: float = 0.0, diverges: bool = False, processor: str = "") -> None:
        """diverges: on DIVERGING_GROUPS. processor: makes other weights of the same rows."""
        self.version = 0
        self._dtype = dtype
        self._step_seconds, self._diverges, self._processor = step_seconds, diverges, processor
        self._digest = bytes(32)
        self.trainer_logprobs: list[Any] = []

    def step(self, rows: Sequence[Any]) -> dict[str, float]:
        world().sleep(self._step_seconds * (0.5 + world().rng.random()))
        if self._diverges and DIVERGING_GROUPS & {row.rollout.group_id for row in rows}:
            raise TrainingDiverged(f"step {self.version + 1}: the loss is nan")
        self.learn(rows)
        self.trainer_logprobs = [row.rollout.rollout_logprobs for row in rows]
        return {"train/loss": 0.0, "time/compute_seconds": 0.05}

    def learn(self, rows: Sequence[Any]) -> None:
        """A step without its time."""
        digest = hashlib.sha256(self._digest + self._processor.encode())
        for row in rows:
            digest.update(repr((row.rollout.group_id, row.rollout.rollout_index, row.advantage)).encode())
            digest.update(row.rollout.completion_token_ids.tobytes())
        self._digest = digest.digest()
        self.version += 1

    def logprobs_of(self, rollouts: Sequence[Any]) -> list[Any]:
        return [rollout.rollout_logprobs for rollout in rollouts]  # the parity gate passes

    def layout(self) -> WeightLayout:
        # A step changes few elements of `constant`, so that a version in bfloat16 is stored as a difference.
        return WeightLayout((TensorMeta("digest", self._dtype, (32,)), TensorMeta("constant", self._dtype, (4096,))))

    def weights(self, targets: Mapping[str, torch.Tensor]) -> None:
        targets["digest"].copy_(torch.frombuffer(bytearray(self._digest), dtype=torch.uint8))
        targets["constant"].zero_()

    def state(self) -> LiveState:
        return LiveState(take_snapshot(self).tensors, {"version": self.version})

    def adopt_weights(self, files: Iterable[Mapping[str, torch.Tensor]]) -> None:
        (self._digest,) = [_as_digest(tensors["digest"]) for tensors in files if "digest" in tensors]

    def load_state(self, files: Iterable[Mapping[str, torch.Tensor]], values: Mapping[str, Any]) -> None:
        (digest,) = [tensors["digest"] for tensors in files]
        self._digest = _as_digest(digest)
        self.version = values["version"]


def _as_digest(tensor: torch.Tensor) -> bytes:
    return bytes(tensor.to(torch.uint8).numpy().tobytes())
