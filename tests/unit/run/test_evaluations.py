"""Which versions are evaluated, and when there are enough; the record of a mixture."""

import pytest

from pipelinerl_core.models.resolve import load_config
from pipelinerl_core.run.evaluations import (
    best_version,
    evaluation_line,
    next_scheduled,
    next_to_evaluate,
    weighted_mean,
)
from pipelinerl_core.run.records import EvalRecord
from pipelinerl_core.run.versions import names_several


def test_versions_are_evaluated_in_order_and_once():
    assert next_to_evaluate([10, 0, 5], {}) == 0
    assert next_to_evaluate([0, 5, 10], {0: 0.2, 10: 0.4}) == 5
    assert next_to_evaluate([0, 5], {0: 0.2, 5: 0.3}) is None


def test_two_versions_at_the_level_are_enough():
    assert next_to_evaluate([0, 5, 10, 15], {0: 0.2, 5: 0.5, 10: 0.4}, enough=0.5) == 15
    assert next_to_evaluate([0, 5, 10, 15, 20], {0: 0.2, 5: 0.5, 10: 0.4, 15: 0.6}, enough=0.5) is None


def test_an_evaluator_beside_training_takes_the_first_the_newest_due_and_the_last_version():
    config = load_config("quickstart", ["trainer.steps=40", "eval.every_steps=10"])
    assert next_scheduled(config, [], []) is None
    assert next_scheduled(config, [0, 1], []) == 0
    assert next_scheduled(config, range(10), [0]) is None
    assert next_scheduled(config, range(25), [0]) == 20, "10 is overtaken"
    assert next_scheduled(config, range(25), [0, 20]) is None
    assert next_scheduled(config, range(35), [0, 31]) is None, "an actor has evaluated 31"
    assert next_scheduled(config, range(41), [0, 20]) == 40
    assert next_scheduled(config, range(41), [0, 40]) is None


def evaluated(version, accuracy, low, **values):
    return EvalRecord(version=version, accuracy=accuracy, low=low, num_prompts=10, mean_tokens=1.0, errors=0,
                      seconds=1.0, **values)  # fmt: skip


def test_the_best_version_has_the_highest_lower_end_of_an_interval_of_its_own():
    records = {
        0: evaluated(0, 0.30, 0.28),
        5: evaluated(5, 0.60, 0.35),  # of few prompts
        8: evaluated(8, 0.52, 0.49),
        9: evaluated(9, 0.90, 0.80, last_version=11),  # tokens of several versions
        10: evaluated(10, 0.51, 0.49),
        12: evaluated(12, 1.00, None),
    }
    assert best_version(records) == 8, "of equal ends the earlier"
    assert best_version({12: records[12]}) is None
    assert best_version({}) is None


def test_one_version_or_several():
    assert [names_several(text) for text in ("last", "12", "all", "0,5")] == [False, False, True, True]


def test_the_line_of_an_evaluation_names_set_interval_and_components():
    values = {"num_prompts": 4, "accuracy": 0.5, "mean_tokens": 3.0, "errors": 0, "seconds": 1.25}
    assert evaluation_line(EvalRecord(version=0, **values)) == (
        "version 0: accuracy 0.500 on 4 prompts, mean length 3.0 tokens, 1.2 s"
    )
    further = {"low": 0.15, "high": 0.85, "components": {"correct": 0.5, "brief": 1.0}}
    assert evaluation_line(EvalRecord(version=2, set="hard", **values, **further)) == (
        "version 2 on hard: reward 0.500 (0.150 to 0.850) on 4 prompts, mean length 3.0 tokens, 1.2 s; "
        "correct 0.500, brief 1.000"
    )


def test_an_evaluation_without_a_reward_has_no_accuracy_and_names_the_error():
    values = {"num_prompts": 20, "accuracy": 0.0, "mean_tokens": 0.0, "seconds": 1.0, "error": "reward: ValueError"}
    failed = EvalRecord(version=0, errors=20, **values)
    assert failed.known_accuracy is None
    assert evaluation_line(failed) == "version 0: no reward, all 20 completions failed; reward: ValueError"
    some = EvalRecord(version=0, errors=3, low=0.0, high=0.2, **values)
    assert some.known_accuracy == 0.0
    assert evaluation_line(some).endswith("1.0 s; 3 completions failed: reward: ValueError")
    assert EvalRecord(version=0, errors=0, **values).known_accuracy == 0.0


def of_part(name, accuracy, half=0.1, **values):
    known = {"num_prompts": 10, "mean_tokens": 4.0, "errors": 0, "seconds": 1.0}
    if half is not None:
        known |= {"low": accuracy - half, "high": accuracy + half}
    return EvalRecord(version=3, last_version=4, set=name, accuracy=accuracy, **{**known, **values})


def test_the_accuracy_of_a_mixture_is_the_weighted_mean_of_its_parts():
    record = weighted_mean([of_part("math", 0.2), of_part("guess", 0.8, mean_tokens=8.0)], {"math": 3, "guess": 1})
    assert (record.set, record.version, record.last_version, record.num_prompts) == ("", 3, 4, 20)
    assert record.accuracy == pytest.approx(0.75 * 0.2 + 0.25 * 0.8)
    assert record.mean_tokens == 5.0
    # Half widths of independent means: root of (0.75 * 0.1)^2 + (0.25 * 0.1)^2 = 0.0790569.
    assert record.accuracy - record.low == pytest.approx(0.0790569)
    assert record.high - record.accuracy == pytest.approx(0.0790569)


def test_a_part_without_a_reward_is_left_out_of_the_mean_and_named():
    broken = of_part("guess", 0.0, half=None, errors=10, error="process died")
    record = weighted_mean([of_part("math", 0.2), broken], {"math": 3, "guess": 1})
    assert record.accuracy == pytest.approx(0.2)
    assert (record.errors, record.error) == (10, "mixture.guess: process died")
    assert record.known_accuracy == pytest.approx(0.2)
    assert weighted_mean([broken], {"guess": 1}).known_accuracy is None
