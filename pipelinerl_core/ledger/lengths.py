"""The length-bias meter: from which completions, and from which part of them, the tokens of each class come.

It books what the token ledger books, for every token whose rows have arrived at the hub, so it closes like that:

arrived = trained + masked_stale + dropped_stale + filtered + failed + superseded + ready

Tokens of groups that are still running are in no class: nobody knows yet how long they will be.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from pipelinerl_core.types import LengthTotals

GENERATED = "generated"
"""Name in totals() of what has arrived."""
READY = "ready"
"""Name in totals() of what is here and undecided: ready and reserved groups."""


@dataclass(slots=True)
class LengthMeter:
    """Totals of what has arrived, and of what has ended somewhere."""

    arrived: LengthTotals = field(default_factory=LengthTotals)
    settled: dict[str, LengthTotals] = field(default_factory=dict)

    @classmethod
    def restore(cls, lengths: Mapping[str, LengthTotals]) -> "LengthMeter":
        """From a commit: what had ended. What had only arrived arrives again from its segment."""
        settled = {name: totals for name, totals in lengths.items() if name not in (GENERATED, READY)}
        return cls(arrived=sum(settled.values(), LengthTotals()), settled=settled)

    def copy(self) -> "LengthMeter":
        """An independent copy."""
        return LengthMeter(self.arrived, dict(self.settled))

    def arrive(self, lengths: LengthTotals) -> None:
        """Rows are here."""
        self.arrived += lengths

    def settle(self, split: Mapping[str, LengthTotals]) -> None:
        """Tokens that are here end, by class."""
        for name, lengths in split.items():
            self.settled[name] = self.settled.get(name, LengthTotals()) + lengths

    def totals(self) -> dict[str, LengthTotals]:
        """By class, `generated` first; classes without a token are left out."""
        ready = self.arrived - sum(self.settled.values(), LengthTotals())
        classes = {GENERATED: self.arrived, **self.settled, READY: ready}
        return {name: lengths for name, lengths in classes.items() if lengths.num_tokens}
