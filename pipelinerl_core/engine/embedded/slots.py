"""The sequences in the slots as arrays: one vectorised update per step; Python loops only over starts and ends.

Positions are absolute: the prompt of slot s is token_ids[s, :prompt_len[s]], its completion so far
token_ids[s, prompt_len[s]:num_known[s]]. The first num_fed[s] known tokens are in the KV memory. A step feeds token
num_fed[s]; if that token is the last known token, the step samples the next.

Shape suffixes: S slots, L max_len, R the slots 0 .. R-1 that are decoded.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pipelinerl_core.engine.embedded.sampling import noise_key, uniforms
from pipelinerl_core.types import EngineRequest, Float32Array, Int32Array

IntArray = NDArray[np.int64]

# Decode attends over the length of the longest sequence, rounded up to this, so that slice sizes repeat.
_KEY_STEP = 16


@dataclass(frozen=True, slots=True, eq=False)
class StepInput:
    """The input of one step: token and position per slot, and the number of attended keys."""

    token_ids_R: IntArray
    positions_R: IntArray
    num_keys: int


@dataclass(frozen=True, slots=True, eq=False)
class StepOutcome:
    """The result of one step."""

    num_sampled: int
    stopped: IntArray
    """Slots whose new token is an end token."""
    exhausted: IntArray
    """Slots that have reached their limit without an end token."""


class SlotTable:
    """State of all slots. With fixed_shape every step decodes all slots over max_len keys."""

    def __init__(self, slots: int, max_len: int, is_eos_V: NDArray[np.bool_], *, fixed_shape: bool) -> None:
        self.slots = slots
        self.max_len = max_len
        self.is_running = np.zeros(slots, np.bool_)
        self.num_fed = np.zeros(slots, np.int64)
        self.num_known = np.zeros(slots, np.int64)
        self._token_ids_SL = np.zeros((slots, max_len), np.int32)
        self._logprobs_SL = np.zeros((slots, max_len), np.float32)
        self._prompt_len = np.zeros(slots, np.int64)
        self._limit = np.zeros(slots, np.int64)
        self._temperature = np.ones(slots, np.float32)
        self._top_p = np.ones(slots, np.float32)
        self._key = np.zeros(slots, np.uint64)
        self._slot_range = np.arange(slots)
        self._is_eos_V = is_eos_V
        self._fixed_shape = fixed_shape

    def admit(self, slot: int, request: EngineRequest, *, num_fed: int) -> None:
        """Put a sequence into a free slot; its first num_fed tokens are or will be in the KV memory."""
        prompt_len = len(request.prompt_token_ids)
        num_known = prompt_len
        self._token_ids_SL[slot, :prompt_len] = request.prompt_token_ids
        if request.prior is not None:
            num_known += len(request.prior.token_ids)
            self._token_ids_SL[slot, prompt_len:num_known] = request.prior.token_ids
            self._logprobs_SL[slot, prompt_len:num_known] = request.prior.rollout_logprobs
        self._prompt_len[slot] = prompt_len
        self.num_known[slot] = num_known
        self.num_fed[slot] = num_fed
        self._limit[slot] = prompt_len + request.max_tokens
        self._temperature[slot] = request.sampler.temperature
        self._top_p[slot] = request.sampler.top_p
        self._key[slot] = noise_key(request.sampler.seed)
        self.is_running[slot] = True

    def feed_prompts_again(self) -> None:
        """Feed the sequences without a completion token from their first token on."""
        self.num_fed[self.slots_without_token()] = 0

    def slots_without_token(self) -> list[int]:
        """Slots of running sequences without a completion token."""
        return [int(slot) for slot in np.flatnonzero(self.is_running & (self.num_known == self._prompt_len))]

    def release(self, slot: int, *, keep: bool = False) -> None:
        """Free a slot. Neutral values replace its state, because steps decode the slot while a higher slot runs.

        keep: the tokens in the KV memory stay there: such steps write behind them.
        """
        self.is_running[slot] = False
        self.num_known[slot] = self._prompt_len[slot] = 0
        if not keep or self.num_fed[slot] >= self.max_len:
            self.num_fed[slot] = 0
        self._temperature[slot] = self._top_p[slot] = 1.0

    def move(self, source: int, target: int) -> None:
        for array in (
            self._token_ids_SL, self._logprobs_SL, self._prompt_len, self.num_known, self.num_fed, self._limit,
            self._temperature, self._top_p, self._key, self.is_running,
        ):  # fmt: skip
            array[target] = array[source]
        self.release(source)

    def completion(self, slot: int) -> tuple[Int32Array, Float32Array]:
        """Copies of the completion tokens and their log-probabilities."""
        begin, end = self._prompt_len[slot], self.num_known[slot]
        return self._token_ids_SL[slot, begin:end].copy(), self._logprobs_SL[slot, begin:end].copy()

    def fed_tokens(self, slot: int) -> Int32Array:
        """The tokens that are in the KV memory (a view)."""
        return self._token_ids_SL[slot, : self.num_fed[slot]]

    def refeed_input(self, position: int) -> StepInput:
        """Input of a fixed-shape pass that feeds the token at `position` of every slot again.

        Keys and values stored beyond the end of a sequence are overwritten before any read.
        """
        token_ids_R = self._token_ids_SL[:, position].astype(np.int64)
        return StepInput(token_ids_R, np.full(self.slots, position, np.int64), self.max_len)

    def step_input(self) -> StepInput:
        """Input of the next step. Free slots below the highest running slot feed token 0 at position 0."""
        if self._fixed_shape:
            num_rows, num_keys = self.slots, self.max_len
        else:
            num_rows = int(np.flatnonzero(self.is_running)[-1]) + 1
            longest = int(self.num_fed[self.is_running].max())
            num_keys = min(self.max_len, (longest // _KEY_STEP + 1) * _KEY_STEP)
        positions_R = self.num_fed[:num_rows].copy()
        token_ids_R = self._token_ids_SL[self._slot_range[:num_rows], positions_R].astype(np.int64)
        return StepInput(token_ids_R, positions_R, num_keys)

    def sampler_inputs(
        self, num_rows: int
    ) -> tuple[NDArray[np.float32], NDArray[np.float32] | None, NDArray[np.float64]]:
        """Temperature, top_p (None when all are 1) and uniform number of each row's next token."""
        top_p = self._top_p[:num_rows]
        uniform = uniforms(self._key[:num_rows], (self.num_known - self._prompt_len)[:num_rows])
        return self._temperature[:num_rows], top_p if (top_p < 1).any() else None, uniform

    def advance(self, token_ids_R: IntArray, logprobs_R: NDArray[np.float32]) -> StepOutcome:
        """Apply a step: the fed token is in memory; the sampled token is kept if the fed token was the last known."""
        num_rows = len(token_ids_R)
        self.num_fed[:num_rows] += self.is_running[:num_rows]
        new = np.flatnonzero(self.is_running[:num_rows] & (self.num_fed[:num_rows] == self.num_known[:num_rows]))
        positions, tokens, logprobs = self.num_known[new], token_ids_R[new], logprobs_R[new]
        if not np.isfinite(logprobs).all():
            raise FloatingPointError("the model's logits are not finite")
        self._token_ids_SL[new, positions] = tokens
        self._logprobs_SL[new, positions] = logprobs
        self.num_known[new] += 1
        is_stopped = self._is_eos_V[tokens]
        is_exhausted = ~is_stopped & (self.num_known[new] >= self._limit[new])
        return StepOutcome(len(new), new[is_stopped], new[is_exhausted])
