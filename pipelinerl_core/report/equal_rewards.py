"""Detects a run whose rewards are all equal, which trains nothing, and shows a completion beside its reference."""

import inspect
import json
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any

from pipelinerl_core.config.verifier import verifier_name
from pipelinerl_core.errors import ConfigError, PipelineRLError
from pipelinerl_core.interfaces import ObjectStore
from pipelinerl_core.models.resolve import build_config
from pipelinerl_core.report.facts import TrainedRollout, read_batch
from pipelinerl_core.report.samples import Decode, plain_text
from pipelinerl_core.rewards import verifiers
from pipelinerl_core.rollouts.task_columns import answer_text, task_columns
from pipelinerl_core.run.records import Commit

WARN_STEPS = 3
"""Steps of a running run after which equal rewards are reported; fewer can be chance."""
NEXT_STEP = (
    "Training needs different rewards in a group: compare a completion with its reference below, then take easier or "
    "harder prompts, a larger rollouts.group_size, or a reward with more than two values."
)
TINY_STEP = "A random model (--tiny) is rarely right: the run shows that all parts fit together, not more."
_EQUAL = 1e-9
_COMPARED = {"exact_match": verifiers.exact_match, "last_number": verifiers.last_number, "sums": verifiers.sums}
_MAX_CHARS = 300


def equal_reward(commits: Iterable[Commit], min_steps: int = 1) -> float | None:
    """The reward of all trained rollouts if these rewards are equal, else None; also None for fewer steps."""
    first, num_steps = None, 0
    lowest = highest = 0.0
    for commit in commits:  # ends at the first difference: a long run has many commits to read
        if commit.step == 0:
            continue
        mean, std = commit.metrics.get("reward/mean"), commit.metrics.get("reward/std")
        if mean is None or std is None or std > _EQUAL:
            return None
        if first is None:
            first = lowest = highest = mean
        lowest, highest, num_steps = min(lowest, mean), max(highest, mean), num_steps + 1
        if highest - lowest > _EQUAL:
            return None
    return first if num_steps >= min_steps else None


def run_equal_reward(commits: Iterable[Commit], config: Mapping[str, Any], *, is_over: bool) -> float | None:
    """`equal_reward`, if this means that nothing is learned (`RunConfig.trains_equal_rewards`).

    config: the stored configuration. is_over: False: the rewards of at least WARN_STEPS steps must be equal.
    """
    reward = equal_reward(commits, 1 if is_over else WARN_STEPS)
    with suppress(PipelineRLError):  # of another release
        if reward is not None and build_config(config).trains_equal_rewards:
            return None
    return reward


def headline(reward: float, steps: int, *, is_over: bool) -> str:
    """The sentence that comes first in the live view, the summary and the report."""
    if is_over:
        return f"all rewards were equal ({reward:.3f}): nothing was learned"
    return f"all rewards of {steps} steps are equal ({reward:.3f}): nothing is learned"


def comparison_text(config: Mapping[str, Any]) -> str:
    """What the verifier of a stored configuration compares; empty if the configuration is unreadable."""
    try:
        run_config = build_config(config)
        if run_config.mixture:
            return f"The parts of the mixture are {', '.join(run_config.mixture)}."
        name = verifier_name(run_config)
    except PipelineRLError:
        return ""
    if run_config.environment.path:
        return f"environment.path={run_config.environment.path} scores the episodes."
    if run_config.reward.function:
        return f"reward.function={run_config.reward.function} scores the completions."
    document = inspect.getdoc(getattr(verifiers, name, None)) or ""
    meaning = " ".join(document.partition(">>>")[0].split())
    return f"reward.kind={name}" + (f": {meaning}" if meaning else " scores the completions.")


def example_of(
    store: ObjectStore, commit: Commit | None, config: Mapping[str, Any], decode: Decode | None
) -> dict[str, str] | None:
    """{"prompt", "completion", "reference"} of the first scored rollout of a step; None without a readable batch.

    reference: the answer of the prompt's row, or the whole task if it has no answer. With "other rewards" if another
    verifier would score some completions of the step above 0.
    """
    try:
        rows = read_batch(store, commit) if commit else []
    except PipelineRLError:  # deleted by gc, or damaged
        return None
    row = next((row for row in rows if row.reward is not None), None)
    if row is None:
        return None
    task, others = task_columns(row.task), ""
    with suppress(ConfigError):  # of another release
        others = _other_rewards(rows, decode, verifier_name(build_config(config)))
    texts = {
        "prompt": plain_text(row.prompt_token_ids, decode),
        "completion": plain_text(row.completion_token_ids, decode),
        "reference": answer_text(task) if "answer" in task else row.task * (task != {}),
    }
    if others:
        texts["other rewards"] = others
    return {name: text if len(text) <= _MAX_CHARS else f"{text[:_MAX_CHARS]} ..." for name, text in texts.items()}


def _other_rewards(rows: Sequence[TrainedRollout], decode: Decode | None, verifier: str) -> str:
    """The other built-in verifiers that score some completions of a step above 0, if `verifier` is built in."""
    sentences = []
    others = [name for name in _COMPARED if name != verifier] if verifier in _COMPARED and decode is not None else []
    for name in others:
        score, num = _COMPARED[name], 0
        for row in rows:
            task = task_columns(row.task)
            ids = row.completion_token_ids
            with suppress(ValueError, KeyError):  # a reference of another form
                # Without its last token too, which may be the end of the text.
                num += any(score(plain_text(part, decode), task) > 0 for part in (ids, ids[:-1]))
        if num:
            sentences.append(f"reward.kind={name} scores {num} of the {len(rows)} completions of this step above 0")
    return "; ".join(sentences)


def example_text(example: Mapping[str, str] | None) -> str:
    """An example as one line; empty without an example."""
    return ", ".join(f"{name} {json.dumps(text, ensure_ascii=False)}" for name, text in (example or {}).items())
