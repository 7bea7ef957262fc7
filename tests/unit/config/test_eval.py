"""The keys of `eval`: when a version is due for an evaluation, and the prompts of further sets."""

import pytest

from pipelinerl_core.errors import ConfigError
from pipelinerl_core.models.resolve import load_config


def due(*overrides):
    config = load_config("quickstart", list(overrides))
    return [step for step in range(config.trainer.steps + 1) if config.evaluates(step)]


def test_a_run_is_evaluated_about_ten_times_during_training_but_short_runs_are_not():
    assert due("trainer.steps=140") == [14, 28, 42, 56, 70, 84, 98, 112, 126]
    assert due("trainer.steps=19") == []
    assert due("trainer.steps=7", "eval.every_steps=3") == [3, 6]
    assert due("trainer.steps=6", "eval.every_steps=3") == [3], "the last version is evaluated after training"


@pytest.mark.parametrize("setting", ["eval.subset=0", "eval.num_prompts=0", "emulation.accelerators=4"])
def test_no_version_is_due(setting):
    assert due(setting, "eval.every_steps=3") == []


def test_only_published_versions_are_due_and_the_evaluator_finds_them_in_the_store():
    settings = ["trainer.steps=12", "weights.publish_every=2", "weights.durable_every=100", "eval.every_steps=3"]
    assert due(*settings) == [4, 6, 10]
    own = load_config("quickstart", settings)
    actors = load_config("quickstart", [*settings, "eval.on=actors"])
    assert [step for step in range(13) if own.publishes(step) and own.keeps(step)] == [0, 4, 6, 10, 12]
    assert [step for step in range(13) if actors.publishes(step) and actors.keeps(step)] == [0, 12]
    assert [own.due_evaluation(version) for version in (0, 3, 4, 5, 6, 9, 12)] == [0, 0, 4, 4, 6, 6, 10]


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ([], False),
        (["engine.kind=vllm"], True),
        (["placement.kind=work_pools"], True),
        (["engine.kind=vllm", "eval.on=own"], False),
        (["eval.on=actors"], True),
    ],
    ids=str,
)
def test_the_engine_of_the_evaluations(settings, expected):
    assert load_config("quickstart", settings).evaluates_on_actors is expected


def test_a_set_has_the_prompts_of_the_run_but_for_its_own_keys():
    config = load_config("quickstart", ["eval.sets.long.lengths=[8,20]", "eval.sets.pick.kind=largest_number"])
    assert config.with_set("long").prompts.lengths == (8, 20)
    expected = {"system": "default", "control_tokens": "text", "kind": "largest_number"}
    assert config.with_set("pick").prompts.model_dump() == expected
    files = load_config(
        "quickstart",
        [
            "prompts.kind=file", "prompts.path=train.jsonl", "prompts.held_out_path=test.jsonl",
            "prompts.prompt_column=question", "eval.sets.hard.path=hard.jsonl", "eval.sets.again.held_out_share=0.5",
        ],
    )  # fmt: skip
    hard = files.with_set("hard").prompts
    assert (hard.held_out_path, hard.prompt_column) == ("hard.jsonl", "question"), "all rows of the file"
    assert files.with_set("again").prompts.held_out_path == "test.jsonl"
    sets = ["eval.sets.test.split=test", "eval.sets.c.path=c/d"]
    hub = load_config("quickstart", ["prompts.kind=huggingface", "prompts.path=a/b", *sets])
    assert hub.with_set("test").prompts.held_out_split == "test"
    assert hub.with_set("c").prompts.held_out_split == "train"
    own = ["prompts.held_out_split=validation", "eval.sets.hard.config_name=hard", *sets]
    hub = load_config("quickstart", ["prompts.kind=huggingface", "prompts.path=a/b", *own])
    assert [hub.with_set(name).prompts.held_out_split for name in ("test", "c", "hard")] == [
        "test", "train", "validation"
    ]  # fmt: skip


def test_a_part_of_a_mixture_has_no_sets_which_are_of_the_run():
    sets = ["prompts.kind=file", "prompts.path=own.jsonl", "eval.sets.hard.path=hard.jsonl"]
    config = load_config("quickstart", [*sets, "mixture.own.weight=1", 'mixture.sums.prompts={kind="sums"}'])
    assert all(not part.eval.sets for part in config.parts.values())
    assert config.with_set("hard").prompts.path == "hard.jsonl"


