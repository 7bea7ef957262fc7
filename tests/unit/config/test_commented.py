"""`pipelinerl init`: a commented configuration is the configuration, with every key and its meaning."""

import re

import pytest

from pipelinerl_core.config import preset_names
from pipelinerl_core.config.commented import commented_toml
from pipelinerl_core.config.load import known_keys
from pipelinerl_core.models.resolve import load_config

WITH_TABLES = (
    "prompts.kind=file",
    'prompts.path=it\'s "quoted" \u00e4 \\ .jsonl',
    'reward.weights={correct = 0.9, "very brief" = 0.1}',
    "reward.kind=auto",
    "reward.function=rewards.py:score",
    "prompts.template={question}\\nAnswer",
)


@pytest.mark.parametrize("overrides", [(), WITH_TABLES])
@pytest.mark.parametrize("preset", preset_names())
def test_the_file_reads_back_to_the_same_configuration(tmp_path, preset, overrides):
    config = load_config(preset, overrides)
    (tmp_path / "mine.toml").write_text(commented_toml(config, "A title."))
    assert load_config(str(tmp_path / "mine.toml")) == config


def test_every_setting_still_holds_when_its_comment_sign_is_deleted(tmp_path):
    config = load_config("quickstart")
    text = re.sub(r"^# (\w+ = )", r"\1", commented_toml(config), flags=re.MULTILINE)
    (tmp_path / "mine.toml").write_text(text)
    assert load_config(str(tmp_path / "mine.toml")) == config


def test_every_key_of_the_sections_has_its_meaning_above():
    text = commented_toml(load_config("quickstart"))
    for key in known_keys("trainer"):
        name = key.partition(".")[2]
        assert re.search(rf"^# .+\n(# )?{name} = ", text, re.MULTILINE), key
    assert re.search(r"^steps = 140$", text, re.MULTILINE)
    assert re.search(r"^# threads = 1$", text, re.MULTILINE)
    assert "Another prompts.kind" in text
