"""store.trainer_logprobs: the log-probabilities that a step computes are kept by row and token."""

from dataclasses import replace

import numpy as np
import pyarrow as pa
import pytest
import torch

from pipelinerl_core.batching.collate import PackBatcher
from pipelinerl_core.data.codec import _checksum, decode_batch, encode_batch, from_segment, to_segment
from pipelinerl_core.data.schema import BATCH_SCHEMA
from pipelinerl_core.errors import SchemaMismatch
from pipelinerl_core.training.base_learner import logprobs_by_row
from pipelinerl_core.training.learner import TorchLearner
from pipelinerl_core.training.model import prepare_model
from tests.unit.training.learner_case import config, tiny_model
from tests.unit.training.test_skipped_backward import mixed_rows


def learner_of(keeps: bool, pack_tokens: int = 24, **packs: bool) -> TorchLearner:
    run_config = config(pack_tokens)
    store = run_config.store.model_copy(update={"trainer_logprobs": keeps})
    run_config = run_config.model_copy(update={"store": store})
    return TorchLearner(prepare_model(tiny_model()), run_config, batcher=PackBatcher(pack_tokens, **packs))


@pytest.mark.parametrize("packs", [{}, {"shares_prompts": True}, {"skips_backward": True}], ids=str)
@pytest.mark.parametrize("pack_tokens", [24, 2048])
def test_every_row_has_the_scores_before_the_step(pack_tokens, packs):
    learner = learner_of(True, pack_tokens, **packs)
    rows = mixed_rows(config())
    scores = learner.logprobs_of([row.rollout for row in rows])
    learner.step(rows)
    for row, score, kept in zip(rows, scores, learner.trainer_logprobs, strict=True):
        np.testing.assert_allclose(kept, np.where(row.rollout.loss_mask, score, 0), atol=1e-5)
        assert kept.any()


def test_a_row_that_is_not_computed_has_none_and_without_the_key_no_row_has():
    rows = mixed_rows(config())
    learner = learner_of(True, skips_backward=True, skips_forward=True)
    learner.step(rows)
    assert [kept is not None for kept in learner.trainer_logprobs] == [row.advantage != 0 for row in rows]
    learner = learner_of(False)
    learner.step(rows)
    assert learner.trainer_logprobs is None


def test_rows_of_several_ranks_come_back_in_their_order():
    rows = mixed_rows(config())
    plan = PackBatcher(24).plan(rows, ranks=2)
    orders = [[index for pack in packs for index in pack] for packs in plan]
    vectors = [
        np.concatenate([np.full(int(rows[index].rollout.loss_mask.sum()), index) for index in order])
        for order in orders
    ]  # fmt: skip
    by_row = logprobs_by_row(rows, orders, [vector.astype(np.float32) for vector in vectors])
    for index, (row, kept) in enumerate(zip(rows, by_row, strict=True)):
        np.testing.assert_array_equal(kept, np.where(row.rollout.loss_mask, index, 0))


def test_they_are_stored_and_rows_of_an_earlier_release_have_none():
    rows = mixed_rows(config())
    kept = torch.arange(rows[0].rollout.num_tokens, dtype=torch.float32).numpy()
    batch = encode_batch("run", 1, [replace(rows[0], trainer_logprobs=kept), rows[1]])
    (read,) = from_segment(to_segment([batch]), "key")  # compares the checksum
    first, second = decode_batch(read)
    np.testing.assert_array_equal(first.trainer_logprobs, kept)
    assert second.trainer_logprobs is None
    others = encode_batch("run", 1, [replace(rows[0], trainer_logprobs=kept + 1), rows[1]])
    assert _checksum(others) != _checksum(batch)
    earlier = batch.drop_columns(["trainer_logprobs"]).replace_schema_metadata(BATCH_SCHEMA.metadata)
    assert [row.trainer_logprobs for row in decode_batch(earlier)] == [None, None]


def test_a_column_of_another_type_is_a_damaged_file():
    other = pa.record_batch({"trainer_logprobs": pa.array([1, 2])})
    sink = pa.BufferOutputStream()
    with pa.ipc.new_file(sink, other.schema) as writer:
        writer.write_batch(other)
    with pytest.raises(SchemaMismatch, match="torn or corrupt"):
        from_segment(sink.getvalue().to_pybytes(), "key")
