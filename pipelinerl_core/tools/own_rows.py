"""Settings for rows and a reward of the user, guessed from the rows: `pipelinerl try` and `pipelinerl.train`."""

import json
from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from pipelinerl_core.errors import ConfigError
from pipelinerl_core.models.paths import lacks_chat_template
from pipelinerl_core.prompts.records import Records, read_file

PRESET = "smollm2"
"""The preset that the guessed settings change."""
_PROMPTS = ("prompt", "question", "problem", "query", "instruction", "messages", "input", "text")
_ANSWERS = (
    "answer", "reward_model.ground_truth", "ground_truth", "solution", "target", "label", "reference", "output",
)  # fmt: skip
_MEASURED = 2000
"""Rows whose lengths are measured."""
_SHORT_CHARACTERS = 96
"""Up to this length a token may be one character, as in rows of digits; longer texts have two or more per token."""
_TEMPLATE_TOKENS = 32
_MAX_PROMPT_TOKENS = 1024
_MAX_TOKENS = 128
_TOKENS_WITHOUT_ANSWER = 48


def guess(path: str, reward: str = "", overrides: Sequence[str] = ()) -> tuple[str, ...]:
    """Overrides of PRESET for the rows of a file and a reward function, FILE.py:FUNCTION; empty: the built-in
    verifier, which compares with the answer. overrides: of the user, which name the columns if they have other names.

    Raises ConfigError if the file cannot be read, or if no column is known as the prompt.
    """
    rows = read_file(Path(path), f"prompts.path={path}")
    columns = rows.columns()
    given = {key.strip(): value for key, _, value in (override.partition("=") for override in overrides)}
    model = given.get("model.path")
    known = (name for name in _PROMPTS if name in columns)
    prompt = given.get("prompts.prompt_column") or next(known, "")
    answer = given.get("prompts.answer_column") or next((name for name in _ANSWERS if name in columns), "")
    if not prompt and "prompts.template" not in given:
        raise ConfigError(
            f"{path}: no column has the name of a prompt ({', '.join(_PROMPTS)}); its columns are "
            f"{', '.join(columns) or 'none'}. Add prompts.prompt_column=COLUMN"
        )
    longest = _longest(rows, prompt) if prompt else sum(_longest(rows, name) for name in columns)
    completion = 16 + _tokens(_longest(rows, answer)) if answer else _TOKENS_WITHOUT_ANSWER
    settings = {
        "prompts.kind": "file",
        "prompts.path": path,
        **({"prompts.prompt_column": prompt} if prompt else {}),
        **({"prompts.answer_column": answer} if answer else {}),
        **({"reward.function": reward} if reward else {}),
        **({"model.chat_template": "false"} if model and lacks_chat_template(model) else {}),
        **({"learner.lr": "auto"} if model else {}),  # the rate of the preset is for its model
        "rollouts.max_prompt_tokens": min(_MAX_PROMPT_TOKENS, _TEMPLATE_TOKENS + _tokens(longest)),
        "rollouts.max_tokens": min(_MAX_TOKENS, completion),
        "trainer.steps": 20,
        "eval.num_prompts": 64,
        "weights.durable_every": 10,
    }
    return tuple(f"{key}={value}" for key, value in settings.items())


def _tokens(characters: int) -> int:
    return max(min(characters, _SHORT_CHARACTERS), characters // 2)


def _longest(rows: Records, column: str) -> int:
    """Characters of the longest value of a column, in the first rows."""
    return max((len(_text(row, column.split("."))) for row in islice(rows, _MEASURED)), default=0)


def _text(value: Any, path: Sequence[str]) -> str:
    for name in path:
        value = value.get(name) if isinstance(value, dict) else None
    if isinstance(value, list):  # messages
        return "".join(str(message.get("content", "")) for message in value if isinstance(message, dict))
    return value if isinstance(value, str) else json.dumps(value)
