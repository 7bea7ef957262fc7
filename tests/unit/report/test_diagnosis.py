"""Each fault, planted in rollouts that are otherwise healthy, is named, with rollouts that show it."""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from pipelinerl_core.data.codec import encode_batch
from pipelinerl_core.report.diagnosis import Finding, diagnose, text_decoder
from pipelinerl_core.report.facts import RunFacts, StepFacts, TrainedRollout, newest_facts, step_facts
from pipelinerl_core.report.live_view import format_status, run_status
from pipelinerl_core.report.query.database import Database, stores_of
from pipelinerl_core.run.commits import read_commits
from pipelinerl_core.run.follow import RunFollower
from pipelinerl_core.run.records import EvalRecord
from pipelinerl_core.storage.object_store import open_store
from pipelinerl_core.types import FinishReason, RewardComponent, TrainingRow, TurnSpan, WeightSpan
from tests.builders import commit_record, run_record
from tests.synthetic_run import Shape, build_report, render_report, trained_rollout, write_run

STEPS, GROUPS, SIZE = range(3, 11), 4, 4


def ids(text: str) -> np.ndarray:
    return np.frombuffer(text.encode(), dtype=np.uint8).astype(np.int64)


def text(token_ids: np.ndarray) -> str:
    return bytes(token_ids.astype(np.uint8)).decode(errors="replace")


def components(**values: float) -> tuple[RewardComponent, ...]:
    return tuple(RewardComponent(name, float(value)) for name, value in values.items())


