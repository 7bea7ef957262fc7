"""The audit closes on a run that is whole, and names what is wrong with one that is not."""

import re
from dataclasses import replace

import numpy as np
import pytest

from pipelinerl_core.data import compaction
from pipelinerl_core.run.compacted import CommitListing, StepRange, list_commits
from pipelinerl_core.run.records import batch_key, checkpoint_prefix, commit_key, epoch_key, rollout_key
from pipelinerl_core.tools.audit import Audit, lines
from pipelinerl_core.types import TurnSpan, WeightSpan
from tests.builders import put_epoch
from tests.fakes import MemoryStore
from tests.unit.tools.run_case import CONFIG, EPOCH, TOKENS, change, fates, ledger, put_batch, rows_of, stored_run


@pytest.fixture
def store():
    return stored_run()


def problems(store):
    return Audit(store, CONFIG).run().problems


def test_a_whole_run_closes(store):
    document = Audit(store, CONFIG).run().document
    assert document["problems"] == []
    assert document["closes"] is True
    assert document["groups"] == {"trained": 6, "open": 1}
    assert (document["commits"], document["lost"], document["trained_twice"]) == (4, 0, 0)
    assert document["files"] == 3 + 4 + 1 + 3  # batches, weights, checkpoint, segments
    assert lines(document)[-1] == "PASS: no rollout was lost or trained twice, the run closes"


