"""Which weight versions of a run are still to be evaluated."""

from collections.abc import Iterable, Mapping

PASSES = 2
"""Evaluated versions at or above a level, after which later ones tell nothing new about when it was reached."""


def has_passed(accuracies: Mapping[int, float], level: float) -> bool:
    """Whether PASSES versions are at or above a level."""
    return sum(accuracy >= level for accuracy in accuracies.values()) >= PASSES


def next_to_evaluate(
    versions: Iterable[int], accuracies: Mapping[int, float], enough: float | None = None
) -> int | None:
    """The earliest version that has none; None when all have, or `enough` was reached PASSES times before it.

    accuracies: version -> accuracy of those already evaluated.
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
