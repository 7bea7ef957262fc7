"""Trains the recorded groups of a run again with another loss or learner: one arm of a what-if replay.

    batches/ of the run --rows--> advantages, weights, masks of the arm --> learner --> commits/, weights/ of the arm

The arm is a run of its own (docs/what-if.md); the objects of the recorded run are only read. An arm that was stopped
begins again: its new epoch adopts no commit.
"""

import logging
import time
from collections.abc import Iterator
from functools import partial

from pipelinerl_core.batching.assemble import reassemble_rows
from pipelinerl_core.errors import ConfigError
from pipelinerl_core.interfaces import Learner
from pipelinerl_core.roles.trainer.learners import Learners, open_learners
from pipelinerl_core.roles.trainer.retrain import ReplayedStep, replay_steps, restore
from pipelinerl_core.run.context import RunContext
from pipelinerl_core.run.history import counted_commit_keys, take_epoch, write_commit
from pipelinerl_core.run.records import ADAPTERS_FILE, REPLAY_KEY, WEIGHTS_FILE, Commit, ReplayOf, ReplayRecord
from pipelinerl_core.types import WeightManifest
from pipelinerl_core.weights.publish import WeightPublisher

logger = logging.getLogger(__name__)

# Metrics of the recorded process and of its weights, which are not those of the arm.
_OF_THE_PROCESS = ("time/", "weights/", "swap/")


def train_arm(original: RunContext, arm: RunContext) -> Iterator[ReplayedStep]:
    """Train the steps of an arm, commit each of them under the arm, then write replay.json.

    Raises ConfigError if the run has no checkpoint from which the first step can be trained.
    """
    origin, started = arm.record.replay_of, time.monotonic()
    if origin is None:
        raise ConfigError(f"{arm.store.url}: not an arm of a replay")
    commits = counted_commit_keys(original.store)
    epoch = take_epoch(arm.store, "trainer", -1, arm.config.arithmetic)
    arm.store.delete(arm.store.list("weights"))  # of a start that was stopped
    publisher = WeightPublisher(
        arm.store, run_id=arm.run_id, epoch=epoch.epoch, use_shm=False,
        file_name=ADAPTERS_FILE if arm.config.weights.content == "adapters" else WEIGHTS_FILE,
    )  # fmt: skip
    difference: int | None = None
    with open_learners(original.store.url, original.config.trainer.ranks) as learners:
        learner = start_at(learners, original, arm, commits, origin)
        change = partial(reassemble_rows, config=arm.config)
        for one in replay_steps(original.store, learner, commits, origin.last, change):
            manifest = None
            if one.step == origin.last or arm.config.keeps(one.step) or arm.config.evaluates(one.step):
                manifest = publisher.publish_bytes(one.step, one.weights, durable=True)
            is_equal = one.weights_match and one.metrics["train/loss"] == one.recorded_loss
            if difference is None and not is_equal:
                difference = one.step
            write_commit(arm.store, epoch, arm_commit(one, arm.run_id, epoch.epoch, manifest))
            yield one
    record = ReplayRecord(
        first_difference=difference,
        cpu_seconds=time.process_time(),
        seconds=time.monotonic() - started,
        finished_at=time.time(),
    )
    arm.store.put(REPLAY_KEY, record.model_dump_json().encode())


def start_at(
    learners: Learners, original: RunContext, arm: RunContext, commits: dict[int, str], origin: ReplayOf
) -> Learner:
    """The learner of the arm with the recorded state before the first step of the arm."""
    learner = learners.build(original.config)
    restore(original.store, learner, commits, origin.first - 1)
    for _ in replay_steps(original.store, learner, commits, origin.first - 1):
        pass
    if not origin.overrides:
        return learner
    state = learner.state()
    learner = learners.build(arm.config)
    learner.load_state(*state)
    return learner


def arm_commit(one: ReplayedStep, run_id: str, epoch: int, manifest: WeightManifest | None) -> Commit:
    """The commit of a step of an arm: the recorded commit with the metrics of the arm, without batches and actors."""
    kept = {name: value for name, value in one.commit.metrics.items() if not name.startswith(_OF_THE_PROCESS)}
    now = time.time()
    return one.commit.model_copy(
        update={
            "run_id": run_id,
            "epoch": epoch,
            "batches": (),
            "weights_sha256": one.weights_sha256,
            "manifest": manifest,
            "checkpoint": None,
            "fates": (),
            "swaps": (),
            "actors": {},
            "metrics": {**kept, **one.metrics, "time/cpu_seconds": time.process_time()},
            "reserved_at": now,
            "computed_at": now,
            "committed_at": now,
        }
    )
