"""Rows of several groups in one write."""

import pytest

from pipelinerl_core.messages import Ack, RowsBundle, RowsHeader
from pipelinerl_core.stream.bundles import BUNDLE_BYTES, bundled, unbundled
from pipelinerl_core.stream.codec import decode_rollouts, encode_rollouts
from pipelinerl_core.testing.rollout_rows import build_group


def answers(*sizes: int):
    """Header and rows of one group each, with so many tokens in a rollout."""
    for index, num_tokens in enumerate(sizes):
        rows = encode_rollouts("run", build_group(0, group_id=index, size=2 + index % 3, num_tokens=num_tokens))
        yield RowsHeader(re=3, group_id=index, attempt=1, remaining=len(sizes) - 1 - index), rows


def test_what_is_joined_comes_apart_again():
    sent = list(answers(5, 9, 1, 300))
    written = list(bundled(iter(sent)))
    assert [answer for answer, _ in written] == [
        RowsBundle(re=3, groups=((0, 1, 2), (1, 1, 3), (2, 1, 4), (3, 1, 2)), remaining=0)
    ]
    received = [part for answer, rows in written for part in unbundled(answer, rows)]
    assert [part.answer for part in received] == [header for header, _ in sent]
    for part, (_, rows) in zip(received, sent, strict=True):
        assert part.rows.equals(rows)
        for found, expected in zip(decode_rollouts(part.rows), decode_rollouts(rows), strict=True):
            assert found.weight_spans == expected.weight_spans
            assert found.completion_token_ids.tolist() == expected.completion_token_ids.tolist()
            assert found.rollout_logprobs.tolist() == expected.rollout_logprobs.tolist()
            assert found.loss_mask.tolist() == expected.loss_mask.tolist()


def test_a_bundle_has_a_size_and_a_large_group_goes_alone():
    large = BUNDLE_BYTES // 8  # tokens of each of its two or more rollouts, of more than 8 bytes
    written = list(bundled(answers(5, 5, large, 5)))
    kinds = [(answer.kind, answer.remaining, rows.num_rows) for answer, rows in written]
    assert kinds == [("rows_bundle", 2, 5), ("rows_header", 1, 4), ("rows_header", 0, 2)]


def test_other_answers_keep_their_place():
    (first, second), ack = answers(5, 5), (Ack(re=3), None)
    assert list(bundled(iter([ack, first, ack, second]))) == [ack, first, ack, second]
    assert unbundled(*ack) == [ack]


def test_what_fails_in_the_middle_is_heard_of():
    def failing():
        yield from answers(5)
        raise ValueError("gone")

    with pytest.raises(ValueError, match="gone"):
        list(bundled(failing()))
