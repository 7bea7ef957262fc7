"""The length-bias meter: the lengths of the completions that the tokens of each class belong to.

The meter counts the same events as the token ledger, for tokens whose rows have arrived at the hub, and has the same
invariant:

arrived = trained + masked_stale + dropped_stale + filtered + failed + quarantined + superseded + ready

Tokens of unfinished groups are in no class: their completion lengths are not known yet.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from pipelinerl_core.types import LengthTotals

GENERATED = "generated"
"""Name in totals() of all arrived tokens."""
READY = "ready"
"""Name in totals() of the tokens of ready and reserved groups."""


@dataclass(slots=True)
class LengthMeter:
    """Totals of arrived tokens, and of decided tokens by class."""

    arrived: LengthTotals = field(default_factory=LengthTotals)
    _decided: dict[str, LengthTotals] = field(default_factory=dict)

    @classmethod
    def restore(cls, lengths: Mapping[str, LengthTotals]) -> "LengthMeter":
        """Restore decided tokens from a commit. Undecided tokens arrive again from their segments."""
        meter = cls()
        decided = {name: totals for name, totals in lengths.items() if name not in (GENERATED, READY)}
        for totals in decided.values():
            meter.arrive(totals)
        meter.decide(decided)
        return meter

    def copy(self) -> "LengthMeter":
        return LengthMeter(self.arrived, dict(self._decided))

    def arrive(self, lengths: LengthTotals) -> None:
        """Count arrived tokens."""
        self.arrived += lengths

    def decide(self, split: Mapping[str, LengthTotals]) -> None:
        """Count decided tokens, by class."""
        for name, lengths in split.items():
            if lengths.num_tokens:
                self._decided[name] = self._decided.get(name, LengthTotals()) + lengths

    def totals(self) -> dict[str, LengthTotals]:
        """Totals by class, `generated` first; classes without tokens are left out."""
        ready = self.arrived - sum(self._decided.values(), LengthTotals())
        classes = {GENERATED: self.arrived, **self._decided, READY: ready}
        return {name: lengths for name, lengths in classes.items() if lengths.num_tokens}