def flip(store, key):
    data = bytearray(store.get(key))
    data[len(data) // 2] ^= 0x20
    store.put(key, bytes(data))


def put_rows(store, step, rows):
    change(store, step, batches=(put_batch(store, step, rows),))


def lose_a_group(store):
    change(store, 2, fates=fates(2)[:1])
    put_rows(store, 2, rows_of(2)[:2])


FAULTS = {
    "a commit is gone": (
        lambda s: s.delete([commit_key(2, EPOCH)]),
        "lists no commit of step 2, but step 3 was committed",
    ),
    "a commit is torn": (lambda s: s.put(commit_key(2, EPOCH), b"{"), "commits/00000002.2.json: cannot be read"),
    "an epoch is gone": (lambda s: s.delete([epoch_key(EPOCH)]), "no record of epoch 2"),
    "a group has no fate": (lose_a_group, r"1 groups have no fate and are not open: \[3\]"),
    "a group is trained twice": (
        lambda s: change(s, 3, fates=(*fates(3), fates(2)[0])),
        "commit 3: group 2 is trained, but was trained before",
    ),
    "an open group was decided": (lambda s: change(s, 3, open_groups=(5, 6)), "group 5 is open at the end, but was"),
    "rows of another attempt": (lambda s: change(s, 2, fates=fates(2, attempt=1)), r"group \(2, 1\) is trained, but"),
    "rows that nobody decided": (lambda s: change(s, 2, fates=fates(2)[:1]), r"has rows of group \(3, 0\)"),
    "tokens that do not add up": (
        lambda s: change(s, 3, tokens={**ledger(3), "in_flight": 9}),
        "77 tokens generated, 81 accounted for",
    ),
    "tokens that no batch holds": (
        lambda s: change(s, 3, tokens={**ledger(3), "trained": 40, "masked_stale": 8}),
        "the ledger has 40 tokens trained, the earlier batches have 48",
    ),
    "tokens from the future": (lambda s: put_rows(s, 2, rows_of(2, version=2)), "tokens of version 2, which did not"),
    "tokens too old": (lambda s: put_rows(s, 3, rows_of(3, version=0)), "was trained with a lag of 2"),
    "more tokens than the group had": (
        lambda s: change(s, 2, fates=tuple(fate.model_copy(update={"num_tokens": 11}) for fate in fates(2))),
        "has 12 tokens in the batch, 11 in total",
    ),
    "a batch file flipped": (lambda s: flip(s, batch_key(2, EPOCH, rank=0)), "digest .* its record says"),
    "a batch file gone": (lambda s: s.delete([batch_key(2, EPOCH, rank=0)]), "batches/00000002.2/0000.arrow"),
    "the newest weights flipped": (
        lambda s: flip(s, "weights/00000003.2/model.safetensors"),
        "digest .* its record says",
    ),
    "no checkpoint": (
        lambda s: s.delete(s.list("checkpoints")),
        "no checkpoint is intact, so the run can be neither",
    ),
    "all checkpoints torn": (
        lambda s: [s.put(key, b"x") for key in s.list("checkpoints") if not key.endswith("json")],
        "no checkpoint is intact, so .* 1 bytes, its record says",
    ),
    "weights of another checksum": (
        lambda s: change(s, 1, weights_digest="0" * 64),
        "commit 1: the checksum of the weights differs",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_each_fault_is_named(store, fault):
    break_it, message = FAULTS[fault]
    break_it(store)
    document = Audit(store, CONFIG).run().document
    assert document["closes"] is False
    assert any(re.search(message, problem) for problem in document["problems"]), document["problems"]
    lost = {"a group has no fate": 1, "a commit is gone": 2, "a commit is torn": 2, "rows that nobody decided": 1}
    assert document["lost"] == lost.get(fault, 0)
    assert document["trained_twice"] == (fault == "a group is trained twice")
    assert lines(document)[-1] == "FAIL: the run does not close"


def test_rows_that_the_run_does_not_keep_are_counted_and_not_missed(store, monkeypatch):
    keeps = CONFIG.model_copy(update={"store": CONFIG.store.model_copy(update={"keep_rows": 1})})

    def audit():
        return Audit(store, keeps).run().document

    assert audit()["removed_steps"] == 0
    store.delete([batch_key(1, EPOCH, rank=0)])
    assert any("batches/00000001.2/0000.arrow" in text for text in audit()["problems"]), "whole files are removed"
    files = [StepRange(0, 1, EPOCH)]
    monkeypatch.setattr(compaction, "list_commits", lambda store: CommitListing(list_commits(store).originals, files))
    document = audit()
    assert (document["problems"], document["removed_steps"]) == ([], 1)
    assert "rows of 1 steps were removed, as store.keep_rows says: not checked" in lines(document)
    store.delete([batch_key(2, EPOCH, rank=0)])  # not in the file of compacted commits
    assert any("batches/00000002.2/0000.arrow" in text for text in audit()["problems"])
    older_checkpoint(store)
    store.delete([key for key in store.list("checkpoints") if key.startswith(checkpoint_prefix(3, EPOCH))])
    files[:] = [StepRange(0, 2, EPOCH)]
    assert any("batches/00000002.2/0000.arrow" in text for text in audit()["problems"]), "a start trains step 2 again"


def test_a_row_that_is_missing_in_a_batch_is_named(store):
    for step in range(4):
        change(store, step, metrics={"progress/samples": 4.0 * step})
    assert problems(store) == []
    put_rows(store, 2, rows_of(2)[:3])  # its group still has a row
    assert any("commit 2: 3 rows are there, 4 rows were trained" in text for text in problems(store))


def older_checkpoint(store):
    """The keys of a second checkpoint, without which the run can be resumed."""
    prefix = checkpoint_prefix(1, EPOCH)
    for key in store.list("checkpoints"):
        store.put(key.replace(checkpoint_prefix(3, EPOCH), prefix), store.get(key))
    return store.list(prefix)


DAMAGES = {
    "older weights flipped": (
        lambda s: flip(s, "weights/00000001.2/model.safetensors"),
        "digest .* its record says",
    ),
    "a checkpoint torn": (
        lambda s: [s.put(key, b"x") for key in older_checkpoint(s) if not key.endswith("json")],
        "1 bytes, its record says",
    ),
    "a checkpoint's manifest torn": (
        lambda s: [s.put(key, b"{") for key in older_checkpoint(s) if key.endswith("json")],
        r"manifest\.json is not a valid CheckpointManifest: not JSON",
    ),
    "a segment torn": (lambda s: s.put(rollout_key("actor-0", 1, 2), b"x"), "torn or corrupt Arrow file"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damage_that_takes_nothing_away_is_named_and_the_run_closes(store, damage):
    break_it, message = DAMAGES[damage]
    break_it(store)
    document = Audit(store, CONFIG).run().document
    assert (document["closes"], document["problems"]) == (True, [])
    (damaged,) = document["damaged"]
    assert re.search(message, damaged)
    assert lines(document)[-2:] == [
        f"damaged, but the run goes on without it: {damaged}",
        "PASS: no rollout was lost or trained twice, the run closes",
    ]


def test_masked_tokens_may_be_of_any_age(store):
    change(store, 3, tokens=ledger(3))
    put_rows(store, 3, [replace(row, loss_mask=np.zeros(TOKENS, np.bool_)) for row in rows_of(3, version=0)])
    assert problems(store) == []


def turned(row, *spans, live):
    """The row with turns [0, 2) and [4, 6), tokens of the environment between them, and these weight_spans."""
    mask = np.array([True, True, False, False, True, True])
    turns = (TurnSpan(0, 2), TurnSpan(4, 6))
    rollout = replace(
        row.rollout, loss_mask=mask, turn_spans=turns, weight_spans=tuple(WeightSpan(*s) for s in spans)
    )
    return replace(row, rollout=rollout, loss_mask=mask & np.array(live))


def test_tokens_between_turns_count_with_their_version_as_in_the_ledger(store):
    put_rows(store, 2, [turned(row, (1, 0, 6), live=[True] * 6) for row in rows_of(2)])
    assert problems(store) == []
    # With max_lag 0 the first three tokens are dead, one of the environment among them.
    old = [turned(row, (0, 0, 3), (1, 3, 6), live=[False] * 3 + [True] * 3) for row in rows_of(2)]
    put_rows(store, 2, old)
    change(store, 3, tokens={**ledger(3), "trained": 24 + 4 * 3, "masked_stale": 4 * 3})
    strict = CONFIG.model_copy(update={"schedule": CONFIG.schedule.model_copy(update={"max_lag": 0})})
    assert Audit(store, strict).run().problems == []


def test_a_store_without_a_run_does_not_close():
    assert problems(MemoryStore()) == ["the run has no commit"]


def put_hub(store):
    put_epoch(store, 3, "hub", parent=1)


@pytest.mark.parametrize(
    ("trained", "masked", "failed", "closes"),
    [(48, 0, 0, True), (40, 8, 0, True), (40, 0, 8, True), (40, 0, 0, False), (56, 0, 0, False)],
)
def test_after_a_restart_of_the_hub_the_trained_groups_bound_the_tokens_of_its_ledger(
    store, trained, masked, failed, closes
):
    put_hub(store)
    tokens = {**ledger(3), "trained": trained, "masked_stale": masked, "failed": failed}
    tokens["generated"] = sum(number for name, number in tokens.items() if name != "generated")
    change(store, 3, tokens=tokens)
    assert (problems(store) == []) == closes
