"""The evaluator beside training: which versions it evaluates while versions come and go."""

import asyncio

import pytest

from pipelinerl_core.errors import MissingObject
from pipelinerl_core.roles.evaluator import main
from pipelinerl_core.run.context import RunContext
from pipelinerl_core.run.follow import RunFollower
from pipelinerl_core.run.records import EvalRecord, eval_key
from tests.builders import put_commit, put_epoch, run_record, small_config
from tests.synthetic_run import put_record


def versions_evaluated(store, monkeypatch, *, newer: int | None) -> list[int]:
    """Version 5 is removed before it is read; `newer` is committed meanwhile."""
    config = small_config(trainer={"steps": 10}, eval={"every_steps": 5})
    put_epoch(store, 1)
    for step in range(6):
        put_commit(store, step)

    async def evaluate(self, commit, *, is_subset=False):
        if commit.step == 5:
            for step in range(6, (newer or 5) + 1):
                put_commit(store, step)
            raise MissingObject("weights/00000005.1/model.safetensors")
        record = EvalRecord(version=commit.step, num_prompts=1, accuracy=0.5, mean_tokens=1.0, errors=0, seconds=1.0)
        put_record(store, eval_key(commit.step), record)
        return record

    monkeypatch.setattr(main._Evaluator, "evaluate", evaluate)
    context = RunContext(store=store, record=run_record(config), config=config, token="token")
    evaluator = main._Evaluator(context=context, follower=RunFollower(store), engine=None, evaluation=None, base=None)
    return [record.version for record in asyncio.run(evaluator.follow())]


def test_a_version_that_is_removed_before_it_is_read_is_left_out_for_a_newer_one(store, monkeypatch):
    assert versions_evaluated(store, monkeypatch, newer=10) == [0, 10]


def test_without_a_newer_version_the_error_ends_the_evaluator(store, monkeypatch):
    with pytest.raises(MissingObject):
        versions_evaluated(store, monkeypatch, newer=None)
