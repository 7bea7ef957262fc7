"""What the newest rollouts of a run show: problems of the task, the reward and the policy, each with its rollouts.

N = scored rollouts of the newest steps (facts.NEWEST_STEPS).
"""

import math
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property, lru_cache
from statistics import fmean
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pipelinerl_core.report.facts import NEWEST_STEPS, RunFacts, TrainedRollout
from pipelinerl_core.report.samples import find_tokenizer
from pipelinerl_core.rollouts.task_columns import task_columns
from pipelinerl_core.telemetry.log_lines import printable
from pipelinerl_core.types import Int32Array

# Fewer scored rollouts say nothing.
_LEAST_ROWS = 32
_NUM_NAMED = 5
_TEXT_ROWS = 256
_MAX_TOKENS = 4096
_CUT_OFF = 0.3
_CORRELATED = 0.7
_OPPOSED = -0.5
_LONGER = 1.3
_DOMINATES = 0.5
# Nats per token below which a policy samples nearly equal completions, and the share of the first steps' mean.
_NO_ENTROPY = 0.02
_ENTROPY_PART = 0.1
_ENTROPY_STEPS = 5
# Mean reward, from the lowest to the highest, from which equal completions are the aim.
_SOLVED = 0.9
# Fewer groups that show a problem may be chance.
_MIN_GROUPS = 8
_IDS = frozenset({"id", "uid", "uuid", "index", "seed"})
_MIN_QUESTION = 16
_MIN_COPY = 8
_COPIES = 1 / 3
# Copies whose reward, above the lowest, is less than this part of that of the others are unlearned.
_PAID_PART = 0.5
_MIN_EMPTY = 3
_MIN_OF_VALUE = 16
_MAX_VALUES = 12
_WELL_ABOVE = 0.2

Decoder = Callable[[Int32Array], str]


@dataclass(frozen=True, slots=True)
class Finding:
    """A problem of a run."""

    name: str
    text: str
    """What is wrong, with figures, and what to set or to look at."""
    rollouts: tuple[str, ...] = ()
    """Rollouts that show it, as `<group>.<rollout>`."""
    sql: str = ""
    """A query of `pipelinerl sql` for all such rollouts; empty if a query cannot tell them."""


@lru_cache(maxsize=4)
def text_decoder(model_path: str) -> Decoder | None:
    """A function from tokens to text without special tokens, by the tokenizer.json of `model.path`; None without it.

    Raises ConfigError for an unknown built-in model.
    """
    tokenizer = find_tokenizer(model_path)
    if tokenizer is None:
        return None
    return lambda ids: str(tokenizer.decode(ids[:_MAX_TOKENS].tolist(), skip_special_tokens=True))


def diagnose(facts: RunFacts, decode: Decoder | None = None) -> list[Finding]:
    """The findings of a run, in the order in which they should be mended.

    decode: None leaves out the checks of texts.
    """
    rows = [row for row in facts.newest_rows if row.outcome == "scored" and _is_finite(row.reward)]
    newest = _Newest(facts, rows, decode)
    checks = [*_OF_STEPS, *(_OF_ROWS if len(rows) >= _LEAST_ROWS else ())]
    if decode is not None and len(rows) >= _LEAST_ROWS:
        checks = [*_OF_TEXTS, *checks]
    findings = [finding for check in checks if (finding := check(newest)) is not None]
    # A name of a column or a component may have any character.
    return [replace(finding, text=printable(finding.text)) for finding in findings]


def _is_finite(reward: float | None) -> bool:
    return reward is not None and math.isfinite(reward)


def as_documents(findings: Iterable[Finding]) -> list[dict[str, Any]]:
    """The findings as JSON values."""
    return [asdict(finding) for finding in findings]


