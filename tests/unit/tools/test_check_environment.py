"""The trial of an environment before the start: its first messages and tools become tokens of the model."""

import asyncio
import json

import pytest

from pipelinerl_core.errors import ConfigError
from pipelinerl_core.models.resolve import load_config
from pipelinerl_core.tools.check_environment import check
from pipelinerl_core.training.tiny_model import byte_tokenizer
from tests.families import entries_of

CODE = """
class Asks:
    weights = {"right": 1.0}

    async def play(self, task, ask, seed):
        return (await ask(MESSAGES, tools=TOOLS)).text

    def score(self, task, transcript):
        return {"right": 1.0}
"""
TOOL = {"name": "look", "description": "looks", "parameters": {"type": "object", "properties": {}}}
TEMPLATE_WITHOUT_TOOLS = "{% for message in messages %}{{ message.content }}<|im_end|>{% endfor %}"


@pytest.mark.parametrize(
    ("messages", "tools", "template", "message"),
    [
        ([{"role": "user", "content": "north"}], [], None, None),
        ([{"role": "user", "content": "go north " * 20}], [], None, r"have 199 tokens; from 1 to .*=99"),
        (
            [{"role": "user", "content": "north"}],
            [TOOL],
            TEMPLATE_WITHOUT_TOOLS,
            "model.path ignores tools; describe",
        ),
        ([{"role": "user", "content": [{"type": "image"}]}], [], None, "Convert contents to text"),
        ([], [], None, "failed before its first message: AskError"),
    ],
)
def test_first_messages_that_cannot_be_a_prompt_are_refused(tmp_path, messages, tools, template, message):
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = template or tokenizer.chat_template
    tokenizer.save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(entries_of("llama")))
    code = CODE.replace("MESSAGES", repr(messages)).replace("TOOLS", repr(tools))
    keys = [f"model.path={tmp_path}", "model.chat_template=true", "rollouts.max_prompt_tokens=99"]
    config = load_config("quickstart", ["environment.path=asks.py:Asks", "reward.kind=auto", *keys])
    if message is None:
        assert asyncio.run(check(config, code)) == ""
        return
    with pytest.raises(ConfigError, match=message) as caught:
        asyncio.run(check(config, code))
    assert "\n" not in str(caught.value)


def test_a_model_that_is_not_on_this_host_is_not_asked(tmp_path):
    code = CODE.replace("MESSAGES", "[{'role': 'user', 'content': 'x'}]").replace("TOOLS", "[]")
    config = load_config("quickstart", ["environment.path=asks.py:Asks", f"model.path={tmp_path / 'none'}"])
    assert asyncio.run(check(config, code)) == ""


def test_an_environment_that_starts_threads_is_told_which_key_allows_them(tmp_path):
    # A host without isolation starts the thread: the environment then raises what Python raises with isolation.
    started = """await __import__('asyncio').to_thread(print)
        raise RuntimeError("can't start new thread")
        return (await"""
    code = CODE.replace("return (await", started)
    config = load_config("quickstart", ["environment.path=asks.py:Asks", f"model.path={tmp_path / 'none'}"])
    with pytest.raises(ConfigError, match=r"start no threads .* unless environment\.network=true"):
        asyncio.run(check(config, code))
