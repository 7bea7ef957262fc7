"""The groups of a step, from the reserve that took them to the commit that forgets them."""

from dataclasses import dataclass

from pipelinerl_core.ledger.groups import GroupSummary
from pipelinerl_core.messages import Reserved
from pipelinerl_core.types import GroupRef


@dataclass(slots=True, eq=False)
class Reservation:
    """One step. Several may stand at once: the trainer reserves step n + 1 while step n is being committed."""

    step: int
    answer: Reserved
    """What the trainer was told, and is told whenever it asks again."""
    refs: dict[int, GroupRef]
    """group_id -> group."""
    summaries: dict[int, GroupSummary]
    """group_id -> summary; without those whose rows have not come since this hub started."""
