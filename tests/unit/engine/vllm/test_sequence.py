"""The versions of a sequence's tokens, before vLLM reports them exactly with the last output."""

import numpy as np

from pipelinerl_core.engine.vllm.core import CoreOutput
from pipelinerl_core.engine.vllm.sequence import VLLMSequence
from pipelinerl_core.types import EngineRequest, Sampler

REQUEST = EngineRequest(request_id="r", prompt_token_ids=np.array([1], np.int32), max_tokens=99, sampler=Sampler())


def versions(events):
    """The version of each output: a number is a swap from that version, None an output."""
    sequence = VLLMSequence(REQUEST, 0)
    sequence.begin(0)
    for event in events:
        if event is None:
            sequence.add(CoreOutput([5], [0.0], None, ()))
        else:
            sequence.swapped(event)
    chunks = [sequence.outbox.get_nowait() for _ in range(sequence.outbox.qsize())]
    return [chunk.weight_version for chunk in chunks]


async def test_tokens_that_vllm_held_back_over_two_swaps_are_not_called_newer_than_they_are():
    assert versions([None, 0, 1, None]) == [0, 0]


async def test_an_output_between_two_swaps_shows_that_later_tokens_are_of_the_weights_between():
    assert versions([None, 0, None, 1, None, 2, None]) == [0, 0, 1, 2]
    assert versions([None, 0, 1, None, 2, None]) == [0, 0, 2]
