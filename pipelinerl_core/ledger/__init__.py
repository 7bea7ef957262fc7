"""Accounting of groups: leases, admission, order, fates. Pure logic without input or output; the clock is injected.

    never leased --grant--> leased --rows arrive--> ready --reserve--> reserved --commit--> trained
                              |  ^                    |
                      expiry  v  | attempt + 1        +--> filtered, failed (at once), dropped_stale (at a reserve)
                            queued           reserved +--> quarantined (when the trainer reserves others instead)

Every group below the prompt frontier is in exactly one of these states.
"""

from pipelinerl_core.ledger.groups import ActorKey, Arrival, Grant, GroupSummary, SealedGroup, SyncResult
from pipelinerl_core.ledger.ledger import Ledger

__all__ = ["ActorKey", "Arrival", "Grant", "GroupSummary", "Ledger", "SealedGroup", "SyncResult"]
