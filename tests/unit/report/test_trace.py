"""From tokens to versions and steps and back, on a synthetic run whose swaps, masks and advantages are known."""

from dataclasses import replace

import numpy as np
import pytest

from pipelinerl_core.data import compaction
from pipelinerl_core.data.codec import decode_batch, encode_rollouts, to_segment
from pipelinerl_core.data.trained import TrainedRows
from pipelinerl_core.errors import ConfigError, MissingObject
from pipelinerl_core.messages import FateRecord
from pipelinerl_core.report.query.database import Database
from pipelinerl_core.report.rollouts_page import rollout_page
from pipelinerl_core.report.trace import TracedRun, parse_place, trace, trace_lines
from pipelinerl_core.run.commits import read_commits
from pipelinerl_core.run.compacted import CommitListing, StepRange, list_commits
from pipelinerl_core.run.reading import read_record
from pipelinerl_core.run.records import MANIFEST_FILE, RUN_KEY, RunRecord, checkpoint_prefix, commit_key, rollout_key
from pipelinerl_core.types import Origin, Outcome
from tests.synthetic_run import (
    START,
    TRAINER_EPOCH,
    Shape,
    encode,
    make_rollout,
    put_batch,
    put_record,
    training_row,
    write_run,
)

PROMPT = "3+4+8="


@pytest.fixture
def run(store):
    """Step 3 trained group 900: a rollout with two versions, whose first token another actor sampled and the lag rule
    masked. Group 901 was filtered, group 902 is not decided."""
    write_run(store, Shape(steps=5))
    commit = read_commits(store)[3]
    rollout = make_rollout(
        group_id=900, spans=[(0, 0, 2), (2, 2, 6)], prompt=PROMPT, completion="7+8=5", actor="actor-1"
    )
    rollout = replace(rollout, origins=(Origin(actor="actor-0", epoch=1, num_tokens=1),), finished_at=START + 100)
    other = replace(rollout, rollout_index=1, reward=0.0)
    rows = [training_row(rollout, oldest_version=1, advantage=0.75), training_row(other, advantage=-0.25)]
    fates = [FateRecord(group_id=group, attempt=0, fate=fate, num_tokens=12)
             for group, fate in ((900, "trained"), (901, "filtered"))]  # fmt: skip
    put_record(store, commit_key(3, TRAINER_EPOCH), commit.model_copy(
        update={"batches": put_batch(store, 3, TRAINER_EPOCH, rows), "fates": tuple(fates)}))  # fmt: skip
    segments = [encode_rollouts("synthetic", [replace(rollout, group_id=group)]) for group in (901, 902)]
    store.put(rollout_key("actor-1", 1, 0), to_segment(segments))
    return store


def traced(store, text: str) -> dict:
    return trace(store, parse_place(text))


def test_a_token_leads_to_version_actor_swap_and_step(run):
    document = traced(run, "900.0:3")
    token = document["token"]
    assert (token["token_id"], token["version"], token["actor"], token["lag"]) == (encode("=")[0], 2, "actor-1", 0)
    swap = next(swap for swap in read_commits(run)[3].swaps if (swap.actor, swap.version) == ("actor-1", 2))
    assert (token["swapped_at"], token["pause_seconds"], token["actor_epoch"]) == (swap.at, swap.pause_seconds, 1)
    # Weight 0.01: 4 tokens with 0.75, 6 tokens with -0.25.
    assert document["step"]["amount"] == pytest.approx(0.01 * (4 * 0.75 + 6 * 0.25))
    assert document["step"]["trained_tokens"] == 10
    assert token["share"] == pytest.approx(0.75 / 4.5)
    assert document["rollout"]["share"] == pytest.approx(3 / 4.5)
    assert (document["rollout"]["trained_tokens"], document["rollout"]["tokens"]) == (4, 6)
    text = "\n".join(trace_lines(document))
    assert "advantage +0.75, 16.67% of the step" in text
    assert "made version 3" in text
    assert token["ratio"] is None