@dataclass(frozen=True, eq=False)
class _Newest:
    """The scored rollouts of the newest steps, and what the checks need of them."""

    facts: RunFacts
    rows: Sequence[TrainedRollout]
    decode: Decoder | None = None
    texts: dict[int, tuple[str, str]] = field(default_factory=dict)

    @cached_property
    def rewards(self) -> NDArray[np.float64]:
        """[N]"""
        return np.array([row.reward for row in self.rows], dtype=np.float64)

    @cached_property
    def lengths(self) -> NDArray[np.float64]:
        """[N] completion tokens."""
        return np.array([len(row.completion_token_ids) for row in self.rows], dtype=np.float64)

    @cached_property
    def tasks(self) -> list[Mapping[str, Any]]:
        """[N] columns of the task of each rollout."""
        known = {text: task_columns(text) for text in {row.task for row in self.rows}}
        return [known[row.task] for row in self.rows]

    @cached_property
    def sampled(self) -> list[int]:
        """Indices of the rollouts whose texts are looked at, evenly spaced."""
        return list(range(0, len(self.rows), -(-len(self.rows) // _TEXT_ROWS)))

    def text(self, index: int) -> tuple[str, str]:
        """The prompt and the completion of a rollout."""
        assert self.decode is not None
        if index not in self.texts:
            row = self.rows[index]
            self.texts[index] = self.decode(row.prompt_token_ids), self.decode(row.completion_token_ids).strip()
        return self.texts[index]

    def within_groups(self, values: NDArray[np.float64]) -> NDArray[np.float64]:
        """[N] difference of each value to the mean of its group."""
        groups = defaultdict(list)
        for index, row in enumerate(self.rows):
            groups[row.step, row.group_id].append(index)
        deviations = values.copy()
        for indices in groups.values():
            deviations[indices] -= values[indices].mean()
        return deviations

    @property
    def is_solved(self) -> bool:
        """Whether nearly all rewards are the best reward, so that equal rollouts are the aim."""
        low, high = float(self.rewards.min()), float(self.rewards.max())
        return float(self.rewards.mean()) >= (high - (1 - _SOLVED) * (high - low) if high > low else _SOLVED)

    def num_groups(self, is_chosen: NDArray[np.bool_]) -> int:
        """Number of groups of the chosen rollouts [N]."""
        return len({(self.rows[index].step, self.rows[index].group_id) for index in np.flatnonzero(is_chosen)})

    def names(self, indices: Iterable[int]) -> tuple[str, ...]:
        """The newest rollouts of some, one of each group, as names."""
        by_group: dict[int, str] = {}
        for index in indices:
            by_group.pop(self.rows[index].group_id, None)  # the place of the last counts
            by_group[self.rows[index].group_id] = self.rows[index].name
        return tuple(list(by_group.values())[::-1][:_NUM_NAMED])


def _correlation(first: NDArray[np.float64], second: NDArray[np.float64]) -> float:
    """Pearson's correlation of two samples with mean 0; 0 if one of them is constant."""
    scale = float(np.sqrt((first @ first) * (second @ second)))
    return float(first @ second) / scale if scale > 1e-12 else 0.0


def _question_dropped(newest: _Newest) -> Finding | None:
    prompts, tasks = defaultdict(list), set()
    # The first message of an environment may be the same for all tasks.
    sources = {row.source for row in newest.rows if row.turn_spans}
    has_environment = bool(newest.facts.run.config.get("environment", {}).get("path"))
    for index, row in enumerate(newest.rows):
        if row.source not in sources and not has_environment:
            prompts[row.prompt_token_ids.tobytes()].append(index)
            columns = newest.tasks[index].items()
            tasks.add(tuple((name, text) for name, text in columns if isinstance(text, str) and name not in _IDS))
    if len(tasks) < 4 or len(prompts) > len(tasks) / 2:
        return None
    largest = max(prompts.values(), key=len)
    return Finding(
        "question_dropped",
        f"The prompts of {len(tasks)} different tasks have only {len(prompts)} different texts, for example "
        f"{_quoted(newest.text(largest[0])[0])}: the template drops the question. Look at prompts.template and "
        "at the model's chat template.",
        newest.names(largest),
        "select prompt, count(distinct task) as tasks from rollouts group by prompt order by tasks desc",
    )


def _question_repeated(newest: _Newest) -> Finding | None:
    repeated: dict[str, list[int]] = defaultdict(list)
    for index in newest.sampled:
        prompt = newest.text(index)[0]
        for name, value in newest.tasks[index].items():
            if isinstance(value, str) and len(value) >= _MIN_QUESTION and prompt.count(value) > 1:
                repeated[name].append(index)
    name, indices = max(repeated.items(), key=lambda item: len(item[1]), default=("", []))
    if len(indices) < len(newest.sampled) / 2:
        return None
    return Finding(
        "question_repeated",
        f"{len(indices) / len(newest.sampled):.0%} of the prompts have the text of column {name} more than once. "
        "Look at prompts.template and at the model's chat template.",
        newest.names(indices),
    )


def _empty_paid(newest: _Newest) -> Finding | None:
    empty = [index for index in newest.sampled if not newest.text(index)[1]]
    paid = [index for index in empty if newest.rewards[index] > newest.rewards.min()]
    others = [newest.rewards[index] for index in newest.sampled if newest.text(index)[1]]
    if len(paid) < _MIN_EMPTY or (others and fmean(newest.rewards[index] for index in paid) < fmean(others)):
        return None
    return Finding(
        "empty_rewarded",
        f"The reward pays for empty completions: {len(paid)} of {len(empty)} have a mean reward of "
        f"{fmean(newest.rewards[index] for index in paid):.2f}"
        + (f", completions with text {fmean(others):.2f}" if others else "")
        + f"{_common(newest, paid)}. Look at the reward function.",
        newest.names(paid),
        "select group_id, rollout_index, reward, task from rollouts where trim(completion) = '' order by reward desc",
    )


def _copies(newest: _Newest) -> Finding | None:
    long = [index for index in newest.sampled if len(newest.text(index)[1]) >= _MIN_COPY]
    copies = [index for index in long if newest.text(index)[1] in newest.text(index)[0]]
    if len(copies) < max(_MIN_OF_VALUE, _COPIES * len(newest.sampled)):
        return None
    others = [newest.rewards[index] for index in newest.sampled if index not in set(copies)]
    lowest = float(newest.rewards.min())
    paid = fmean(newest.rewards[index] for index in copies)
    if others and paid - lowest < _PAID_PART * (fmean(others) - lowest):
        return None
    return Finding(
        "copies",
        f"{len(copies) / len(newest.sampled):.0%} of the newest completions occur word for word in their prompt "
        f"(mean reward {paid:.2f}"
        + (f", of the others {fmean(others):.2f}" if others else "")
        + "). If the task is not to copy, the reward pays for copies.",
        newest.names(copies),
        "select group_id, rollout_index, reward, prompt, completion from rollouts where contains(prompt, "
        "trim(completion)) order by step desc",
    )


def _cut_off(newest: _Newest) -> Finding | None:
    cut = np.array([row.finish_reason == "length" for row in newest.rows])
    if cut.mean() < _CUT_OFF:
        return None
    if newest.is_solved if cut.all() else newest.rewards[cut].mean() >= newest.rewards[~cut].mean():
        return None
    config = newest.facts.run.config
    limit = config.get("rollouts", {}).get("max_tokens", "?")
    advice = f"Set rollouts.max_tokens higher (now {limit}), or ask for shorter answers in the prompt."
    of_turn = config.get("environment", {}).get("turn_tokens", 0)
    if of_turn and isinstance(limit, int) and newest.lengths[cut].max() < limit:
        advice = f"They are shorter than rollouts.max_tokens: set environment.turn_tokens higher (now {of_turn})."
    rest = "" if cut.all() else f", of complete ones {newest.rewards[~cut].mean():.2f}"
    return Finding(
        "cut_off",
        f"{cut.mean():.0%} of the newest rollouts were cut off (mean reward {newest.rewards[cut].mean():.2f}{rest}). "
        f"{advice}",
        newest.names(np.flatnonzero(cut).tolist()),
        "select step, group_id, rollout_index, reward from rollouts where finish_reason = 'length' "
        "order by step desc",
    )


def _length_alone(newest: _Newest) -> Finding | None:
    rewards, lengths = newest.within_groups(newest.rewards), newest.within_groups(newest.lengths)
    correlation = _correlation(rewards, lengths)
    steps = newest.facts.steps
    first = steps[: min(NEWEST_STEPS, len(steps) // 2)]
    before = [float(step.lengths.mean()) for step in first if len(step.lengths)]
    few = newest.num_groups(rewards != 0) < _MIN_GROUPS
    if few or correlation < _CORRELATED or not before or newest.lengths.mean() < _LONGER * fmean(before):
        return None
    return Finding(
        "length_alone",
        f"Within a group the reward follows the length of the completion (correlation {correlation:.2f}), and the "
        f"mean length rose from {fmean(before):.0f} to {newest.lengths.mean():.0f} tokens. Look whether the longest "
        "completions are better, or only longer.",
        newest.names(np.argsort(newest.lengths).tolist()),
        "select group_id, rollout_index, reward, num_tokens, completion from rollouts order by num_tokens desc",
    )


def _components_disagree(newest: _Newest) -> Finding | None:
    names = sorted({name for row in newest.rows for name in row.components})
    known = {
        name: newest.within_groups(np.array([row.components.get(name, 0.0) for row in newest.rows])) for name in names
    }
    # A component that lowers the reward is a penalty: its weight is negative.
    rewards = newest.within_groups(newest.rewards)
    names = [name for name in names if _correlation(known[name], rewards) >= 0]
    pairs = [
        (_correlation(known[a], known[b]), a, b)
        for index, a in enumerate(names)
        for b in names[index + 1 :]
        if newest.num_groups((known[a] != 0) & (known[b] != 0)) >= _MIN_GROUPS
    ]
    lowest, first, second = min(pairs, default=(0.0, "", ""))
    if lowest > _OPPOSED:
        return None
    apart = np.argsort(known[first] * known[second])[:_MIN_OF_VALUE]
    return Finding(
        "components_disagree",
        f"Within a group, rollouts with more of the component {first} have less of {second} (correlation "
        f"{lowest:.2f}): the weights of the two decide what is learned.",
        newest.names(apart.tolist()[::-1]),
        "select step, group_id, rollout_index, reward, components from rollouts order by step desc",
    )


def _dominates(newest: _Newest) -> Finding | None:
    has_own_turns = newest.facts.run.config.get("loss", {}).get("advantage") in ("turn", "custom")
    if has_own_turns and any(len(row.turn_spans) > 1 for row in newest.rows):
        return None  # rows have the advantage of their first turn only
    amounts = np.array([abs(row.advantage) * row.loss_mask_trained.sum() for row in newest.rows])
    if newest.num_groups(amounts > 0) < _MIN_GROUPS:  # solved but for a few groups
        return None
    for kind, values in (
        ("task", [row.task for row in newest.rows]),
        ("source", [row.source for row in newest.rows]),
    ):
        by_value = _indices_by(values)
        sums = {value: float(amounts[indices].sum()) for value, indices in by_value.items()}
        value = max(sums, key=lambda name: sums[name])
        share, even = sums[value] / max(float(amounts.sum()), 1e-12), len(by_value[value]) / len(values)
        if len(by_value) > 1 and share > _DOMINATES and share > 2 * even:
            return Finding(
                f"{kind}_dominates",
                f"One {kind} of {len(by_value)}, {_quoted(str(value))}, has {share:.0%} of the newest steps' sum of "
                f"|advantage| over trained tokens, and {even:.0%} of the rollouts.",
                newest.names(by_value[value]),
                f"select {kind}, sum(abs(advantage) * num_trained_tokens) as amount from rollouts "
                f"group by {kind} order by amount desc",
            )
    return None


def _never_succeeds(newest: _Newest) -> Finding | None:
    lowest, span = newest.rewards.min(), newest.rewards.max() - newest.rewards.min()
    worst: tuple[list[int], str, Any, float] | None = None
    for name in sorted({name for task in newest.tasks for name in task}):
        values = [task.get(name) for task in newest.tasks]
        if not all(value is None or isinstance(value, str | int | float) for value in values):
            continue
        by_value = _indices_by(values)
        if not 1 < len(by_value) <= _MAX_VALUES:
            continue
        for value, indices in by_value.items():
            others = np.delete(newest.rewards, indices)
            is_some = len(indices) >= _MIN_OF_VALUE and len({newest.rows[index].task for index in indices}) > 1
            never = is_some and newest.rewards[indices].max() <= lowest
            well_above = span > 0 and others.mean() >= lowest + _WELL_ABOVE * span
            if never and well_above and (worst is None or len(indices) > len(worst[0])):
                worst = indices, name, value, float(others.mean())
    if worst is None:
        return None
    indices, name, value, mean = worst
    return Finding(
        "never_succeeds",
        f"All {len(indices)} newest rollouts of tasks with {name} = {_quoted(str(value))} have the lowest reward, "
        f"{lowest:.2f}; the others have {mean:.2f} in the mean. These tasks may be too hard, or their "
        "reference wrong.",
        newest.names(indices),
        f"select task->>{_json_path(name)} as value, count(*), avg(reward), max(reward) from rollouts group by value",
    )


def _indices_by(values: Sequence[Hashable]) -> dict[Any, list[int]]:
    indices: dict[Any, list[int]] = defaultdict(list)
    for index, value in enumerate(values):
        indices[value].append(index)
    return indices


def _common(newest: _Newest, indices: Sequence[int]) -> str:
    """The columns of the task that some rollouts have in common, and not all rollouts."""
    names = sorted({name for index in indices for name in newest.tasks[index]})
    shared = [
        name for name in names
        if len({str(newest.tasks[index].get(name)) for index in indices}) == 1
        and len({str(task.get(name)) for task in newest.tasks}) > 1
    ]  # fmt: skip
    texts = [f"{name} = {_quoted(str(newest.tasks[indices[0]].get(name)))}" for name in shared[:3]]
    return f"; all of them with {', '.join(texts)}" if texts else ""


def _no_entropy(newest: _Newest) -> Finding | None:
    values = [value for _, value in newest.facts.metric("policy/entropy")]
    if len(values) < 2 * _ENTROPY_STEPS:
        return None
    first, last = fmean(values[:_ENTROPY_STEPS]), fmean(values[-_ENTROPY_STEPS:])
    if last > min(_NO_ENTROPY, _ENTROPY_PART * first) or (len(newest.rows) and newest.is_solved):
        return None
    return Finding(
        "no_entropy",
        f"The policy's entropy fell from {first:.2g} to {last:.2g} nats per token, so the rollouts of a group are "
        "nearly equal and there is little left to learn from. Set learner.lr lower, rollouts.temperature higher, or "
        "loss.clip_high wider.",
        sql="select step, value from metrics where name = 'policy/entropy' order by step",
    )


def _held_out_leaves(newest: _Newest) -> Finding | None:
    known = [record for record in newest.facts.evals.values() if record.low is not None and record.high is not None]
    steps = newest.facts.steps
    if len(known) < 2 or not steps:
        return None
    best, last = max(known, key=lambda record: record.low or 0.0), known[-1]
    near = [float(step.rewards.mean()) for step in steps if abs(step.step - best.version) <= NEWEST_STEPS
            and len(step.rewards)]  # fmt: skip
    after = [float(step.rewards.mean()) for step in steps[-NEWEST_STEPS:] if len(step.rewards)]
    if best is last or (last.high or 0.0) >= (best.low or 0.0) or not near or not after or fmean(after) < fmean(near):
        return None
    return Finding(
        "held_out_leaves",
        f"The held-out curve leaves the training curve: from version {best.version} to {last.version} the held-out "
        f"accuracy fell from {best.accuracy:.3f} to {last.accuracy:.3f}, beyond its interval, while the training "
        f"reward went from {fmean(near):.2f} to {fmean(after):.2f}. Export version {best.version}, or take "
        "more prompts.",
        sql="select version, accuracy, low, high from evaluations order by version",
    )


def _quoted(text: str) -> str:
    return repr(text if len(text) <= 60 else f"{text[:60]}...")


def _json_path(name: str) -> str:
    """The path of a column of a task, as a text of SQL."""
    escaped = name.replace("\\", "\\\\").replace('"', '\\"').replace("'", "''")
    return f"'$.\"{escaped}\"'"


_Check = Callable[[_Newest], Finding | None]
_OF_TEXTS: tuple[_Check, ...] = (_question_dropped, _question_repeated, _empty_paid, _copies)
_OF_ROWS: tuple[_Check, ...] = (_cut_off, _never_succeeds, _components_disagree, _dominates, _length_alone)
_OF_STEPS: tuple[_Check, ...] = (_no_entropy, _held_out_leaves)
