"""Digests of what makes a text the input of the model, which actors and trainer send to the hub at registration.

Re-scoring cannot see that an actor has another tokenizer than the trainer's model: both sides score the same tokens.
"""

import hashlib
import json
from typing import Any

from transformers import AutoTokenizer

from pipelinerl_core.config import RunConfig
from pipelinerl_core.errors import ConfigError
from pipelinerl_core.models.paths import end_tokens_of, require_model
from pipelinerl_core.prompts.chat import encode_prompt
from pipelinerl_core.types import Prompt

_TEXTS = ("1+2+3=", "What is 17 * 24?\nReason step by step.", "  def f(x):\n\treturn x  # naïve, 数学, 🙂")


def token_digests(config: RunConfig) -> dict[str, str]:
    """Name -> digest, of the model in model.path on this host. Raises ConfigError if the directory does not exist.

    Fixed texts are encoded as every part encodes its prompts: another version of transformers may render a template
    or split a text otherwise, with the same files.
    """
    directory = require_model(config.model.path)
    tokenizer: Any = AutoTokenizer.from_pretrained(directory)
    values = {
        "vocabulary": sorted(tokenizer.get_vocab().items()),
        "chat template": tokenizer.chat_template,
        "end tokens": end_tokens_of(directory),
        "encoded texts": [_encoded(text, tokenizer, part) for part in config.parts.values() for text in _TEXTS],
    }
    return {name: hashlib.sha256(json.dumps(value).encode()).hexdigest()[:16] for name, value in values.items()}


def _encoded(text: str, tokenizer: Any, part: RunConfig) -> list[int]:
    """Token ids; empty if the tokenizer cannot encode the text, because small vocabularies lack most characters."""
    prompt = Prompt(prompt_id="", source="", env="", text=text)
    try:
        prompts = part.prompts
        ids = encode_prompt(prompt, tokenizer, part.model.chat_template, prompts.system, prompts.control_tokens)
    except ConfigError:
        return []
    return [int(token_id) for token_id in ids]