def rollout(step: int, group: int, index: int, **changes: Any) -> TrainedRollout:
    """A rollout of a sorting task: half of a group is right; lengths do not follow the rewards."""
    words = f"pear {group} fig {step} kiwi {group * step}"
    task = {"question": words, "level": group % 3, "answer": "x"}
    completion = f"a list, {'fig' * (1 + (index // 2 + group) % 3)} and so on"
    values = {
        "step": step, "group_id": step * GROUPS + group, "rollout_index": index, "actor": "actor-0",
        "reward": float(index % 2), "outcome": "scored", "finish_reason": "stop",
        "prompt_token_ids": ids(f"Sort these words: {words}\nAnswer:"), "completion_token_ids": ids(completion),
        "weight_spans": (WeightSpan(0, 0, len(completion)),), "loss_mask": np.ones(len(completion), np.bool_),
        "loss_mask_trained": np.ones(len(completion), np.bool_), "task": json.dumps(task), "source": "words",
        "reward_components": components(format=index // 2 % 2, right=index % 2), "advantage": index % 2 - 0.5,
    }  # fmt: skip
    values |= changes
    if "completion_token_ids" in changes:
        mask = np.ones(len(values["completion_token_ids"]), np.bool_)
        values |= {"loss_mask": mask, "loss_mask_trained": mask}
    return trained_rollout(**values)


def figures(step: int, rows: Sequence[TrainedRollout]) -> StepFacts:
    trained = [
        TrainingRow(rollout=row, loss_mask=row.loss_mask_trained, advantage=row.advantage, loss_weight=1.0)
        for row in rows
    ]
    return step_facts(step, pa.Table.from_batches([encode_batch("run", step, trained)]))


def facts_of(rows: Sequence[TrainedRollout], metrics: Sequence[Mapping[str, float]] = ()) -> RunFacts:
    by_step: dict[int, list[TrainedRollout]] = {}
    for row in rows:
        by_step.setdefault(row.step, []).append(row)
    commits = {step: commit_record(step, metrics=dict(at)) for step, at in enumerate(metrics, 1)}
    return RunFacts(
        run=run_record(), commits=commits,
        evals={}, set_evals={}, steps=tuple(figures(step, of_step) for step, of_step in by_step.items()),
        newest_rows=tuple(row for row in rows if row.step >= STEPS.start),
    )  # fmt: skip


def healthy(change: Callable[[int, int, int], Mapping[str, Any]] = lambda *_: {}) -> list[TrainedRollout]:
    return [
        rollout(step, group, index, **change(step, group, index))
        for step in STEPS for group in range(GROUPS) for index in range(SIZE)
    ]  # fmt: skip


def findings(rows: Sequence[TrainedRollout], **more: Any) -> dict[str, Finding]:
    return {finding.name: finding for finding in diagnose(facts_of(rows, **more), text)}


def test_healthy_rollouts_have_no_finding():
    assert findings(healthy()) == {}
    assert findings([]) == {}


def empty_paid_at_level_0(step, group, index):
    is_empty = index == 3 and group == 0
    return {"completion_token_ids": ids(""), "reward": 1.0} if is_empty else {}


def longer_paid(step, group, index):
    return {"completion_token_ids": ids("long " * (1 + 10 * index)), "reward": float(index)}


def before() -> list[TrainedRollout]:
    """The first steps, with short completions."""
    return [rollout(step, group, index) for step in (1, 2) for group in range(GROUPS) for index in range(SIZE)]


def entropies(last: float) -> list[dict[str, float]]:
    """Metrics of twelve steps whose entropy falls to `last`."""
    return [{"policy/entropy": value} for value in np.linspace(1.0, last, 5).tolist() + [last] * 7]


PLANTED: dict[str, tuple[Callable[[int, int, int], Mapping[str, Any]], str]] = {
    "question_dropped": (
        lambda *_: {"prompt_token_ids": ids("Sort these words:")},
        "The prompts of 32 different tasks have only 1 different texts, for example 'Sort these words:'",
    ),
    "question_repeated": (
        lambda step, group, _: {"prompt_token_ids": ids(f"pear {group} fig {step} kiwi {group * step}\n" * 2)},
        "100% of the prompts have the text of column question more than once",
    ),
    "empty_rewarded": (
        empty_paid_at_level_0,
        "The reward pays for empty completions: 8 of 8 have a mean reward of 1.00",
    ),
    "copies": (
        lambda step, group, _: {"completion_token_ids": ids(f"pear {group} fig {step} kiwi")},
        "100% of the newest completions occur word for word in their prompt (mean reward 0.50)",
    ),
    "cut_off": (
        lambda step, group, index: {"finish_reason": "stop" if index == 3 else "length"},
        "75% of the newest rollouts were cut off (mean reward 0.33, of complete ones 1.00)",
    ),
    "never_succeeds": (
        lambda step, group, index: {"reward": 0.0} if group % 3 == 1 else {},
        "All 32 newest rollouts of tasks with level = '1' have the lowest reward, 0.00; the others have 0.50",
    ),
    "components_disagree": (
        lambda step, group, index: {
            "reward_components": components(format=index != 2, right=index >= 2), "reward": 1.0 + (index == 3),
        },
        "rollouts with more of the component format have less of right (correlation -0.58)",
    ),
    "task_dominates": (
        lambda step, group, index: {"task": '{"answer": "same"}', "advantage": 9.0} if group == 0 else {},
        "One task of 25, '{\"answer\": \"same\"}', has",
    ),
    "source_dominates": (
        lambda step, group, index: {"source": "new", "advantage": 9.0} if group == 0 else {},
        "One source of 2, 'new', has",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_fault_is_the_only_finding(name):
    change, sentence = PLANTED[name]
    rows = healthy(change)
    named = findings(rows)
    assert list(named) == [name]
    assert sentence in named[name].text
    rollouts = {row.name for row in rows}
    assert named[name].rollouts
    assert set(named[name].rollouts) <= rollouts


HARMLESS: dict[str, Callable[[int, int, int], Mapping[str, Any]]] = {
    "a component is a penalty": lambda step, group, index: {
        "reward_components": components(format=index % 2, right=1 - index % 2), "reward": 1.0 - 2 * (index % 2),
    },
    "solved but for one group": lambda step, group, index: {
        "reward": 1.0 - (step == 5 and group == 1 and index == 2), "finish_reason": "length",
        "advantage": -0.5 if step == 5 and group == 1 else 0.0,
    },
    "one prompt with an id": lambda step, group, index: {
        "prompt_token_ids": ids("Play."), "task": json.dumps({"id": f"a{step}.{group}", "seed": step}),
    },
    "an environment, some of whose episodes have one turn": lambda step, group, index: {
        "prompt_token_ids": ids("Play."), "turn_spans": (TurnSpan(0, 2), TurnSpan(3, 5)) if index == 0 else (),
    },
    "copies are paid less": lambda step, group, index: {
        "completion_token_ids": ids(f"pear {group} fig {step} kiwi"), "reward": 0.0,
    } if index < 3 else {},
    "one hard prompt": lambda step, group, index: {
        "task": '{"level": "hard"}' if group == 1 else json.dumps({"level": f"{step % 3}", "question": f"{step}"}),
        "reward": 0.0 if group == 1 else float(index % 2),
    },
    "rewards that are no numbers": lambda step, group, index: {"reward": math.inf} if index == 3 else {},
}  # fmt: skip


@pytest.mark.parametrize("name", HARMLESS)
def test_what_is_no_fault_is_not_named(name):
    assert findings(healthy(HARMLESS[name])) == {}


def test_rewards_of_another_range_may_be_solved():
    near_the_best = healthy(lambda step, group, index: {"reward": -1.0 if (step, group, index) == (5, 1, 2) else 0.0})
    assert findings(near_the_best, metrics=entropies(0.001)) == {}
    assert "no_entropy" in findings(healthy(lambda step, group, index: {"reward": 100.0 * (index == 0)}),
                                    metrics=entropies(0.001))  # fmt: skip


def test_names_of_columns_and_values_are_printable():
    column = "a\x1b[31m'\"$\n"

    def change(step: int, group: int, index: int) -> dict[str, Any]:
        task = json.dumps({column: group % 3, "question": f"{step} {group}"})
        return {"task": task, "reward": 0.0 if group == 1 else float(index % 2)}

    rows = healthy(change)
    finding = findings(rows)["never_succeeds"]
    assert finding.text.isprintable()
    assert "''" in finding.sql


def test_the_paid_task_of_empty_completions_is_named_with_them():
    finding = findings(healthy(empty_paid_at_level_0))["empty_rewarded"]
    shown = {row.name: row for row in healthy(empty_paid_at_level_0)}
    assert all(not len(shown[name].completion_token_ids) for name in finding.rollouts)


def test_a_reward_that_follows_the_length_is_named_once_the_completions_have_grown():
    first = [rollout(step, group, index) for step in (1, 2) for group in range(GROUPS) for index in range(SIZE)]
    assert (
        "(correlation 1.00), and the mean length rose from"
        in findings(first + healthy(longer_paid))["length_alone"].text
    )
    assert "length_alone" not in findings(healthy(longer_paid))  # as long as in the first steps


@pytest.mark.parametrize(("last", "is_named"), [(0.001, True), (0.3, False)])
def test_a_policy_without_entropy_is_named(last, is_named):
    named = findings(healthy(), metrics=entropies(last))
    assert ("no_entropy" in named) == is_named
    solved = healthy(lambda *_: {"reward": 1.0, "advantage": 0.0})
    assert findings(solved, metrics=entropies(last)) == {}


@pytest.mark.parametrize(("last", "is_named"), [(0.2, True), (0.55, False)])
def test_a_held_out_curve_that_leaves_the_training_curve_is_named(last, is_named):
    def evaluation(version: int, accuracy: float) -> EvalRecord:
        return EvalRecord(
            version=version, num_prompts=64, accuracy=accuracy, low=accuracy - 0.1, high=accuracy + 0.1,
            mean_tokens=8.0, errors=0, seconds=1.0, samples=(),
        )  # fmt: skip

    facts = replace(facts_of(healthy()), evals={3: evaluation(3, 0.6), 10: evaluation(10, last)})
    named = {finding.name: finding for finding in diagnose(facts, text)}
    assert ("held_out_leaves" in named) == is_named
    if is_named:
        assert "from version 3 to 10 the held-out accuracy fell from 0.600 to 0.200" in named["held_out_leaves"].text


def test_turns_that_are_cut_name_the_limit_of_a_turn():
    facts = facts_of(healthy(PLANTED["cut_off"][0]))
    facts.run.config["rollouts"] = {"max_tokens": 1000}
    facts.run.config["environment"] = {"turn_tokens": 24}
    (finding,) = diagnose(facts, None)
    assert "set environment.turn_tokens higher (now 24)" in finding.text


def test_texts_are_not_looked_at_without_a_tokenizer():
    rows = healthy(PLANTED["question_dropped"][0])
    assert diagnose(facts_of(rows), None) == []


def test_report_page_and_status_of_a_run_have_the_findings(store):
    write_run(store, Shape(steps=12))
    assert build_report(store)["findings"] == []
    assert "Diagnosis" not in render_report(store)
    follower = RunFollower(store)
    follower.refresh()
    facts = newest_facts(follower)
    assert [step.step for step in facts.steps] == list(range(1, 13))
    assert {row.step for row in facts.newest_rows} == set(range(5, 13))
    write_run(store, Shape(steps=12, finish_reason=FinishReason.LENGTH))
    findings = build_report(store)["findings"]
    assert [finding["name"] for finding in findings] == ["cut_off"]
    assert run_status(store)["findings"] == findings
    assert f"diagnosis: {findings[0]['text']}" in format_status(store, run_status(store))
    page = render_report(store)
    assert '<section id="diagnosis">' in page
    assert "pipelinerl sql synthetic" in page


def test_the_query_of_each_finding_is_answered_by_a_run(tmp_path, prepared_model):
    store = open_store(str(tmp_path / "root" / "synthetic"))
    write_run(store, Shape(steps=3))
    queries = {name: findings(healthy(change))[name].sql for name, (change, _) in PLANTED.items()}
    queries["length_alone"] = findings([*before(), *healthy(longer_paid)])["length_alone"].sql
    queries["no_entropy"] = findings(healthy(), metrics=entropies(0.001))["no_entropy"].sql
    assert {name for name, sql in queries.items() if not sql} == {"question_repeated"}
    with Database(stores_of(store.url)) as database:
        for sql in filter(None, queries.values()):
            assert database.table(sql).num_columns >= 2


def test_a_batch_that_cannot_be_read_costs_no_status(store, tmp_path):
    write_run(store, Shape(steps=3))
    keys = [entry.name for commit in read_commits(store).values() for entry in commit.batches]
    store.put(keys[-1], b"\x00" + store.get(keys[-1])[1:])
    store.delete(keys[:1])
    assert run_status(store)["findings"] == []
    (tmp_path / "tokenizer.json").write_text("{bad")
    assert text_decoder(str(tmp_path)) is None
