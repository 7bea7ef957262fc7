"""Train recorded batches again: how a trainer restarts, and what `pipelinerl replay` repeats.

The rows of batches/ are trained in their order by the same learner, so that on the same machine, with the same
threads, losses and weights are equal bit for bit on a CPU.
"""

import hashlib
import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from pipelinerl_core.algo.adapters import Adapters
from pipelinerl_core.config import RunConfig
from pipelinerl_core.data.codec import decode_batch, from_segment
from pipelinerl_core.errors import ChecksumMismatch, ConfigError, MissingObject, StoreError
from pipelinerl_core.interfaces import Learner, ObjectStore
from pipelinerl_core.roles.runtime.device import model_device
from pipelinerl_core.run.history import read_commit, read_epochs
from pipelinerl_core.run.records import Commit, holds_adapters, parse_commit_key
from pipelinerl_core.training.checkpoint import load_checkpoint
from pipelinerl_core.types import FileEntry, TrainingRow
from pipelinerl_core.weights.files import serialize
from pipelinerl_core.weights.subscribe import WeightSubscriber

logger = logging.getLogger(__name__)

# Losses of the same step on other hardware, relative to their size, or to this where they are nearly 0.
_CLOSE = 1e-3


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayedStep:
    """One recorded step, trained again."""

    step: int
    metrics: Mapping[str, float]
    """Of the learner."""
    recorded_loss: float
    weights_match: bool
    """Whether the weights after it have the sha256 of the commit."""
    is_exact: bool = True
    """Whether they must: this step and those before it were computed as they are here (see `inexact_steps`)."""

    @property
    def verdict(self) -> str:
        """equal: to the last bit; close: where that cannot be, the loss to the third digit; else DIFFERS."""
        found, recorded = self.metrics["train/loss"], self.recorded_loss
        if self.weights_match and found == recorded:
            return "equal"
        is_close = abs(found - recorded) <= _CLOSE * max(abs(recorded), _CLOSE)
        return "close" if is_close and not self.is_exact else "DIFFERS"


def weights_sha256(learner: Learner) -> str:
    """sha256 of the learner's weights as they would be published."""
    return hashlib.sha256(serialize(learner.weights())).hexdigest()


def read_rows(store: ObjectStore, commit: Commit) -> list[TrainingRow]:
    """The rows of a committed step, verified, in training order."""
    return [row for entry in commit.batches for row in _read_batch(store, entry)]


def _read_batch(store: ObjectStore, entry: FileEntry) -> list[TrainingRow]:
    data = store.get(entry.name)
    found = hashlib.sha256(data).hexdigest()
    if found != entry.sha256:
        raise ChecksumMismatch(f"{entry.name}: sha256 {found[:12]}, its commit says {entry.sha256[:12]}")
    return [row for batch in from_segment(data) for row in decode_batch(batch)]


def restore(store: ObjectStore, learner: Learner, commits: dict[int, str], step: int) -> None:
    """Load the newest whole checkpoint at or before `step`; one that is damaged costs a longer replay, no more."""
    for candidate in sorted((committed for committed in commits if committed <= step), reverse=True):
        reference = read_commit(store, commits[candidate]).checkpoint
        if reference is None or reference.step != candidate:
            continue  # an earlier commit is the one that made it
        try:
            tensors, values = load_checkpoint(store, reference.step, reference.epoch)
        except MissingObject:
            continue  # pruned
        except StoreError as error:
            logger.error("checkpoint of step %d left out, an older one must do: %s", reference.step, error)
            continue
        _check_base(store, learner, commits)
        learner.load_state(tensors, values)
        return
    raise ConfigError(f"{store.url}: no whole checkpoint at or before step {step}; it cannot be replayed")


def _check_base(store: ObjectStore, learner: Learner, commits: dict[int, str]) -> None:
    """Raises ConfigError when the run published adapters, and the base model is another than at its start."""
    first = read_commit(store, commits[min(commits)]).manifest
    if first is None or first.key is None or not holds_adapters(first):
        return
    try:
        recorded = WeightSubscriber(store).read(first)
    except StoreError as error:
        logger.error("version %d left out, so the base model is not compared: %s", first.version, error)
        return
    weights = learner.weights()
    assert isinstance(recorded, Adapters)
    assert isinstance(weights, Adapters)
    if recorded.note.base_sha256 != weights.note.base_sha256:
        raise ConfigError(
            f"model.path: the model there has sha256 {weights.note.base_sha256[:12]}, this run's adapters were "
            f"trained beside {recorded.note.base_sha256[:12]}. Put that model there"
        )


def inexact_steps(store: ObjectStore, commits: dict[int, str], config: RunConfig) -> list[int]:
    """Steps that cannot be trained again to the last bit: computed with another arithmetic, or any on a GPU.

    Gradients of attention are added up there in whatever order they come. Old epochs do not say how they computed,
    and are believed.
    """
    if model_device(config).type == "cuda":
        return sorted(commits)
    by_epoch = {record.epoch: record.arithmetic for record in read_epochs(store)}
    arithmetic = config.arithmetic
    return [
        step for step, key in commits.items() if by_epoch.get(parse_commit_key(key)[1], {}) not in ({}, arithmetic)
    ]


def replay_steps(store: ObjectStore, learner: Learner, commits: dict[int, str], last: int) -> Iterator[ReplayedStep]:
    """Train the steps after the learner's version, up to `last`, from their recorded batches.

    Raises MissingObject, before any of them, when the commit of one is not there.
    """
    steps = range(learner.version + 1, last + 1)
    missing = next((step for step in steps if step not in commits), None)
    if missing is not None:
        later = min((step for step in commits if step > missing), default=last)
        raise MissingObject(
            f"{store.url}: step {missing} has no commit, and step {later} has one: an older version of pipelinerl "
            f"went on after a commit that failed. Delete commits/{later:08d}.* and all later ones, then resume: the "
            f"run goes on after step {missing - 1}"
        )
    for step in steps:
        commit = read_commit(store, commits[step])
        metrics = learner.step(read_rows(store, commit))
        yield ReplayedStep(
            step=step,
            metrics=metrics,
            recorded_loss=commit.metrics["train/loss"],
            weights_match=weights_sha256(learner) == commit.weights_sha256,
        )
