"""Selection of the next weight version to evaluate."""

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import chain

from pipelinerl_core.config import RunConfig
from pipelinerl_core.run.records import EvalRecord

PASSES = 2
"""An accuracy counts as reached after this many versions at or above it; then later versions need no evaluation."""

_NUM_SHOWN = 12
SCHEDULED = "scheduled"
"""--version of the evaluator that runs beside training."""


def next_scheduled(config: RunConfig, committed: Collection[int], evaluated: Collection[int]) -> int | None:
    """The next version of an evaluator beside training; None: none is due yet.

    Version 0 first, the last version last, the newest due version in between, if no newer version is evaluated.
    """
    last = config.trainer.steps
    for step in (0, last):
        if step in committed and step not in evaluated:
            return step
    newest = max(evaluated, default=0)
    return max((step for step in committed if step > newest and config.evaluates(step)), default=None)


def best_version(evals: Mapping[int, EvalRecord]) -> int | None:
    """The version with the highest lower end of its held-out interval, because evaluations during training have fewer
    prompts; None without an interval. Evaluations whose tokens are of several versions do not count."""
    exact = [own for own in evals.values() if own.low is not None and own.last_version <= own.version]
    return max(exact, key=lambda own: (own.low, -own.version)).version if exact else None


def has_passed(accuracies: Mapping[int, float], level: float) -> bool:
    """Whether at least PASSES versions are at or above an accuracy `level`."""
    return sum(accuracy >= level for accuracy in accuracies.values()) >= PASSES


def next_to_evaluate(
    versions: Iterable[int], accuracies: Mapping[int, float], enough: float | None = None
) -> int | None:
    """The earliest version without an accuracy; None if there is none, or if PASSES earlier versions reach `enough`.

    accuracies: version -> accuracy, of the evaluated versions.
    Example: of versions 0, 5, 10, 15 with {0: 0.2, 5: 0.5, 10: 0.6}, 15 is next; with enough=0.5 nothing is.
    """
    passes = 0
    for version in sorted(versions):
        if enough is not None and passes == PASSES:
            return None
        if version not in accuracies:
            return version
        passes += enough is not None and accuracies[version] >= enough
    return None


def weighted_mean(records: Sequence[EvalRecord], weights: Mapping[str, float]) -> EvalRecord:
    """The record of a mixture from the records of its parts: means by weight, over the parts that have a reward.

    The interval of the mean follows from the intervals of the parts, which are independent: its lower half is the
    root of the sum of the squared, weighted lower halves (MOVER; Zou, Donner: Statistics in Medicine 2008).
    """
    scored = [record for record in records if record.known_accuracy is not None and record.num_prompts] or list(
        records
    )
    total = sum(weights[record.set] for record in scored)
    shares = [weights[record.set] / total for record in scored]

    def mean(values: Iterable[float | None]) -> float | None:
        known = [share * value for share, value in zip(shares, values, strict=True) if value is not None]
        return sum(known) if len(known) == len(scored) else None

    def half(ends: Iterable[float | None]) -> float | None:
        known = [(share * (record.accuracy - end)) ** 2
                 for share, record, end in zip(shares, scored, ends, strict=True) if end is not None]  # fmt: skip
        return math.sqrt(sum(known)) if len(known) == len(scored) else None

    accuracy = mean(record.accuracy for record in scored) or 0.0
    below, above = half(record.low for record in scored), half(record.high for record in scored)
    failed = next((record for record in records if record.error), None)
    return EvalRecord(
        version=min(record.version for record in records),
        last_version=max(record.last_version for record in records),
        num_prompts=sum(record.num_prompts for record in records),
        num_samples=records[0].num_samples,
        temperature=records[0].temperature,
        top_p=records[0].top_p,
        accuracy=accuracy,
        low=None if below is None else accuracy - below,
        high=None if above is None else accuracy + above,
        best=mean(record.best for record in scored),
        greedy=mean(record.greedy for record in scored),
        mean_tokens=mean(record.mean_tokens for record in scored) or 0.0,
        errors=sum(record.errors for record in records),
        seconds=sum(record.seconds for record in records),
        finished_at=max(record.finished_at for record in records),
        samples=tuple(chain.from_iterable(zip(*(record.samples for record in records), strict=False)))[:_NUM_SHOWN],
        error=f"mixture.{failed.set}: {failed.error}" if failed else "",
    )


def evaluation_line(record: EvalRecord) -> str:
    """Example: version 12: accuracy 0.513 (0.426 to 0.598) on 128 prompts, mean length 7.2 tokens, 4.1 s."""
    on_set = f" on {record.set}" if record.set else ""
    if record.known_accuracy is None:
        return (
            f"version {record.version}{on_set}: no reward, all {record.errors:,} completions failed; {record.error}"
        )
    interval = "" if record.low is None else f" ({record.low:.3f} to {record.high:.3f})"
    components = ", ".join(f"{name} {mean:.3f}" for name, mean in record.components.items())
    kind = "reward" if components else "accuracy"  # as in the summary (`held_out_name`)
    return (
        f"version {record.version}{on_set}: {kind} {record.accuracy:.3f}{interval} on {record.num_prompts:,} "
        f"prompts, mean length {record.mean_tokens:.1f} tokens, {record.seconds:.1f} s"
        + (f"; {components}" if components else "")
        + (f"; {record.errors:,} completions failed: {record.error}" if record.errors else "")
    )
