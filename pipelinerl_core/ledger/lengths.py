"""The length-bias meter: from which completions, and from which part of them, the tokens of each class come.

It books what the token ledger books, for every token whose rows have arrived at the hub, so it closes like that:

arrived = trained + masked_stale + dropped_stale + filtered + failed + superseded + ready

Tokens of groups that are still running are in no class: nobody knows yet how long they will be.
"""

from collections.abc import Mapping
from copy import copy
from dataclasses import dataclass, field

from pipelinerl_core.types import LengthTotals

GENERATED = "generated"
"""Name in totals() of what has arrived."""
READY = "ready"
"""Name in totals() of what is here and undecided: ready and reserved groups."""


@dataclass(slots=True)
class _Sums:
    """LengthTotals that grow in place: every group that arrives or is trained is added to some."""

    num_tokens: int = 0
    first_third: int = 0
    last_third: int = 0
    length_sum: int = 0

    def add(self, lengths: LengthTotals) -> None:
        self.num_tokens += lengths.num_tokens
        self.first_third += lengths.first_third
        self.last_third += lengths.last_third
        self.length_sum += lengths.length_sum

    def totals(self) -> LengthTotals:
        return LengthTotals(
            num_tokens=self.num_tokens,
            first_third=self.first_third,
            last_third=self.last_third,
            length_sum=self.length_sum,
        )


@dataclass(slots=True)
class LengthMeter:
    """Totals of what has arrived, and of what has ended somewhere."""

    _arrived: _Sums = field(default_factory=_Sums)
    _decided: dict[str, _Sums] = field(default_factory=dict)

    @classmethod
    def restore(cls, lengths: Mapping[str, LengthTotals]) -> "LengthMeter":
        """From a commit: what had ended. What had only arrived arrives again from its segment."""
        meter = cls()
        decided = {name: totals for name, totals in lengths.items() if name not in (GENERATED, READY)}
        for totals in decided.values():
            meter.arrive(totals)
        meter.decide(decided)
        return meter

    def copy(self) -> "LengthMeter":
        """An independent copy."""
        return LengthMeter(copy(self._arrived), {name: copy(sums) for name, sums in self._decided.items()})

    @property
    def arrived(self) -> LengthTotals:
        """Of all rows that have arrived."""
        return self._arrived.totals()

    def arrive(self, lengths: LengthTotals) -> None:
        """Rows are here."""
        self._arrived.add(lengths)

    def decide(self, split: Mapping[str, LengthTotals]) -> None:
        """Tokens that are here end, by class."""
        for name, lengths in split.items():
            if lengths.num_tokens:
                self._decided.setdefault(name, _Sums()).add(lengths)

    def totals(self) -> dict[str, LengthTotals]:
        """By class, `generated` first; classes without a token are left out."""
        decided = {name: sums.totals() for name, sums in self._decided.items()}
        ready = self.arrived - sum(decided.values(), LengthTotals())
        classes = {GENERATED: self.arrived, **decided, READY: ready}
        return {name: lengths for name, lengths in classes.items() if lengths.num_tokens}
