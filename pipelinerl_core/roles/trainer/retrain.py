"""Train recorded batches again, for the restart of a trainer and for `pipelinerl replay`.

The same learner trains the recorded rows in their order. On a CPU, with the same machine and number of
threads, losses and weights are equal to the last bit.
"""

import logging
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from pipelinerl_core.algo.adapters import Adapters
from pipelinerl_core.config import RunConfig
from pipelinerl_core.data.codec import decode_batch
from pipelinerl_core.data.trained import TrainedRows
from pipelinerl_core.errors import ConfigError, MissingObject, StoreError, StoreUnavailable
from pipelinerl_core.interfaces import Learner, ObjectStore
from pipelinerl_core.roles.runtime.device import model_device
from pipelinerl_core.run.history import read_commit, read_epochs
from pipelinerl_core.run.processor import processor
from pipelinerl_core.run.reading import list_keys
from pipelinerl_core.run.records import (
    CheckpointRef,
    commit_key,
    complete_checkpoints,
    holds_adapters,
    parse_commit_key,
)
from pipelinerl_core.weights.checkpoint import load_checkpoint
from pipelinerl_core.weights.files import take_snapshot
from pipelinerl_core.weights.subscribe import WeightSubscriber

logger = logging.getLogger(__name__)

# Largest difference of close losses, relative to the recorded loss or, near 0, to this value.
_CLOSE = 1e-3


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayedStep:
    """One recorded step, trained again."""

    step: int
    metrics: Mapping[str, float]
    """Metrics of the learner."""
    recorded_loss: float
    weights_match: bool
    """Whether the weights after the step have the digest of the commit."""
    is_exact: bool = True
    """Whether the weights must match: this step and all before it had this arithmetic (see `inexact_steps`)."""

    @property
    def verdict(self) -> str:
        """equal: to the last bit; close: the step is not exact and the loss agrees to three digits; else DIFFERS."""
        loss, recorded = self.metrics["train/loss"], self.recorded_loss
        if self.weights_match and loss == recorded:
            return "equal"
        is_close = abs(loss - recorded) <= _CLOSE * max(abs(recorded), _CLOSE)
        return "close" if is_close and not self.is_exact else "DIFFERS"


def weights_digest(learner: Learner) -> str:
    """Digest of the learner's weights in the published form."""
    return take_snapshot(learner).entry.digest


def _checkpoints(store: ObjectStore, commits: Mapping[int, str], step: int) -> Iterator[CheckpointRef]:
    """The checkpoints of commits up to `step`, newest first; then those that the listing lacks and commits name,
    for which it reads at most two commits each. No commit names the checkpoint that a drain writes."""
    keys = {*list_keys(store, "checkpoints"), *list_keys(store, "checkpoints")}  # one wrong listing may lack some
    listed = [
        reference
        for reference in complete_checkpoints(keys)
        if reference.step <= step and commits.get(reference.step) == commit_key(reference.step, reference.epoch)
    ]
    yield from sorted(listed, key=lambda reference: reference.step, reverse=True)
    candidate = step
    while (
        committed := max((committed_step for committed_step in commits if committed_step <= candidate), default=None)
    ) is not None:
        reference = read_commit(store, commits[committed]).checkpoint
        if reference is not None and reference.step == committed and reference not in listed:
            yield reference
        # No commit between the named checkpoint and this commit wrote a checkpoint.
        candidate = min(reference.step if reference is not None else -1, committed - 1)


def restore(store: ObjectStore, learner: Learner, commits: dict[int, str], step: int) -> None:
    """Load the newest intact checkpoint at or before `step`.

    Raises ConfigError if there is none, StoreUnavailable if the store does not answer.
    """
    for reference in _checkpoints(store, commits, step):
        try:
            learner.load_state(*load_checkpoint(store, reference.step, reference.epoch))
        except MissingObject:
            continue  # pruned
        except StoreUnavailable:
            raise  # another start may read the checkpoint
        except StoreError as error:
            logger.error("checkpoint of step %d left out, an older checkpoint is tried: %s", reference.step, error)
            continue
        _check_base(store, learner, commits)
        return
    raise ConfigError(f"{store.url}: no intact checkpoint at or before step {step}, so the step cannot be replayed")


def _check_base(store: ObjectStore, learner: Learner, commits: dict[int, str]) -> None:
    """Raises ConfigError if the run published adapters and the base model is not the model of the run's start."""
    first = read_commit(store, commits[min(commits)]).manifest
    if first is None or first.key is None or not holds_adapters(first):
        return
    try:
        recorded = WeightSubscriber(store).read(first)
    except StoreUnavailable:
        raise
    except StoreError as error:
        logger.error("version %d left out, so the base model is not compared: %s", first.version, error)
        return
    note = learner.layout().note
    assert isinstance(recorded, Adapters)
    assert note is not None
    if recorded.note.base_digest != note.base_digest:
        raise ConfigError(
            f"model.path: the model there has the digest {note.base_digest[:12]}, this run's adapters were "
            f"trained beside {recorded.note.base_digest[:12]}. Put that model there"
        )


def inexact_steps(store: ObjectStore, commits: dict[int, str], config: RunConfig) -> list[int]:
    """Steps that cannot be repeated to the last bit: of another arithmetic or processor, and on a GPU all steps.

    On a GPU the order in which gradients of attention are summed is not defined.
    """
    if model_device(config).type == "cuda":
        return sorted(commits)
    arithmetic = config.arithmetic
    inexact = {
        record.epoch
        for record in read_epochs(store)
        if record.arithmetic != arithmetic or record.processor != processor()
    }
    return [step for step, key in commits.items() if parse_commit_key(key)[1] in inexact]


def replay_steps(store: ObjectStore, learner: Learner, commits: dict[int, str], last: int) -> Iterator[ReplayedStep]:
    """Train the steps after the learner's version, up to `last`, from their recorded batches.

    Raises MissingObject before the first step if the commit of a step is missing.
    """
    steps = range(learner.version + 1, last + 1)
    missing = next((step for step in steps if step not in commits), None)
    if missing is not None:
        later = min((step for step in commits if step > missing), default=last)
        raise MissingObject(
            f"{store.url}: step {missing} has no commit, and step {later} has one. If the commit is lost for good, "
            f"`pipelinerl accept-loss {shlex.quote(store.url)}` lets the run continue after step {missing - 1}"
        )
    trained = TrainedRows(store)
    for step in steps:
        commit = read_commit(store, commits[step])
        metrics = learner.step([row for batch in trained.batches(commit) for row in decode_batch(batch)])
        yield ReplayedStep(
            step=step,
            metrics=metrics,
            recorded_loss=commit.metrics["train/loss"],
            weights_match=weights_digest(learner) == commit.weights_digest,
        )