def test_a_stored_ratio_counts_in_the_share_and_is_in_sql(run):
    commit = read_commits(run)[3]
    rows = [row for batch in TrainedRows(run).batches(commit) for row in decode_batch(batch)]
    ratios_C = np.array([1, 1, 1, 4, 1, 1], dtype=np.float32)
    logprobs_C = rows[0].rollout.rollout_logprobs + np.log(ratios_C)
    rows[0] = replace(rows[0], trainer_logprobs=logprobs_C)
    put_record(run, commit_key(3, TRAINER_EPOCH), commit.model_copy(
        update={"batches": put_batch(run, 3, TRAINER_EPOCH, rows)}))  # fmt: skip
    document = traced(run, "900.0:3")
    assert document["token"]["ratio"] == pytest.approx(4, rel=1e-5)
    # Weight 0.01: 3 tokens with 0.75, 1 with 4 times 0.75, 6 tokens with -0.25.
    assert document["step"]["amount"] == pytest.approx(0.01 * (7 * 0.75 + 6 * 0.25))
    assert document["token"]["share"] == pytest.approx(3 / 6.75)
    assert "lag 0, ratio 4.0000; advantage" in "\n".join(trace_lines(document))
    with Database([run]) as database:
        (far,) = database.table("select position, ratio from tokens where ratio > 3").to_pylist()
        assert far == {"position": 3, "ratio": pytest.approx(4, rel=1e-5)}


def test_a_masked_token_of_an_earlier_actor_is_not_trained(run):
    token = traced(run, "900.0:0")["token"]
    assert (token["actor"], token["version"], token["trained"], token["share"]) == ("actor-0", 0, False, None)
    assert traced(run, "900.0:1")["token"]["actor"] == "actor-1"
    assert traced(run, "900.1:0")["token"]["trained"]


def test_a_version_leads_to_the_groups_that_made_it_and_to_who_sampled_with_it(run):
    version = traced(run, "v3")["version"]
    assert [group["group"] for group in version["groups"]] == [900]
    assert version["groups"][0] == {"group": 900, "rewards": [1.0, 0.0], "share": pytest.approx(1.0)}
    assert {swap["actor"] for swap in version["sampled_by"]} == {"actor-0", "actor-1"}
    others = traced(run, "v4")["version"]["groups"]
    assert sum(group["share"] for group in others) == pytest.approx(1.0)
    assert [group["share"] for group in others] == sorted((group["share"] for group in others), reverse=True)
    assert traced(run, "v0")["version"]["step"] is None


@pytest.mark.parametrize(("group", "fate", "step"), [(901, "filtered", 3), (902, "undecided", None)])
def test_groups_that_were_not_trained_are_read_from_their_segment(run, group, fate, step):
    document = traced(run, str(group))
    assert (document["group"]["fate"], document["group"]["step"], document["step"]) == (fate, step, None)
    assert [row["rollout"] for row in document["rollouts"]] == [f"{group}.0"]
    assert "not trained" in "\n".join(trace_lines(document))
    assert traced(run, f"{group}.0:3")["token"]["share"] is None


def test_a_trained_group_has_its_rollouts_without_a_reward_too(run):
    """The batch has the trained rows; the segment has all."""
    rollouts = [make_rollout(group_id=900, spans=[(0, 0, 6)], prompt=PROMPT, completion="7+8=5", actor="actor-1",
                             rollout_index=index) for index in range(4)]  # fmt: skip
    rollouts[3] = replace(rollouts[3], reward=None, outcome=Outcome.ERROR, error="verifier: timed out")
    commit = read_commits(run)[3]
    rows = [training_row(rollout, advantage=0.5) for rollout in rollouts[:3]]
    batches = put_batch(run, 3, TRAINER_EPOCH, rows)
    put_record(run, commit_key(3, TRAINER_EPOCH), commit.model_copy(update={"batches": batches}))
    run.put(rollout_key("actor-1", 1, 1), to_segment([encode_rollouts("synthetic", rollouts)]))
    assert [row["rollout"] for row in traced(run, "900")["rollouts"]] == ["900.0", "900.1", "900.2", "900.3"]
    assert "verifier: timed out" in "\n".join(trace_lines(traced(run, "900.3")))


