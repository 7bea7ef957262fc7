"""README.md of an exported model: base, data, reward, curve, and how to train it again."""

import itertools
import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import tomli_w

from pipelinerl_core import __version__
from pipelinerl_core.config import RunConfig
from pipelinerl_core.config.prompts import RowPrompts
from pipelinerl_core.config.verifier import verifier_name
from pipelinerl_core.models.hub import is_hub_model
from pipelinerl_core.run.context import RunContext
from pipelinerl_core.run.follow import RunFollower
from pipelinerl_core.run.records import EXPORT_ORIGIN
from pipelinerl_core.run.user_code import stored_files

CARD, SETTINGS, CODE = "README.md", "pipelinerl.toml", "code"
_ROWS = 10
"""Rows of the table of training rewards at most."""


def write_card(run: RunContext, version: int, base: Path, directory: Path) -> None:
    """Write CARD, SETTINGS and copies of the user's files into the directory of an exported version.

    base: directory of the starting model, whose card names its licence.
    """
    copies: dict[str, str] = {}
    for location, code in stored_files(run).items():
        path, _, name = location.rpartition(":")
        (directory / CODE).mkdir(exist_ok=True)
        copy = _free(directory / CODE, Path(path).name)
        copy.write_text(code, encoding="utf-8")
        copies[location] = f"{copy.relative_to(directory)}:{name}"
    settings = tomli_w.dumps(_replaced(run.config.without_labels().model_dump(mode="json"), copies))
    (directory / SETTINGS).write_text(settings, encoding="utf-8")
    (directory / CARD).write_text("\n".join(_lines(run, version, base)) + "\n", encoding="utf-8")


def _free(directory: Path, name: str) -> Path:
    """A file of this name, or with a number before the name, that does not exist."""
    numbered = (directory / f"{number}_{name}" for number in itertools.count(2))
    return next(path for path in (directory / name, *itertools.islice(numbered, 1000)) if not path.exists())


def _replaced(values: Any, texts: Mapping[str, str]) -> Any:
    """JSON values in which the texts of a mapping are replaced."""
    if isinstance(values, dict):
        return {key: _replaced(value, texts) for key, value in values.items()}
    if isinstance(values, list):
        return [_replaced(value, texts) for value in values]
    return texts.get(values, values) if isinstance(values, str) else values


def _lines(run: RunContext, version: int, base: Path) -> Iterator[str]:
    config = run.config
    path, _, revision = config.model.path.partition("@")
    yield from ("---", "library_name: transformers", "tags: [reinforcement-learning, pipelinerl]")
    if is_hub_model(config.model.path):
        yield f"base_model: {path}"
    yield from (*_licence(base), "---", "")
    is_name = is_hub_model(config.model.path) or path.startswith("builtin:")
    name = path if is_name else Path(path).name
    if run.record.parent:
        name = f"{_first_base(base)}`, continued from `{run.record.parent}"
    title = run.record.parent or name.rpartition("/")[2]
    yield f"# {title}, {version} steps of reinforcement learning"
    yield ""
    yield f"* **Base**: `{name}`{f', revision `{revision}`' if revision else ''}. Its licence and its limits hold."
    for part, own in config.parts.items():
        yield f"* **Rows{f' of {part}' if part else ''}**: {_prompts(own)}; **reward**: `{verifier_name(own)}`"
    figures = f"{config.trainer.groups_per_step} groups of {config.rollouts.group_size} completions per step"
    yield f"* **Training**: loss {config.loss.kind}, learning rate {config.learner.lr:g}, {figures}, {config.dtype}."
    results = list(_results(run, version))
    yield from ("", *(["## Results", "", *results] if results else []), "## Train it again", "")
    yield f"    pipelinerl train {SETTINGS}      # pipelinerl {run.record.code_version or __version__}"
    yield ""
    yield f"This is version {version} of run `{run.run_id}`."
    yield f"Run the command in this directory, with rows and base where `{SETTINGS}` names them."


def _results(run: RunContext, version: int) -> Iterator[str]:
    follower = RunFollower(run.store)
    follower.refresh()
    evals = [
        record
        for record in follower.evals.values()
        if record.version <= version and record.known_accuracy is not None
    ]
    if evals:
        yield from ("| version | mean reward of held-out prompts | 95 % interval | prompts |", "|---|---|---|---|")
        for record in evals:
            interval = "" if record.low is None else f"{record.low:.3f} to {record.high:.3f}"
            yield f"| {record.version} | {record.accuracy:.3f} | {interval} | {record.num_prompts:,} |"
        yield ""
    rewards = {
        step: commit.metrics["reward/mean"]
        for step, commit in follower.commits.items()
        if step <= version and "reward/mean" in commit.metrics
    }
    if rewards:
        every = -(-len(rewards) // _ROWS)
        yield from ("| step | mean training reward |", "|---|---|")
        yield from (f"| {step} | {reward:.3f} |" for step, reward in list(rewards.items())[:: every or 1])
        yield ""


def _prompts(config: RunConfig) -> str:
    prompts = config.prompts
    return f"`{Path(prompts.path).name}` ({prompts.kind})" if isinstance(prompts, RowPrompts) else f"`{prompts.kind}`"


def _first_base(base: Path) -> str:
    """The starting model of the run that wrote the directory, or of the run before it, and so on."""
    seen: set[Path] = set()
    while (base / EXPORT_ORIGIN).is_file() and base not in seen:
        seen.add(base)
        origin = json.loads((base / EXPORT_ORIGIN).read_text(encoding="utf-8"))
        base = Path(origin.get("starting_model", base))
    return str(base) if not base.is_absolute() else base.name


def _licence(base: Path) -> list[str]:
    """The lines of licence and base in the card of the base."""
    try:
        text = (base / CARD).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return []
    matter = re.match(r"---\n(.*?)\n---", text, re.DOTALL)
    return re.findall(r"^(?:license(?:_name|_link)?|base_model): .*$", matter[1], re.MULTILINE) if matter else []
