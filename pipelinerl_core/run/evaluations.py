"""Selection of the next weight version to evaluate."""

from collections.abc import Collection, Iterable, Mapping

from pipelinerl_core.config import RunConfig
from pipelinerl_core.run.records import EvalRecord

PASSES = 2
"""An accuracy counts as reached after this many versions at or above it; then later versions need no evaluation."""

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


def evaluation_line(record: EvalRecord) -> str:
    """Example: version 12: accuracy 0.513 (0.426 to 0.598) on 128 prompts, mean length 7.2 tokens, 4.1 s."""
    what = f" on {record.set}" if record.set else ""
    if record.known_accuracy is None:
        return f"version {record.version}{what}: no reward, all {record.errors:,} completions failed; {record.error}"
    interval = "" if record.low is None else f" ({record.low:.3f} to {record.high:.3f})"
    components = ", ".join(f"{name} {mean:.3f}" for name, mean in record.components.items())
    return (
        f"version {record.version}{what}: accuracy {record.accuracy:.3f}{interval} on {record.num_prompts:,} "
        f"prompts, mean length {record.mean_tokens:.1f} tokens, {record.seconds:.1f} s"
        + (f"; {components}" if components else "")
        + (f"; {record.errors:,} completions failed: {record.error}" if record.errors else "")
    )
