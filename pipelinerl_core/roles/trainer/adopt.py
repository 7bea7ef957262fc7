"""How a trainer resumes from the last commit: load the newest checkpoint, train the recorded batches after it again.

If arithmetic and processor are the same, the weights must equal the committed weights to the last bit. With another
number of ranks, another learner, device, processor or version of torch, and on any GPU, they can differ; then the
committed weights replace them.
"""

import logging
import time
from collections.abc import Callable

from pipelinerl_core.config import RunConfig
from pipelinerl_core.errors import ChecksumMismatch, MissingObject
from pipelinerl_core.interfaces import Learner, ObjectStore
from pipelinerl_core.roles.trainer.retrain import inexact_steps, replay_steps, restore, weights_digest
from pipelinerl_core.run.history import read_commit
from pipelinerl_core.run.records import Commit, holds_adapters
from pipelinerl_core.weights.subscribe import WeightSubscriber

logger = logging.getLogger(__name__)


def adopt(
    store: ObjectStore,
    learner: Learner,
    commits: dict[int, str],
    config: RunConfig,
    trained_again: Callable[[int, int], None],
) -> Commit:
    """Bring the learner to the last commit and return the commit. `trained_again` is called with each repeated
    step and the last one.

    Raises ChecksumMismatch if the same arithmetic on the same processor gives other weights than the committed ones.
    """
    last = max(commits)
    commit = read_commit(store, commits[last])
    restore(store, learner, commits, last)
    begun, start = learner.version, time.monotonic()
    # A start that found no checkpoint of its own processor may have trained from an older checkpoint: what follows a
    # checkpoint of another processor need not follow from it.
    must_match = max(inexact_steps(store, commits, config), default=-1) < begun
    differs = False
    if begun < last:
        logger.info("training steps %d to %d again, after the checkpoint of step %d", begun + 1, last, begun)
    for replayed in replay_steps(store, learner, commits, last):
        trained_again(replayed.step, last)
        differs = differs or not replayed.weights_match
        if differs and must_match:
            raise ChecksumMismatch(
                f"replay of step {replayed.step} gives other weights than commit "
                f"{commits[replayed.step]} recorded on the same kind of processor with the same version of torch. A "
                "batch or checkpoint is damaged, or another library has changed. `pipelinerl audit` checks the files"
            )
    if differs:
        _load_committed_weights(store, learner, commit, config)
    logger.info(
        "resumed at step %d: checkpoint %d, %d steps trained again in %.1f s",
        last, begun, last - begun, time.monotonic() - start,
    )  # fmt: skip
    return commit


def _load_committed_weights(store: ObjectStore, learner: Learner, commit: Commit, config: RunConfig) -> None:
    """Load the committed weights, with which the actors have sampled; the optimizer's moments stay as recomputed."""
    if commit.manifest is None or commit.manifest.key is None:
        logger.warning(
            "step %d was trained again on other hardware: its weights differ from the committed weights by rounding, "
            "and the committed weights are not durable", commit.step,
        )  # fmt: skip
        return
    if config.learner.lora_rank and not holds_adapters(commit.manifest):
        logger.warning(
            "step %d was trained again on other hardware: its adapters differ from the committed adapters by "
            "rounding, and adapters cannot be extracted from the committed merged weights", commit.step,
        )  # fmt: skip
        return
    try:
        committed = WeightSubscriber(store).read(commit.manifest)
    except (MissingObject, ChecksumMismatch) as error:
        logger.warning(
            "step %d was trained again on other hardware: its weights differ from the committed weights by rounding, "
            "and the committed weights are lost: %s", commit.step, error,
        )  # fmt: skip
        return
    learner.adopt_weights({name: weight} for name, weight in committed.items())
    if weights_digest(learner) != commit.weights_digest:
        raise ChecksumMismatch(
            f"step {commit.step}: the weights in {commit.manifest.key} differ from the digest of the commit"
        )
    logger.info("step %d was trained again on other hardware; the committed weights are loaded", commit.step)
