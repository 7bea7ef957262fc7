"""Move sequences into low slots when many of the decoded rows are free.

A step decodes all slots up to the highest running slot, so one long sequence in a high slot makes every step as slow
as a step with all slots. A row of a step costs more than the move of a sequence.
"""

import heapq

import torch

from pipelinerl_core.engine.embedded.attention import SlotMemory
from pipelinerl_core.engine.embedded.slots import SlotTable
from pipelinerl_core.engine.sequence import SlotSequence


def compact(table: SlotTable, memory: SlotMemory, in_slot: dict[int, SlotSequence], free_slots: list[int]) -> None:
    """Fill the lowest slots if more than a quarter of the slots up to the highest running slot are free.

    in_slot: slot -> sequence; free_slots: a heap. Both are updated, and the attribute `slot` of every moved sequence.
    """
    num_running = len(in_slot)
    if not in_slot or 4 * num_running > 3 * (max(in_slot) + 1):
        return
    sources = [slot for slot in in_slot if slot >= num_running]
    targets = [heapq.heappop(free_slots) for _ in sources]
    num_keys = int(table.num_fed[sources].max())
    with torch.inference_mode():
        memory.move(torch.tensor(sources), torch.tensor(targets), num_keys)
    for source, target in zip(sources, targets, strict=True):
        table.move(source, target)
        sequence = in_slot.pop(source)
        in_slot[target] = sequence
        sequence.slot = target
        heapq.heappush(free_slots, source)
