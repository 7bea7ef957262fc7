"""What the trainer tells a hub when it registers, at whatever moment that is, and what it writes about a step.

Tests call the private parts of a step, because the moment between two of these parts is under test, and close the
private committer, because a trainer closes it only at the end of a run.
"""

import threading
from concurrent.futures import Future
from dataclasses import asdict, replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from pipelinerl_core.data.codec import decode_batch, encode_rollouts, from_segment
from pipelinerl_core.errors import NotReserved, StoreUnavailable, TrainingDiverged
from pipelinerl_core.interfaces import TensorMeta, WeightLayout
from pipelinerl_core.messages import Ack, Reserved, RowsHeader
from pipelinerl_core.models.resolve import load_config
from pipelinerl_core.roles.trainer.main import Trainer
from pipelinerl_core.run.history import counted_commit_keys, read_commit
from pipelinerl_core.run.records import BATCHES_PREFIX
from pipelinerl_core.training.live_state import LiveState
from pipelinerl_core.types import WeightSpan
from tests.builders import epoch_record, group_named, put_epoch
from tests.fakes import MemoryStore
from tests.rollout_rows import build_group, group_ref


def group(group_id):
    return group_named(group_id, num_rollouts=1, num_tokens=1)


class Link:
    """Reserves group 10 for step 1, group 20 for step 2, ..."""

    def reserve(self, message):
        return Reserved(re=0, is_ready=True, groups=(group(10 * message.step),)), []


def test_a_registration_never_has_the_groups_of_another_step():
    told = set()

    class Watched(Trainer):
        """Registers after every change of an attribute, as the thread that commits may."""

        def __setattr__(self, name, value):
            super().__setattr__(name, value)
            if name.startswith("_reserved") and hasattr(self, "_committer"):
                register = self._registration()
                told.add((register.step, *(ref.group_id for ref in register.reservation)))

    context = SimpleNamespace(store=MemoryStore(), config=load_config("quickstart"), run_id="run", token="")
    epoch = epoch_record(1)
    trainer = Watched(context, None, epoch, link=lambda registration: Link())
    for step in (1, 2, 3):
        trainer._reserve(step, threading.Event(), ())
    trainer._committer.close()
    assert told == {(1, 10), (2, 20), (3, 30)}


def test_a_reservation_waits_briefly_while_a_step_is_not_announced():
    """The hub answers in order: the announcement of new weights would wait behind the reservation."""
    waits = []

    class Watched(Link):
        def reserve(self, message):
            waits.append(message.wait_seconds)
            return super().reserve(message)

    context = SimpleNamespace(store=MemoryStore(), config=load_config("quickstart"), run_id="run", token="")
    trainer = Trainer(context, None, epoch_record(1), link=lambda registration: Watched())
    announcement = Future()
    trainer._committer._pending.append(announcement)
    trainer._reserve(1, threading.Event(), ())
    announcement.set_result(None)
    trainer._reserve(2, threading.Event(), ())
    trainer._committer.close()
    assert waits[0] <= 0.05 < 0.5 <= waits[1]


class Learner:
    """Computes nothing; remembers the rows of its steps."""

    def __init__(self):
        self.version = 0
        self.steps = []

    def step(self, rows):
        self.steps.append(rows)
        self.version += 1
        return {"train/loss": 0.0, "time/compute_seconds": 0.0}

    def logprobs_of(self, rollouts):
        return [rollout.rollout_logprobs for rollout in rollouts]

    def layout(self):
        return WeightLayout((TensorMeta("w", "float32", (1,)),))

    def weights(self, targets):
        targets["w"].zero_()

    def state(self):
        return LiveState({"w": torch.zeros(1)}, {})


class Hub(Link):
    """Reserves one group for each step, with its rows; acknowledges everything else."""

    def connect(self):
        """Nothing to do."""

    def close(self):
        """Nothing to do."""

    def request(self, message):
        return Ack(re=message.id)

    def reserve(self, message):
        made = build_group(0, group_id=message.step, size=3)
        rows = encode_rollouts("run", made)
        header = RowsHeader(re=0, group_id=message.step, attempt=0, remaining=0)
        return Reserved(re=0, is_ready=True, groups=(group_ref(made),)), [(header, rows)]


