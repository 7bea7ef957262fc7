"""The token ledger, which closes at all times:

generated = trained + masked_stale + dropped_stale + filtered + failed + superseded + in_flight + ready

An actor epoch has generated what it says it sampled, or more if more of it has arrived. What has neither left nor is
present is in flight while the actor lives, and superseded once it is gone. `ready` holds reserved groups too.
The length-bias meter (lengths.py) goes along: whatever moves a group with its rows moves its lengths.
"""

import copy
from collections.abc import Mapping
from dataclasses import dataclass, field

from pipelinerl_core.ledger.groups import ActorKey, GroupSummary
from pipelinerl_core.ledger.lengths import LengthMeter
from pipelinerl_core.ledger.order import split_lengths, split_trained
from pipelinerl_core.run.records import ActorSample
from pipelinerl_core.types import GroupRef, LengthTotals

DECIDED = ("trained", "masked_stale", "dropped_stale", "filtered", "failed", "superseded")
"""Where tokens end."""
DECIDED_COUNTER = "settled_tokens"
"""Counter of an ActorSample: tokens of this actor epoch that had ended somewhere."""
UNKNOWN_ACTOR = ActorKey("", 0)
"""Owner of tokens whose actor is not known: groups decided before this hub, whose rows it has not seen."""


@dataclass(slots=True)
class Account:
    """Tokens of one actor epoch."""

    reported: int = 0
    present: int = 0
    decided: int = 0
    is_gone: bool = False

    @property
    def generated(self) -> int:
        """Tokens sampled."""
        return max(self.reported, self.present + self.decided)

    @property
    def in_flight(self) -> int:
        """Tokens sampled that have not arrived."""
        return self.generated - self.present - self.decided


@dataclass(slots=True)
class TokenLedger:
    """Accounts of every actor epoch, the totals of what has ended, and the lengths of both."""

    accounts: dict[ActorKey, Account] = field(default_factory=dict)
    decided: dict[str, int] = field(default_factory=lambda: dict.fromkeys(DECIDED, 0))
    lengths: LengthMeter = field(default_factory=LengthMeter)

    @classmethod
    def restore(
        cls, tokens: Mapping[str, int], actors: Mapping[str, ActorSample], lengths: Mapping[str, LengthTotals]
    ) -> "TokenLedger":
        """From a commit. Tokens of gone actors follow from their accounts and are not taken over twice."""
        ledger = cls(lengths=LengthMeter.restore(lengths))
        for key, sample in actors.items():
            decided = int(sample.counters.get(DECIDED_COUNTER, 0))
            ledger.accounts[ActorKey.parse(key)] = Account(reported=sample.num_tokens, decided=decided)
        for name in DECIDED[:-1]:
            ledger.decided[name] = tokens.get(name, 0)
        known = sum(account.decided for account in ledger.accounts.values())
        elsewhere = sum(ledger.decided.values())
        ledger.decided["superseded"] = max(0, known - elsewhere)
        if elsewhere > known:
            ledger.account(UNKNOWN_ACTOR).decided = elsewhere - known
        return ledger

    def account(self, actor: ActorKey) -> Account:
        """The account of an actor epoch, opened on demand."""
        return self.accounts.setdefault(actor, Account())

    def report(self, actor: ActorKey, num_tokens: int) -> None:
        """An actor says what it has sampled so far."""
        account = self.account(actor)
        account.reported = max(account.reported, num_tokens)

    def arrive(self, actor: ActorKey, num_tokens: int) -> None:
        """Tokens are here; a negative number takes them back."""
        self.account(actor).present += num_tokens

    def decide(self, actor: ActorKey, split: Mapping[str, int]) -> None:
        """Tokens of one actor epoch that are here end."""
        self._decide({actor: sum(split.values())}, split)

    def arrive_ref(self, ref: GroupRef, sign: int = 1) -> None:
        """The tokens of a group are here, each as its own actor epoch's; sign -1 takes them back."""
        for (actor, epoch), num_tokens in ref.shares().items():
            self.arrive(ActorKey(actor, epoch), sign * num_tokens)

    def decide_ref(self, ref: GroupRef, split: Mapping[str, int]) -> None:
        """The tokens of a group, all of which are here, end; `split` adds up to them."""
        self._decide({ActorKey(*actor): num_tokens for actor, num_tokens in ref.shares().items()}, split)

    def _decide(self, shares: Mapping[ActorKey, int], split: Mapping[str, int]) -> None:
        for actor, num_tokens in shares.items():
            account = self.account(actor)
            account.present -= num_tokens
            account.decided += num_tokens
        for name, num_tokens in split.items():
            self.decided[name] += num_tokens

    def arrive_group(self, summary: GroupSummary) -> None:
        """A group is here with its rows."""
        self.arrive_ref(summary.ref)
        self.lengths.arrive(summary.lengths)

    def decide_group(self, summary: GroupSummary, name: str) -> None:
        """A group that is here with its rows ends as a whole."""
        self.decide_ref(summary.ref, {name: summary.ref.num_tokens})
        self.lengths.decide({name: summary.lengths})

    def train_group(self, summary: GroupSummary, step: int, max_lag: int) -> None:
        """A group that is here with its rows is trained at `step`, as far as it is live."""
        self.decide_ref(summary.ref, split_trained(summary, step, max_lag))
        self.lengths.decide(split_lengths(summary, step, max_lag))

    def supersede(self, summary: GroupSummary) -> None:
        """A group arrived that nobody wants."""
        self.arrive_group(summary)
        self.decide_group(summary, "superseded")

    def assign(self, actor: ActorKey, num_tokens: int) -> None:
        """Tokens of UNKNOWN_ACTOR that ended turn out to be this actor's."""
        self.account(UNKNOWN_ACTOR).decided -= num_tokens
        self.account(actor).decided += num_tokens

    def totals(self) -> dict[str, int]:
        """The ledger, by name."""
        accounts = self.accounts.values()
        lost = sum(account.in_flight for account in accounts if account.is_gone)
        return {
            "generated": sum(account.generated for account in accounts),
            **self.decided,
            "superseded": self.decided["superseded"] + lost,
            "in_flight": sum(account.in_flight for account in accounts if not account.is_gone),
            "ready": sum(account.present for account in accounts),
        }

    def copy(self) -> "TokenLedger":
        """An independent copy."""
        accounts = {actor: copy.copy(account) for actor, account in self.accounts.items()}
        return TokenLedger(accounts, dict(self.decided), self.lengths.copy())
