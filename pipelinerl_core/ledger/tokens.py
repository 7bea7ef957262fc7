"""The token ledger, with an invariant that holds at all times:

generated = trained + masked_stale + dropped_stale + filtered + failed + quarantined + superseded + in_flight + ready

Generated tokens of an actor epoch: the reported tokens, or the arrived tokens if more have arrived. Tokens that
have not arrived are in flight while the actor is live, and superseded after the actor has left. Tokens of a refused
attempt are superseded as long as no other attempt arrives that has continued them. `ready` includes reserved groups.
Each transition of a group with rows also updates the length-bias meter (lengths.py).
"""

import copy
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from pipelinerl_core.ledger.groups import ActorKey, GroupSummary
from pipelinerl_core.ledger.lengths import LengthMeter
from pipelinerl_core.ledger.order import split_lengths, split_trained
from pipelinerl_core.messages import ActorSample
from pipelinerl_core.types import GroupRef, LengthTotals

DECIDED = ("trained", "masked_stale", "dropped_stale", "filtered", "failed", "quarantined")
"""The classes of decided tokens."""
UNKNOWN_ACTOR = ActorKey("", 0)
"""Account of tokens whose actor is unknown: groups decided before this hub whose rows have not arrived."""
RETIRED_ACTORS = ActorKey("", 1)
"""One account for all retired actor epochs."""


@dataclass(slots=True)
class Account:
    """Tokens of one actor epoch."""

    reported: int = 0
    present: int = 0
    decided: int = 0
    refused: int = 0
    """Of arrived attempts that another attempt supersedes, which may have the same tokens."""
    is_gone: bool = False

    @property
    def generated(self) -> int:
        """Tokens sampled."""
        return max(self.reported, self.present + self.decided)

    @property
    def superseded(self) -> int:
        """Tokens sampled that no attempt with a lease has."""
        left = self.generated - self.present - self.decided
        return left if self.is_gone else min(self.refused, left)

    @property
    def in_flight(self) -> int:
        """Tokens sampled that have not arrived."""
        return self.generated - self.present - self.decided - self.superseded