@pytest.mark.parametrize(
    ("setting", "problem"),
    [
        ("eval.sets.Long.lengths=[8]", "eval.sets.Long: a name has lower-case letters"),
        ("eval.sets.a.lenghts=[8]", "eval.sets.a: lenghts: no key of prompts.kind=sums"),
        ("eval.sets.a.kind=dice", "eval.sets.a: kind: input tag 'dice' found"),
        ("eval.sets.a.kind=file", "eval.sets.a: path: field required"),
        ("eval.sets.a.system=hi", "eval.sets.a: prompts.system='hi' is a message of a chat template"),
        ("eval.sets.a=3", "eval.sets.a=3: input should be a valid dictionary"),
    ],
)
def test_a_wrong_set_is_one_line(setting, problem):
    with pytest.raises(ConfigError, match=r"^[^\n]*$") as caught:
        load_config("quickstart", [setting])
    assert str(caught.value).startswith(problem)


def test_an_evaluation_samples_as_training_does_unless_told():
    def sampling(*overrides):
        rollouts = load_config("quickstart", ["rollouts.temperature=0.7", *overrides]).for_evaluation.rollouts
        return rollouts.temperature, rollouts.top_p, rollouts.max_tokens

    assert sampling() == (0.7, 1.0, 80)
    assert sampling("eval.temperature=0", "eval.top_p=0.9", "eval.max_tokens=200") == (0.0, 0.9, 200)
    parts = ["mixture.a.weight=1", "mixture.b.weight=1", "mixture.b.max_tokens=20"]
    parts = load_config("quickstart", parts).parts
    assert [part.for_evaluation.rollouts.max_tokens for part in parts.values()] == [80, 20]


def test_only_the_engine_that_evaluates_reserves_memory_for_longer_completions():
    longer = load_config("quickstart", ["eval.max_tokens=200"])
    assert (longer.longest_completion, longer.for_evaluation.longest_completion) == (80, 200)
    assert load_config("quickstart", ["eval.max_tokens=200", "eval.on=actors"]).longest_completion == 200
    assert load_config("quickstart", ["eval.max_tokens=20", "eval.on=actors"]).longest_completion == 80


@pytest.mark.parametrize(
    ("setting", "problem"),
    [
        ("eval.temperature=-1", "eval.temperature=-1: input should be greater than or equal to 0"),
        ("eval.temperature=hot", "eval.temperature='hot': input should be a valid number"),
        ("eval.top_p=0", "eval.top_p=0: input should be greater than 0"),
    ],
)
def test_wrong_sampling_is_one_line(setting, problem):
    with pytest.raises(ConfigError, match=r"^[^\n;]*$") as caught:
        load_config("quickstart", [setting])
    assert str(caught.value).startswith(problem)


@pytest.mark.parametrize(
    ("overrides", "refused"),
    [
        (["environment.path=builtin:guess", "prompts.kind=environment", "eval.sets.x.kind=sums"], True),
        (["environment.path=builtin:math", "eval.sets.x.kind=environment"], True),
        (["environment.kind=code", "prompts.kind=environment", "eval.sets.x.kind=sums"], False),
        (["environment.path=builtin:math", "eval.sets.x.lengths=[8]"], False),
    ],
)
def test_a_set_has_the_kind_of_tasks_that_the_environment_plays(overrides, refused):
    if not refused:
        assert load_config("quickstart", overrides)
        return
    with pytest.raises(ConfigError, match=r"eval\.sets\.x: kind=.* does not suit environment\.path=builtin"):
        load_config("quickstart", overrides)


def test_an_evaluator_has_four_times_the_slots_of_an_actor_and_no_more_than_a_step_has_tokens():
    assert load_config("quickstart").evaluation_slots == 256
    assert load_config("quickstart", ["engine.concurrency=8"]).evaluation_slots == 32
    few = ["engine.kind=vllm", "engine.concurrency=64", "engine.batched_tokens=128"]
    assert load_config("quickstart", few).evaluation_slots == 128
    with pytest.raises(ConfigError, match=r"engine\.batched_tokens=63 is below engine\.concurrency=64"):
        load_config("quickstart", [*few, "engine.batched_tokens=63"])
