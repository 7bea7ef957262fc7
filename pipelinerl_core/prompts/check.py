"""Check the prompts of the configuration on stdin (check_process.py); the lines are about the prompts."""

import sys
from collections.abc import Mapping
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
from jinja2 import TemplateError

from pipelinerl_core.check_process import run_check
from pipelinerl_core.config import RunConfig
from pipelinerl_core.config.mixture import naming
from pipelinerl_core.config.prompts import SumsPrompts
from pipelinerl_core.errors import ConfigError, EnvironmentFailed
from pipelinerl_core.interfaces import PromptSource
from pipelinerl_core.models.paths import end_tokens_of, read_model_config, resolve_model_path, within_context
from pipelinerl_core.models.resolve import build_config
from pipelinerl_core.prompts import encode_prompt
from pipelinerl_core.prompts.chat import prompt_as_text
from pipelinerl_core.prompts.source import build_all
from pipelinerl_core.prompts.table import TableSource
from pipelinerl_core.prompts.turns import ChatTurns

MAX_MEASURED = 2000
"""Training prompts whose tokens are counted; the first of the run."""
GENERATED_MEASURED = 100
"""The same for generated prompts, which take up to 10 ms each."""
_SHOWN = 400
"""Characters of a prompt that are shown."""


def check(config: RunConfig) -> list[str]:
    """Lines of text about the prompts. Raises ConfigError if the prompts cannot be used as configured.

    Lengths are included if the model is on this host; the sums of the built-in model always fit.
    """
    parts, sets = build_all(config)
    lines: list[str] = []
    for name, source in parts.items():
        with naming(name):
            own = _check_part(config.with_part(name) if name else config, source)
            lines += [f"mixture.{name}: {line}" if name else line for line in own]
    for name, source in sets.items():
        with naming(name, "eval.sets"):
            num = len(source.held_out(config.eval.num_prompts))
        lines.append(f"eval.sets.{name}: {num:,} prompts")
        if isinstance(source, TableSource):
            lines += [f"eval.sets.{name}: {line}" for line in source.held_out_notes()]
    return lines + _alike(parts, sets) + _shared(parts, sets)


def _alike(parts: Mapping[str, PromptSource], sets: Mapping[str, PromptSource]) -> list[str]:
    """Lines for training prompts that equal a held-out prompt of a set or another part but for case and spaces."""
    others = {f"a held-out prompt of mixture.{name}": source for name, source in parts.items()}
    others |= {f"a prompt of eval.sets.{name}": source for name, source in sets.items()}
    return [
        f"mixture.{name}: {line}" if name else line
        for name, source in parts.items()
        for told, other in others.items()
        if isinstance(source, TableSource) and isinstance(other, TableSource) and source is not other
        for line in source.alike(other, told)
    ]


def _shared(parts: Mapping[str, PromptSource], sets: Mapping[str, PromptSource]) -> list[str]:
    """A line for any two sets of held-out prompts that have the same problems."""
    own = {
        f"the held-out prompts of mixture.{name}" if name else "the held-out prompts": parts[name] for name in parts
    }
    tables = {
        name: source
        for name, source in {**own, **{f"eval.sets.{name}": sets[name] for name in sets}}.items()
        if isinstance(source, TableSource)
    }
    return [
        f"{first} and {second} share {len(texts):,} prompts; the first is {texts[0][:60]!r}"
        for first, second in combinations(tables, 2)
        if (texts := tables[first].shared(tables[second]))
    ]


def _check_part(config: RunConfig, source: PromptSource) -> list[str]:
    """`check` for the prompts of one part of a mixture, or of a run without a mixture."""
    source.prompt(0)
    source.held_out(min(1, config.eval.num_prompts))
    lines = source.summary() if isinstance(source, TableSource) else []
    directory = resolve_model_path(config.model.path)
    is_known_to_fit = isinstance(config.prompts, SumsPrompts) and not config.model.chat_template
    if directory is None or is_known_to_fit or config.environment.path:  # an environment writes its own messages
        return lines
    tokenizer = load_tokenizer(directory)
    lines += [lengths_line(config, source, directory, tokenizer), _first_line(config, source, tokenizer)]
    return lines + (_end_lines(directory, tokenizer) if config.model.chat_template else [])