@dataclass(slots=True)
class TokenLedger:
    """The accounts of all actor epochs, the totals of decided tokens by class, and the length-bias meter."""

    accounts: dict[ActorKey, Account] = field(default_factory=dict)
    decided: dict[str, int] = field(default_factory=lambda: dict.fromkeys(DECIDED, 0))
    lengths: LengthMeter = field(default_factory=LengthMeter)
    retired: set[ActorKey] = field(default_factory=set)
    """Actor epochs whose tokens are in the account RETIRED_ACTORS."""

    @classmethod
    def restore(
        cls,
        tokens: Mapping[str, int],
        actors: Mapping[str, ActorSample],
        lengths: Mapping[str, LengthTotals],
        retired_tokens: Mapping[str, int] = MappingProxyType({}),
    ) -> "TokenLedger":
        """Restore from a commit."""
        ledger = cls(lengths=LengthMeter.restore(lengths))
        if retired_tokens:
            ledger.accounts[RETIRED_ACTORS] = Account(
                reported=retired_tokens["generated"], decided=retired_tokens["decided"], is_gone=True
            )
        for key, sample in actors.items():
            counters = sample.counters
            ledger.accounts[ActorKey.parse(key)] = Account(
                reported=sample.num_tokens, decided=counters.settled_tokens, refused=counters.refused_tokens
            )
        for name in DECIDED:
            ledger.decided[name] = tokens.get(name, 0)
        known = sum(account.decided for account in ledger.accounts.values())
        elsewhere = sum(ledger.decided.values())
        if elsewhere > known:
            ledger.account(UNKNOWN_ACTOR).decided = elsewhere - known
        return ledger

    def account(self, actor: ActorKey) -> Account:
        """The account of an actor epoch, created if needed."""
        return self.accounts.setdefault(RETIRED_ACTORS if actor in self.retired else actor, Account())

    def retire(self, actor: ActorKey) -> None:
        """Add the account of an actor epoch to RETIRED_ACTORS. Totals do not change if the epoch has left.

        Other actors may still deliver groups with tokens that this epoch sampled; these tokens then leave
        `superseded`, as for any actor that has left.
        """
        own = self.accounts.pop(actor, None) if actor not in self.retired else None
        self.retired.add(actor)
        total = self.account(actor)
        total.is_gone = True
        if own is not None:
            total.reported = total.generated + own.generated
            total.present += own.present
            total.decided += own.decided

    def retired_tokens(self) -> dict[str, int]:
        """`generated` and `decided` tokens of the retired actor epochs, for a commit; empty without any."""
        total = self.accounts.get(RETIRED_ACTORS)
        return {} if total is None else {"generated": total.generated, "decided": total.decided}

    def report(self, actor: ActorKey, num_tokens: int) -> None:
        """Set the number of tokens that an actor epoch has reported; never decreases."""
        account = self.account(actor)
        account.reported = max(account.reported, num_tokens)

    def arrive(self, actor: ActorKey, num_tokens: int) -> None:
        """Count arrived tokens; a negative number undoes an arrival."""
        self.account(actor).present += num_tokens

    def decide(self, actor: ActorKey, split: Mapping[str, int]) -> None:
        """Decide arrived tokens of one actor epoch; `split` maps class -> tokens."""
        self._decide({actor: sum(split.values())}, split)

    def arrive_ref(self, ref: GroupRef, sign: int = 1) -> None:
        """Count the arrived tokens of a group, by the actor epoch that sampled them; sign -1 undoes the arrival."""
        for (actor, epoch), num_tokens in ref.shares().items():
            self.arrive(ActorKey(actor, epoch), sign * num_tokens)

    def decide_ref(self, ref: GroupRef, split: Mapping[str, int]) -> None:
        """Decide all tokens of a group that has arrived; `split` maps class -> tokens and adds up to all of them."""
        self._decide({ActorKey(*actor): num_tokens for actor, num_tokens in ref.shares().items()}, split)

    def _decide(self, shares: Mapping[ActorKey, int], split: Mapping[str, int]) -> None:
        for actor, num_tokens in shares.items():
            account = self.account(actor)
            account.present -= num_tokens
            account.decided += num_tokens
        for name, num_tokens in split.items():
            self.decided[name] += num_tokens

    def arrive_group(self, summary: GroupSummary) -> None:
        self.arrive_ref(summary.ref)
        self.lengths.arrive(summary.lengths)

    def decide_group(self, summary: GroupSummary, name: str) -> None:
        """Decide all tokens of an arrived group with rows as one class."""
        self.decide_ref(summary.ref, {name: summary.ref.num_tokens})
        self.lengths.decide({name: summary.lengths})

    def train_group(self, summary: GroupSummary, step: int, max_lag: int) -> None:
        self.decide_ref(summary.ref, split_trained(summary, step, max_lag))
        self.lengths.decide(split_lengths(summary, step, max_lag))

    def refuse(self, summary: GroupSummary) -> None:
        """Count a group that arrives without a valid lease. Another attempt may have continued its tokens."""
        for (actor, epoch), num_tokens in summary.ref.shares().items():
            account = self.account(ActorKey(actor, epoch))
            account.reported = max(account.reported, num_tokens)
            account.refused += num_tokens
        self.lengths.arrive(summary.lengths)
        self.lengths.decide({"superseded": summary.lengths})

    def supersede(self, summary: GroupSummary) -> None:
        """Another attempt takes the place of an arrived group."""
        for (actor, epoch), num_tokens in summary.ref.shares().items():
            account = self.account(ActorKey(actor, epoch))
            account.reported = account.generated
            account.present -= num_tokens
            account.refused += num_tokens
        self.lengths.decide({"superseded": summary.lengths})

    def assign(self, actor: ActorKey, num_tokens: int) -> None:
        """Move decided tokens from UNKNOWN_ACTOR to an actor epoch."""
        self.account(UNKNOWN_ACTOR).decided -= num_tokens
        self.account(actor).decided += num_tokens

    def totals(self) -> dict[str, int]:
        accounts = self.accounts.values()
        settled = sum(account.decided + account.superseded for account in accounts)
        return {
            "generated": sum(account.generated for account in accounts),
            **self.decided,
            "superseded": settled - sum(self.decided.values()),
            "in_flight": sum(account.in_flight for account in accounts),
            "ready": sum(account.present for account in accounts),
        }

    def copy(self) -> "TokenLedger":
        accounts = {actor: copy.copy(account) for actor, account in self.accounts.items()}
        return TokenLedger(accounts, dict(self.decided), self.lengths.copy(), self.retired)
