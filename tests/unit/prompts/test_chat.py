"""Prompts become token ids."""

import string

import numpy as np
import pytest

from pipelinerl_core.errors import ConfigError
from pipelinerl_core.models.recipes import SumsModel
from pipelinerl_core.prompts import encode_prompt
from pipelinerl_core.training.warm_start import build_tokenizer
from pipelinerl_core.types import Prompt


def prompt(text):
    return Prompt(prompt_id="0" * 16, source="sums", env="sums", text=text)


def test_a_prompt_is_its_characters():
    ids = encode_prompt(prompt("10+9="), build_tokenizer(SumsModel().alphabet), chat_template=False)
    assert ids.dtype == np.int32
    assert ids.tolist() == [3, 2, 12, 11, 13]  # 0 is padding, 1 the end, 2 is "0", 12 is "+", 13 is "="


def test_a_chat_template_wraps_the_prompt_as_a_user_message():
    tokenizer = build_tokenizer("abcdefgh:")
    tokenizer.chat_template = (
        "{% for message in messages %}{{ message['content'] }}:{% endfor %}"  # each message, then a colon
        "{% if add_generation_prompt %}a:{% endif %}"
    )
    ids = encode_prompt(prompt("bc"), tokenizer, chat_template=True)
    assert tokenizer.decode(ids) == "bc:a:"


def test_a_missing_template_a_foreign_letter_and_an_empty_prompt_are_one_line_each():
    tokenizer = build_tokenizer("0123456789+=")
    with pytest.raises(ConfigError, match="has no chat template"):
        encode_prompt(prompt("1+1="), tokenizer, chat_template=True)
    with pytest.raises(ConfigError, match="cannot encode prompt 'What'"):
        encode_prompt(prompt("What"), tokenizer, chat_template=False)
    with pytest.raises(ConfigError, match="has no tokens"):
        encode_prompt(prompt(""), tokenizer, chat_template=False)


def test_a_template_that_writes_the_date_writes_the_same_on_each_day():
    tokenizer = build_tokenizer(string.printable)
    tokenizer.chat_template = "{{ strftime_now('%d %b %Y') }}: {{ messages[0]['content'] }}"
    assert tokenizer.decode(encode_prompt(prompt("x"), tokenizer, chat_template=True)) == "26 Jul 2024: x"


CHATML_TURNS = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
CHATML_DEFAULT = (
    "{% if messages[0]['role'] != 'system' %}{{ '<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n' }}"
    "{% endif %}"
)
DATED = (  # begins with the bos token; an empty system message still has a date
    "{{ '<s>' }}{% if messages[0]['role'] == 'system' %}{% set system = messages[0]['content'] %}"
    "{% set messages = messages[1:] %}{% else %}{% set system = '' %}{% endif %}"
    "{{ '<|head|>system<|/head|>\n\nToday: 26 Jul 2024\n\n' + system + '<|eot|>' }}"
    "{% for message in messages %}{{ '<|head|>' + message['role'] + '<|/head|>\n\n' }}"
    "{{ message['content'] + '<|eot|>' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|head|>assistant<|/head|>\n\n' }}{% endif %}"
)
INSIDE_USER = (  # writes a system message into the first turn of the user
    "{% if messages[0]['role'] == 'system' %}{% set system = '<<SYS>>' + messages[0]['content'] + '<</SYS>>' %}"
    "{% set messages = messages[1:] %}{% else %}{% set system = '' %}{% endif %}"
    "{% for message in messages %}{{ '<s>[INST] ' + system + message['content'] + ' [/INST]' }}{% endfor %}"
)
DEFAULT_INSIDE_USER = INSIDE_USER.replace("set system = ''", "set system = '<<SYS>>Be kind.<</SYS>>'")
REFUSES = (
    "{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
    "<s>{{ messages[0]['content'] }}|"
)
DROPS = "{% for message in messages if message['role'] != 'system' %}{{ message['content'] + '|' }}{% endfor %}"
CHATML_USER = "<|im_start|>user\nHi there<|im_end|>\n<|im_start|>assistant\n"


USER_PARTS = (  # the content of a user is in parts, that of the system is a text
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' }}"
    "{% if message['role'] == 'user' %}{% for part in message['content'] %}{{ part['text'] }}{% endfor %}"
    "{% else %}{{ message['content'] }}{% endif %}{{ '<|im_end|>\n' }}{% endfor %}"
)
NEEDS_SYSTEM = (
    "{% if messages[0]['role'] != 'system' %}{{ raise_exception('a system message is required') }}{% endif %}"
)


def test_a_template_may_want_parts_for_one_role_only():
    assert (
        rendered(USER_PARTS, "Count.")
        == "<|im_start|>system\nCount.<|im_end|>\n<|im_start|>user\nHi there<|im_end|>\n"
    )


def test_a_template_may_require_a_system_message():
    assert rendered(NEEDS_SYSTEM + CHATML_TURNS, "Count.") == "<|im_start|>system\nCount.<|im_end|>\n" + CHATML_USER
    with pytest.raises(ConfigError, match=r"fails .a system message is required"):
        rendered(NEEDS_SYSTEM + CHATML_TURNS, "default")


@pytest.mark.parametrize("template", ["{{ 1 / 0 }}", "{{ messages[0]['content'] + 1 }}", {"rag": CHATML_TURNS}])
def test_any_error_of_a_template_is_one_line(template):
    with pytest.raises(ConfigError, match=r"the chat template of model\.path fails"):
        rendered(template, "default")


def rendered(template, system, bos="<s>"):
    tokenizer = build_tokenizer(string.printable)
    tokenizer.chat_template, tokenizer.bos_token = template, bos
    ids = encode_prompt(prompt("Hi there"), tokenizer, chat_template=True, system=system)
    return tokenizer.decode(ids)


@pytest.mark.parametrize(
    ("template", "bos", "expected"),
    [
        (CHATML_DEFAULT + CHATML_TURNS, "<|im_start|>", CHATML_USER),
        (CHATML_DEFAULT + CHATML_TURNS, None, CHATML_USER),
        (CHATML_TURNS, None, CHATML_USER),
        (DATED, "<s>", "<s><|head|>user<|/head|>\n\nHi there<|eot|><|head|>assistant<|/head|>\n\n"),
        (INSIDE_USER, "<s>", "<s>[INST] Hi there [/INST]"),
        (REFUSES, "<s>", "<s>Hi there|"),
    ],
)
def test_system_none_leaves_the_turn_of_the_user_alone(template, bos, expected):
    assert rendered(template, "none", bos) == expected


def test_system_default_is_the_prompt_of_the_template_and_a_text_replaces_that_prompt():
    template = CHATML_DEFAULT + CHATML_TURNS
    assert rendered(template, "default") == (
        "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n" + CHATML_USER
    )
    assert rendered(template, "Count.") == "<|im_start|>system\nCount.<|im_end|>\n" + CHATML_USER


@pytest.mark.parametrize(
    ("template", "system", "message"),
    [
        (REFUSES, "Count.", r"prompts\.system='Count\.': .* refuses a system message \(System role not supported\)"),
        (DROPS, "Count.", r"prompts\.system='Count\.': .* leaves a system message out\. Set prompts\.system=none"),
        (DEFAULT_INSIDE_USER, "none", r"prompts\.system=none: .* cannot be told from the prompt"),
    ],
)
def test_a_template_that_does_not_support_the_system_setting_is_one_line(template, system, message):
    with pytest.raises(ConfigError, match=message) as caught:
        rendered(template, system)
    assert "\n" not in str(caught.value)