def test_the_batch_files_have_the_rows_that_were_trained():
    store = MemoryStore()
    config = load_config("quickstart", ["trainer.steps=3", "weights.transport=object_store"])
    context = SimpleNamespace(store=store, config=config, run_id="run", token="")
    learner = Learner()
    Trainer(context, learner, put_epoch(store, 1), link=lambda registration: Hub()).run({}, threading.Event())
    keys = counted_commit_keys(store)
    for step, rows in enumerate(learner.steps, start=1):
        commit = read_commit(store, keys[step])
        (batch,) = from_segment(store.get(commit.batches[0].name))
        np.testing.assert_equal([asdict(row) for row in decode_batch(batch)], [asdict(row) for row in rows])
        assert commit.metrics["time/prepare_seconds"] > 0


def test_a_refused_step_whose_rows_may_still_arrive_is_not_tried_again_under_the_same_name():
    """Of a write that failed, the store may have the object later, over the rows of the next try."""

    class Unavailable(MemoryStore):
        def put(self, key, data, *, create_only=False):
            if key.startswith(BATCHES_PREFIX):
                raise StoreUnavailable("no answer")
            super().put(key, data, create_only=create_only)

    class Diverging(Learner):
        def step(self, rows):
            self.steps.append(rows)
            raise TrainingDiverged("step 1: the loss is nan")

    store, learner = Unavailable(), Diverging()
    config = load_config("quickstart", ["weights.transport=object_store"])
    context = SimpleNamespace(store=store, config=config, run_id="run", token="")
    trainer = Trainer(context, learner, put_epoch(store, 1), link=lambda registration: Hub())
    with pytest.raises(StoreUnavailable):
        trainer.run({}, threading.Event())
    assert len(learner.steps) == 1


def test_a_step_whose_reservation_is_gone_is_reserved_again_at_once():
    """The hub ended between its answer and the next registration, or a newer trainer has the run."""
    reservations, requests = [], []

    class Forgetful(Hub):
        def reserve(self, message):
            answer, rows = super().reserve(message)
            reservations.append((message.step, message.lost))
            return answer, rows if len(reservations) > 1 else []

        def request_rows(self, message):
            requests.append(message.groups)
            raise NotReserved("step 1: groups [(1, 0)] are not reserved")

    context = SimpleNamespace(store=MemoryStore(), config=load_config("quickstart"), run_id="run", token="")
    trainer = Trainer(context, Learner(), epoch_record(1), link=lambda registration: Forgetful())
    _, groups = trainer._reserve_rows(1, threading.Event())
    trainer._committer.close()
    assert (reservations, len(requests)) == ([(1, ()), (1, ())], 1)
    assert [len(group) for group in groups] == [3]


def test_the_parity_gate_takes_no_rollout_with_older_context():
    """As after a restart beside live actors: most rollouts began with versions before the trainer's."""
    made = build_group(0, group_id=1, size=3)
    scored = []

    class Scorer(Learner):
        def logprobs_of(self, rollouts):
            scored.append(len(rollouts))
            return super().logprobs_of(rollouts)

    learner = Scorer()
    learner.version = 5
    context = SimpleNamespace(store=MemoryStore(), config=load_config("quickstart"), run_id="run", token="")
    trainer = Trainer(context, learner, epoch_record(1), link=lambda registration: Hub())
    ages = {"old": ((3, 12),), "mixed": ((4, 2), (5, 12)), "fresh": ((5, 12),)}
    rows = {}
    for (name, spans), rollout in zip(ages.items(), made, strict=True):
        starts = [0, *(end for _, end in spans)]
        weight_spans = tuple(
            WeightSpan(version, start, end) for (version, end), start in zip(spans, starts, strict=False)
        )
        rows[name] = SimpleNamespace(rollout=replace(rollout, weight_spans=weight_spans))
    measured = []
    trainer._rescoring.measure = lambda rollouts, scores: measured.append((len(rollouts), len(scores)))
    trainer._pass_parity_gate([rows["old"], rows["mixed"]])
    assert scored == []
    trainer._pass_parity_gate(list(rows.values()))
    trainer._pass_parity_gate(list(rows.values()))
    trainer._committer.close()
    assert scored == [1]
    assert measured == [(1, 1)]
