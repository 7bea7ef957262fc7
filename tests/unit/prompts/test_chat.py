"""Prompts become token ids."""

import numpy as np
import pytest

from pipelinerl_core.config.model_path import SumsModel
from pipelinerl_core.errors import ConfigError
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
