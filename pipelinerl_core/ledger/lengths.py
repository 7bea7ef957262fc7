"""The length-bias meter: the lengths of the completions that the tokens of each class belong to.

The meter counts the same events as the token ledger, for tokens whose rows have arrived at the hub, and has the same
invariant:

arrived = trained + masked_stale + dropped_stale + filtered + failed + quarantined + superseded + ready

Tokens of unfinished groups are in no class: their completion lengths are not known yet.
"""

from collections.abc import Mapping
from copy import copy
from dataclasses import dataclass, field

from pipelinerl_core.types import LengthTotals

GENERATED = "generated"
"""Name in totals() of all arrived tokens."""
READY = "ready"
"""Name in totals() of the tokens of ready and reserved groups."""


@dataclass(slots=True)
class _Sums:
    """A mutable LengthTotals."""

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
    """Totals of arrived tokens, and of decided tokens by class."""

    _arrived: _Sums = field(default_factory=_Sums)
    _decided: dict[str, _Sums] = field(default_factory=dict)

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
        return LengthMeter(copy(self._arrived), {name: copy(sums) for name, sums in self._decided.items()})

    @property
    def arrived(self) -> LengthTotals:
        return self._arrived.totals()

    def arrive(self, lengths: LengthTotals) -> None:
        """Count arrived tokens."""
        self._arrived.add(lengths)

    def decide(self, split: Mapping[str, LengthTotals]) -> None:
        """Count decided tokens, by class."""
        for name, lengths in split.items():
            if lengths.num_tokens:
                self._decided.setdefault(name, _Sums()).add(lengths)

    def totals(self) -> dict[str, LengthTotals]:
        """Totals by class, `generated` first; classes without tokens are left out."""
        decided = {name: sums.totals() for name, sums in self._decided.items()}
        ready = self.arrived - sum(decided.values(), LengthTotals())
        classes = {GENERATED: self.arrived, **decided, READY: ready}
        return {name: lengths for name, lengths in classes.items() if lengths.num_tokens}
