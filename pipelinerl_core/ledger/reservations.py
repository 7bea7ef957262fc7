"""The groups of a step between its reservation and its commit."""

from dataclasses import dataclass

from pipelinerl_core.ledger.groups import GroupSummary
from pipelinerl_core.messages import Reserved
from pipelinerl_core.types import GroupRef


@dataclass(slots=True, eq=False)
class Reservation:
    """The reservation of one step. The trainer may reserve step n + 1 while step n is being committed."""

    step: int
    answer: Reserved
    """The answer to the trainer, also for repeated requests."""
    refs: dict[int, GroupRef]
    """group_id -> group."""
    summaries: dict[int, GroupSummary]
    """group_id -> summary, for groups whose rows have arrived since the start of the hub."""
