"""A group whose rollouts have ended, until it is sent to the hub and written to a segment."""

from dataclasses import dataclass

import pyarrow as pa

from pipelinerl_core.data.codec import encode_rollouts, origins_in
from pipelinerl_core.messages import Lease
from pipelinerl_core.types import GroupRef, Rollout


@dataclass(slots=True, eq=False)
class FinishedGroup:
    """A finished group. The actor keeps it until the group is in a segment and the hub has confirmed both."""

    ref: GroupRef
    lease_id: str
    rows: pa.RecordBatch
    is_sent: bool = False
    seq: int | None = None
    """Number of the segment, once the group is sealed."""


def finished_group(run_id: str, lease: Lease, rollouts: list[Rollout], *, actor: str, epoch: int) -> FinishedGroup:
    """Encode the rollouts of a lease as rows, with the reference that names the group."""
    rows = encode_rollouts(run_id, rollouts)
    ref = GroupRef(
        group_id=lease.group_id,
        attempt=lease.attempt,
        actor=actor,
        actor_epoch=epoch,
        num_rollouts=len(rollouts),
        num_tokens=sum(rollout.num_tokens for rollout in rollouts),
        origins=origins_in(rows),
    )
    return FinishedGroup(ref, lease.lease_id, rows)