def _first_line(config: RunConfig, source: PromptSource, tokenizer: Any) -> str:
    """The first prompt as the model sees it. Raises ConfigError if the chat template does not write its text.

    The second prompt must give another text: a template may write the beginning of a text only.
    """
    first, second = source.prompt(0), source.prompt(1)
    texts = [
        prompt_as_text(prompt, tokenizer, config.model.chat_template, config.prompts.system)
        for prompt in (first, second)
    ]
    asked = str(first.messages[-1]["content"]) if first.messages else first.text
    if asked.strip() not in texts[0] or (texts[0] == texts[1] and first.text.strip() != second.text.strip()):
        raise ConfigError(
            f"model.chat_template=true, but the chat template of model.path changes the text of the prompt "
            f"{first.text[:60]!r} to {texts[0][:120]!r}. Correct the template, or set model.chat_template=false"
        )
    answer = first.task.get("answer")
    reference = "" if answer is None else f"; reference answer {str(answer)[:60]!r}"
    return f"the first prompt, as the model sees it: {_shortened(texts[0])!r}{reference}"


def _end_lines(directory: Path, tokenizer: Any) -> list[str]:
    """A line if the model does not stop at the token with which the chat template ends its turns."""
    try:
        end = ChatTurns(tokenizer, chat_template=True).turn_end
        known = end_tokens_of(directory)
    except (EnvironmentFailed, TemplateError):  # a template without such a token, or for other conversations
        return []
    except ValueError:  # a file that is no JSON, which the check of the model's files names
        return []
    if tokenizer.convert_tokens_to_ids(end) in (known if isinstance(known, list) else [known]):
        return []
    return [
        f"the chat template ends a turn with {end!r}, at which the model does not stop (eos_token_id={known}): "
        "replies go on to rollouts.max_tokens. Add the token to eos_token_id in generation_config.json of model.path"
    ]


def _shortened(text: str) -> str:
    return text if len(text) <= _SHOWN else f"{text[: _SHOWN // 2]} ... {text[-_SHOWN // 2 :]}"


def lengths_line(config: RunConfig, source: PromptSource, directory: Path, tokenizer: Any) -> str:
    """Median, 95th percentile and largest number of tokens. Raises ConfigError if no prompt can be used."""
    count = min(source.num_training, MAX_MEASURED) if isinstance(source, TableSource) else GENERATED_MEASURED
    prompts = (source.prompt(index) for index in range(count))
    settings = config.model.chat_template, config.prompts.system, config.prompts.control_tokens
    encoded = [encode_prompt(prompt, tokenizer, *settings) for prompt in prompts]
    lengths = [len(ids) for ids in encoded]
    highest, vocabulary = max(int(ids.max()) for ids in encoded), read_model_config(directory).get("vocab_size")
    if isinstance(vocabulary, int) and highest >= vocabulary:
        raise ConfigError(
            f"model.path={directory}: its tokenizer writes token {highest}, but its config.json has a vocabulary of "
            f"{vocabulary} tokens. Tokenizer and model are of different models"
        )
    longest, completion = max(lengths), config.rollouts.max_tokens
    limit, name = config.rollouts.max_prompt_tokens, f"rollouts.max_prompt_tokens={config.rollouts.max_prompt_tokens}"
    remedy = f"rollouts.max_prompt_tokens={longest} admits all"
    context = within_context(directory, limit + completion)
    if context < limit + completion:
        limit, name = context - completion, f"the context of the model less rollouts.max_tokens={completion}"
        remedy = f"rollouts.max_tokens={context - longest} admits all" if longest < context else "Shorten the prompts"
    figures = f"median {np.median(lengths):.0f}, 95th percentile {np.percentile(lengths, 95):.0f}, longest {longest}"
    num_long = sum(length > limit for length in lengths)
    if num_long == count:
        raise ConfigError(f"all of the first {count:,} prompts are longer ({figures} tokens) than {name}. {remedy}")
    line = f"tokens of the first {count:,} prompts: {figures}"
    if num_long:
        line += f"; {num_long:,} are longer than {name}, fail and are not trained on. {remedy}"
    return line


def load_tokenizer(directory: Path) -> Any:
    """The tokenizer of a model, without importing torch where the model has a tokenizer.json."""
    import transformers  # noqa: PLC0415  (takes seconds)

    if not any(path for name in ("*token*", "vocab*", "*.model") for path in directory.glob(name)):
        raise ConfigError(
            f"model.path={directory}: has no tokenizer. Copy tokenizer.json, tokenizer_config.json and "
            "chat_template.jinja of the model into the directory"
        )
    is_fast = (directory / "tokenizer.json").is_file()
    kind = transformers.PreTrainedTokenizerFast if is_fast else transformers.AutoTokenizer
    try:
        return kind.from_pretrained(directory, local_files_only=True)
    except Exception as error:  # noqa: BLE001  (the library raises any error for a damaged file)
        reason = " ".join(str(error).split())[:200]
        raise ConfigError(f"model.path={directory}: the tokenizer cannot be loaded: {reason}") from None


if __name__ == "__main__":
    sys.exit(run_check(lambda given: check(build_config(given))))
