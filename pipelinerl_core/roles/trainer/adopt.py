"""How a trainer comes to where the last commit is: newest checkpoint, and the recorded batches after it once more.

The weights must be those of the commit, to the last bit, where the same arithmetic trains again. On another number of
ranks, another learner or another device it cannot be, nor on any GPU; then the committed weights replace what was
trained again.
"""

import logging
import time
from collections.abc import Callable, Mapping

import torch

from pipelinerl_core.algo.adapters import is_factor
from pipelinerl_core.config import RunConfig
from pipelinerl_core.errors import ChecksumMismatch, MissingObject
from pipelinerl_core.interfaces import Learner, ObjectStore
from pipelinerl_core.roles.trainer.retrain import inexact_steps, replay_steps, restore, weights_sha256
from pipelinerl_core.run.history import read_commit
from pipelinerl_core.run.records import Commit, holds_adapters
from pipelinerl_core.weights.subscribe import WeightSubscriber

logger = logging.getLogger(__name__)


def adopt(
    store: ObjectStore,
    learner: Learner,
    commits: dict[int, str],
    config: RunConfig,
    trained_again: Callable[[int], None],
) -> Commit:
    """Bring the learner to the last commit and return it; `trained_again` is told of every step on the way.

    Raises ChecksumMismatch when the same arithmetic gives other weights than were committed.
    """
    last = max(commits)
    commit = read_commit(store, commits[last])
    restore(store, learner, commits, last)
    begun, start = learner.version, time.monotonic()
    is_alike = max(inexact_steps(store, commits, config), default=0) <= begun
    differs = False
    for replayed in replay_steps(store, learner, commits, last):
        trained_again(replayed.step)
        differs = differs or not replayed.weights_match
        if differs and is_alike:
            raise ChecksumMismatch(
                f"replay of step {replayed.step} gives other weights than commit "
                f"{commits[replayed.step]} recorded: another machine, thread count or library version. "
                "Resume where the run was started"
            )
    if differs:
        _take_committed_weights(store, learner, commit)
    logger.info(
        "resumed at step %d: checkpoint %d, %d steps trained again in %.1f s",
        last, begun, last - begun, time.monotonic() - start,
    )  # fmt: skip
    return commit


def _take_committed_weights(store: ObjectStore, learner: Learner, commit: Commit) -> None:
    """The actors have sampled with the committed weights: go on from these, moments as they were trained again."""
    if commit.manifest is None or commit.manifest.key is None:
        logger.warning(
            "step %d was trained again on other hardware and its weights are not durable: they differ from those "
            "that were committed, by rounding", commit.step,
        )  # fmt: skip
        return
    tensors, values = learner.state()
    if any(is_factor(name) for name in tensors) and not holds_adapters(commit.manifest):
        logger.warning(
            "step %d was trained again on other hardware: its adapters differ from those that were committed, by "
            "rounding, and cannot be taken out of merged weights", commit.step,
        )  # fmt: skip
        return
    committed = WeightSubscriber(store).read(commit.manifest)
    learner.load_state(_with_committed(tensors, committed), values)
    if weights_sha256(learner) != commit.weights_sha256:
        raise ChecksumMismatch(
            f"step {commit.step}: the weights in {commit.manifest.key} are not those that were committed"
        )
    logger.info("step %d was trained again on other hardware; its weights are those that were committed", commit.step)


def _with_committed(
    tensors: Mapping[str, torch.Tensor], committed: Mapping[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """The state with the committed weights; where a float32 master rounds to them, it keeps its lower digits."""
    found = dict(tensors)
    for name, weight in committed.items():
        master = found.get(f"weights.{name}")
        if master is None:
            raise MissingObject(f"weights.{name} is not in the learner's state")
        found[f"weights.{name}"] = torch.where(master.to(weight.dtype) == weight, master, weight.to(master.dtype))
    return found