def test_lost_rows_are_an_error_and_removed_rows_are_said_to_be_removed(run, monkeypatch):
    for entry in read_commits(run)[3].batches:
        run.delete([entry.name])
    for place in ("900", "v3"):
        with pytest.raises(MissingObject, match="the rows of step 3"):
            traced(run, place)
    record = read_record(run, RUN_KEY, RunRecord)
    put_record(run, RUN_KEY, record.model_copy(update={"config": record.config | {"store": {"keep_rows": 1}}}))
    run.put(f"{checkpoint_prefix(5, TRAINER_EPOCH)}/{MANIFEST_FILE}", b"{}")
    with pytest.raises(MissingObject, match="the rows of step 3"):  # whole files of compacted commits are removed
        traced(run, "900")
    files = [StepRange(0, 3, TRAINER_EPOCH)]
    monkeypatch.setattr(compaction, "list_commits", lambda store: CommitListing(list_commits(store).originals, files))
    document = traced(run, "900")
    assert (document["group"]["fate"], document["rollouts"]) == ("trained", [])
    assert "its rows are not in the store" in "\n".join(trace_lines(document))
    assert traced(run, "v3")["version"]["step"]["num_rollouts"] is None


def test_a_damaged_segment_hides_no_other_group(run):
    run.put(rollout_key("actor-0", 1, 0), b"torn")
    assert traced(run, "902")["group"]["fate"] == "undecided"
    with pytest.raises(ConfigError, match="has no group 99999"):
        traced(run, "99999")


def test_the_swap_of_a_rollout_that_ended_before_the_swap_was_noted(run):
    commit = read_commits(run)[3]
    late = [swap.model_copy(update={"at": START + 200}) for swap in commit.swaps]
    put_record(run, commit_key(3, TRAINER_EPOCH), commit.model_copy(update={"swaps": tuple(late)}))
    assert traced(run, "900.0:3")["token"]["swapped_at"] == START + 200
    put_record(run, commit_key(3, TRAINER_EPOCH), commit.model_copy(update={"swaps": ()}))
    token = traced(run, "900.0:3")["token"]
    assert (token["swapped_at"], token["is_first_version"]) == (None, False)
    assert traced(run, "900.1:1")["token"]["is_first_version"]


def test_a_rollout_without_tokens_has_no_version(run):
    commit = read_commits(run)[3]
    none = np.zeros(0, np.int32)
    empty = make_rollout(group_id=900, prompt=PROMPT, reward=None)
    empty = replace(empty, completion_token_ids=none, weight_spans=(),
                    rollout_logprobs=none.astype(np.float32), loss_mask=none.astype(np.bool_))  # fmt: skip
    batches = put_batch(run, 3, TRAINER_EPOCH, [training_row(empty)])
    put_record(run, commit_key(3, TRAINER_EPOCH), commit.model_copy(update={"batches": batches}))
    assert "0 tokens (stop), no version" in "\n".join(trace_lines(traced(run, "900.0")))
    assert "Rollout 900.0" in rollout_page(TracedRun(run), parse_place("900.0"), "version")


def test_text_of_others_is_printable(run):
    document = traced(run, "900.0")
    document["rollout"]["error"] = "\x1b[31mnew\nline"
    assert "\\x1b[31mnew\\nline" in "\n".join(trace_lines(document))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("99999", "synthetic has no group 99999, or none of its rollouts is finished"),
        ("900.7", "group 900 has no rollout 7 in the store, but 0, 1"),
        ("900.0:6", "rollout 900.0 has 6 tokens: no token 6"),
        ("v99", "synthetic has no version 99; the newest is 5"),
        ("900:3", "give GROUP, GROUP.ROLLOUT"),
        ("-1", "give GROUP, GROUP.ROLLOUT"),
        ("", "give GROUP, GROUP.ROLLOUT"),
    ],
)
def test_an_unknown_place_is_an_error_of_one_line(run, text, message):
    with pytest.raises(ConfigError, match=message):
        traced(run, text)
