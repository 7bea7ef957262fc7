"""Selection of the next weight version to evaluate."""

from collections.abc import Iterable, Mapping

PASSES = 2
"""An accuracy counts as reached after this many versions at or above it; then later versions need no evaluation."""


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
