"""The check of the prompts before a run starts: counts, lengths, and one line for every mistake."""

import json
import re
import string

import pytest

from pipelinerl_core.errors import ConfigError
from pipelinerl_core.models.resolve import build_config
from pipelinerl_core.prompts.check import check
from pipelinerl_core.training.warm_start import build_tokenizer


@pytest.fixture
def model(tmp_path):
    build_tokenizer(string.printable).save_pretrained(tmp_path / "model")
    (tmp_path / "model" / "config.json").write_text('{"max_position_embeddings": 400}')
    return tmp_path / "model"


def lines(tmp_path, path_of_model, lengths, **sections):
    path = tmp_path / "rows.jsonl"
    rows = ({"prompt": f"{number:03}".ljust(length, "."), "answer": number} for number, length in enumerate(lengths))
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    values = {"model": {"path": str(path_of_model)}, "prompts": {"kind": "file", "path": str(path)}}
    return check(
        build_config({**values, **{name: {**values.get(name, {}), **own} for name, own in sections.items()}})
    )


def test_the_prompts_are_counted_and_measured(tmp_path, model):
    counted, measured, shown = lines(tmp_path, model, [10] * 50)
    assert counted == "40 different prompts to train on (40 rows), 10 held out (20.0%)"
    assert measured == "tokens of the first 40 prompts: median 10, 95th percentile 10, longest 10"
    assert re.fullmatch(r"the first prompt, as the model sees it: '\d{3}\.{7}'; reference answer '\d+'", shown)


CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
PARTS = CHATML.replace("message['content']", "message['content'][0]['text']")


def with_template(model, template):
    tokenizer = build_tokenizer(string.printable)
    tokenizer.chat_template = template
    tokenizer.save_pretrained(model)


@pytest.mark.parametrize("template", [CHATML, PARTS])
def test_the_first_prompt_is_shown_with_what_the_template_adds(tmp_path, model, template):
    with_template(model, template)
    shown = lines(tmp_path, model, [10] * 50, model={"chat_template": True})[-1]
    assert re.search(r"sees it: '<\|im_start\|>user\\n\d{3}\.{7}<\|im_end\|>\\n<\|im_start\|>assistant\\n'; ", shown)


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{% for message in messages %}{{ '<|end|>' }}{% endfor %}A:", "leaves out the text of a message"),
        (
            "{{ messages[0]['content'] | unknown }}",
            r"the chat template of model.path fails \(No filter named 'unknown'",
        ),
        (
            "{{ messages[0]['content'][:20] }}",
            r"changes the text of the prompt '.*' to '.{20}'\. Correct the template",
        ),
        ("{{ messages[0]['content'] | replace('.', '') }}", "changes the text of the prompt"),
        ("{{ 1 / 0 }}", r"the chat template of model.path fails \(ZeroDivisionError: division by zero\)"),
        ("{% include 'other' %}", r"the chat template of model.path fails \(TypeError: no loader"),
    ],
)
def test_a_template_that_does_not_write_the_prompt_is_one_line(tmp_path, model, template, message):
    with_template(model, template)
    with pytest.raises(ConfigError, match=message):
        lines(tmp_path, model, [30] * 50, model={"chat_template": True})


def test_a_template_whose_turns_end_at_no_end_token_of_the_model_is_told(tmp_path, model):
    tokenizer = build_tokenizer(string.printable)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>"]})
    tokenizer.chat_template = CHATML
    tokenizer.save_pretrained(model)
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    size = {"vocab_size": end + 1}
    settings = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**settings, **size}))
    told = lines(tmp_path, model, [10] * 50, model={"chat_template": True})[-1]
    assert told.startswith("the chat template ends a turn with '<|im_end|>', at which the model does not stop (eos_")
    (model / "generation_config.json").write_text(json.dumps({"eos_token_id": [1, end]}))
    assert "does not stop" not in lines(tmp_path, model, [10] * 50, model={"chat_template": True})[-1]


def test_prompts_beyond_the_limit_are_counted_and_the_limit_that_admits_all_is_named(tmp_path, model):
    measured = lines(tmp_path, model, [10, 90] * 25, rollouts={"max_prompt_tokens": 64})[-2]
    num_long = int(measured.partition("longest 90; ")[2].split()[0])
    assert 15 <= num_long <= 25
    assert measured.endswith(
        "max_prompt_tokens=64, fail and are not trained on. rollouts.max_prompt_tokens=90 admits all"
    )


def test_a_short_context_leaves_less_room_for_prompts(tmp_path, model):
    measured = lines(tmp_path, model, [10, 90] * 25, rollouts={"max_tokens": 350})[-2]
    assert measured.endswith(
        "the context of the model less rollouts.max_tokens=350, fail and are not trained on. "
        "rollouts.max_tokens=310 admits all"
    )


def test_a_template_that_trims_is_not_said_to_change_the_text(tmp_path, model):
    with_template(model, "{{ messages[0]['content'] | trim }}:")
    shown = lines(tmp_path, model, [1] * 50, model={"chat_template": True}, prompts={"template": "  {prompt} "})[-1]
    assert re.search(r"sees it: '\d{3}:'", shown)


def test_equal_answers_and_an_empty_prompt_are_told(tmp_path):
    path = tmp_path / "rows.jsonl"
    rows = [{"prompt": f"{number}?", "answer": "5"} for number in range(20)]
    values = {"model": {"path": "none"}, "prompts": {"kind": "file", "path": str(path)}}
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert check(build_config(values))[-1] == "all 20 rows have the answer '5': the same reply is always right"
    rows[7]["prompt"] = ""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.raises(ConfigError, match=r"row 7 of prompts\.path=.* has an empty prompt\. Remove such rows"):
        check(build_config(values))


def test_without_the_model_only_the_rows_are_counted(tmp_path):
    assert len(lines(tmp_path, tmp_path / "none", [10] * 50)) == 1


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        (
            {"rollouts": {"max_prompt_tokens": 8}},
            r"all of .* are longer .* than .*max_prompt_tokens=8\. .*max_prompt_tokens=10 admits all",
        ),
        ({"model": {"chat_template": True}}, "the tokenizer of model.path has no chat template"),
        ({"prompts": {"template": "{prompt} \N{SNOWMAN}"}}, "the tokenizer of model.path cannot encode"),
    ],
)
def test_prompts_that_the_model_cannot_take_are_one_line(tmp_path, model, sections, message):
    with pytest.raises(ConfigError, match=message) as caught:
        lines(tmp_path, model, [10] * 50, **sections)
    assert "\n" not in str(caught.value)


def test_a_damaged_tokenizer_is_one_line(tmp_path, model):
    (model / "tokenizer.json").write_text("{")
    with pytest.raises(ConfigError, match=r"model.path=.*: the tokenizer cannot be loaded") as caught:
        lines(tmp_path, model, [10] * 50)
    assert "\n" not in str(caught.value)


def test_a_model_without_tokenizer_or_with_the_tokenizer_of_another_model_is_one_line(tmp_path, model):
    (model / "config.json").write_text('{"max_position_embeddings": 400, "vocab_size": 5}')
    with pytest.raises(ConfigError, match=r"its tokenizer writes token \d+, but .* a vocabulary of 5 tokens"):
        lines(tmp_path, model, [10] * 50)
    for path in model.glob("token*"):
        path.unlink()
    with pytest.raises(ConfigError, match=r"model.path=.*: has no tokenizer\. Copy tokenizer.json"):
        lines(tmp_path, model, [10] * 50)
