"""Sample rollouts for report.html, with tokens coloured by the weight version that sampled them."""

import itertools
import json
import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from html import escape
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from pipelinerl_core.errors import BrokenRecord, ChecksumMismatch, MissingObject
from pipelinerl_core.interfaces import ObjectStore
from pipelinerl_core.models.paths import resolve_model_path
from pipelinerl_core.report.facts import RunFacts, TrainedRollout, read_batch
from pipelinerl_core.report.markup import table_row
from pipelinerl_core.rollouts.task_columns import task_columns
from pipelinerl_core.run.records import Commit, EvalRecord
from pipelinerl_core.types import TurnSpan

logger = logging.getLogger(__name__)

Decode = Callable[[Sequence[int]], str]
Samples = Sequence[Mapping[str, Any]]
"""Recorded completions of an evaluation (EvalRecord.samples)."""

# Rollouts shown of the first step, of the last step, and of the step with the most versions in a rollout.
_PER_GROUP = 3
_MAX_TOKENS = 400
_LEAST_SHOWN = 3
"""With fewer held-out prompts, that of the lowest reward is shown, too."""
_MAX_COLUMNS = 8
_MIN_HIDDEN = 20
_COLUMN_CHARS = 80
_NUM_TINTS = 6
_GIVEN = 'class="prompt" title="given by the environment"'
_RETURN = "&#8629;\n"
_INCOMPLETE = "\N{REPLACEMENT CHARACTER}"
_MAX_PER_CHARACTER = 4
"""A character has up to four bytes, of one token each."""


def token_decoder(model_path: str) -> Decode | None:
    """A function from token ids to text, by the tokenizer of `model.path`; None without it.

    Raises ConfigError for an unknown built-in model.
    """
    tokenizer = find_tokenizer(model_path)
    if tokenizer is None:
        return None
    return lambda token_ids: str(tokenizer.decode(list(token_ids), skip_special_tokens=False))


def find_tokenizer(model_path: str) -> Tokenizer | None:
    """The tokenizer.json of `model.path`; None if the file is missing or, with a warning in the log, broken.

    Raises ConfigError for an unknown built-in model.
    """
    directory = resolve_model_path(model_path)
    path = directory / "tokenizer.json" if directory is not None else None
    if path is None or not path.is_file():
        return None
    try:
        return Tokenizer.from_file(str(path))
    except Exception as error:  # noqa: BLE001 - tokenizers raises Exception
        logger.warning("%s is no tokenizer, so that token ids are shown: %s", path, error)
        return None


def rollout_section(store: ObjectStore, facts: RunFacts, decode: Decode | None) -> str:
    """Rollouts of the first and the last step, not chosen by reward; then the best and the worst of the last step, a
    rollout of a group that trains nothing, and the rollouts with most versions."""
    if not facts.steps:
        return '<p class="empty">No rollout was trained.</p>'
    first, last = facts.steps[0].step, facts.steps[-1].step
    mixed = max(facts.steps, key=lambda step: (int(step.versions.max(initial=0)), step.step)).step
    batches = {step: _batch(store, facts.commits[step]) for step in {first, last, mixed}}
    most_versions = sorted(batches[mixed], key=lambda row: -len(row.weight_spans))[:_PER_GROUP]
    parts = [
        _block(f"Before: the first groups of step {first}", one_per_group(batches[first], _PER_GROUP), decode),
        _block(f"After: the first groups of step {last}", one_per_group(batches[last], _PER_GROUP), decode)
        if last > first
        else "",
        "".join(_block(f"{title} of step {last}", [row], decode) for title, row in _extremes(batches[last]).items()),
        _block(f"Most weight versions in one rollout: step {mixed}", most_versions, decode),
    ]
    return "".join(parts)


def _batch(store: ObjectStore, commit: Commit) -> list[TrainedRollout]:
    """The rows of a step; empty if they are damaged, which `pipelinerl audit` reports, or removed."""
    try:
        return read_batch(store, commit)
    except (BrokenRecord, ChecksumMismatch, MissingObject):
        return []


def _extremes(rows: Sequence[TrainedRollout]) -> dict[str, TrainedRollout]:
    """The best rollout, the worst, and a rollout of a group whose rewards are all equal, where there are such."""
    scored = [row for row in rows if row.reward is not None]
    rewards: dict[int, set[float | None]] = {}
    for row in scored:
        rewards.setdefault(row.group_id, set()).add(row.reward)
    equal = [row for row in scored if len(rewards[row.group_id]) == 1]
    shown = {"A group with equal rewards, which trains nothing": equal[0]} if equal else {}
    if len({row.reward for row in scored}) > 1:
        best, worst = (function(scored, key=lambda row: row.reward or 0.0) for function in (max, min))
        shown = {"The best rollout": best, "The worst rollout": worst} | shown
    return shown


def evaluation_table(facts: RunFacts) -> str:
    """One row per evaluation: set, version, accuracy with its interval, components of the reward, cost and lag.

    Columns without a value are left out. Empty without evaluations.
    """
    records = [record for each in (facts.evals, *facts.set_evals.values()) for record in each.values()]
    names = sorted({name for record in records for name in record.components})
    columns: dict[str, Callable[[EvalRecord], str]] = {
        "prompts": lambda record: (
            f"{escape(record.set or 'held-out')}: {record.num_prompts:,}"
            + (f" x {record.num_samples}" if record.num_samples > 1 else "")
        ),
        "temperature": lambda record: (
            f"{record.temperature:g}" + (f", top_p {record.top_p:g}" if record.top_p < 1 else "")
        ),
        "version": lambda record: (
            f"{record.version}" + (f" to {record.last_version}" if record.last_version > record.version else "")
        ),
        "accuracy": lambda record: _score(record.known_accuracy),
        "95 % interval": lambda record: " to ".join(filter(None, (_score(record.low), _score(record.high)))),
        "best": lambda record: _score(record.best),
        "greedy": lambda record: _score(record.greedy),
        **{name: partial(_component, name) for name in names},
        "tokens": lambda record: f"{record.mean_tokens:,.1f}",
        "seconds": lambda record: f"{record.seconds:,.1f}",
        "failed": lambda record: f"{record.errors:,}" if record.errors else "",
        "lag": lambda record: f"{record.lag}",
    }
    cells = {head: [text(record) for record in records] for head, text in columns.items()}
    shown = {escape(head): column for head, column in cells.items() if any(column)}
    table = table_row(shown, "th") + "".join(map(table_row, zip(*shown.values(), strict=True)))
    return f'<table class="ledger"><tbody>{table}</tbody></table>' if records else ""


def _component(name: str, record: EvalRecord) -> str:
    return f"{record.components[name]:.3f}" if name in record.components else ""


def _score(value: float | None) -> str:
    return "" if value is None else f"{value:.3f}"


def held_out_section(facts: RunFacts) -> str:
    """Held-out samples of the first and last evaluation side by side."""
    records = [record for record in facts.evals.values() if record.samples]
    if not records:
        return '<p class="empty">No held-out samples were recorded.</p>'
    columns = [records[0], records[-1]] if len(records) > 1 else records
    shown = _telling(*(record.samples for record in columns))
    cells = "".join(
        f"<div><h4>Version {record.version}: {_score(record.known_accuracy)} of {record.num_prompts:,} held-out "
        "prompts</h4>"
        + "".join(
            _answer(record.samples[index], note) for index, note in shown.items() if index < len(record.samples)
        )
        + "</div>"
        for record in columns
    )
    return f"<p>{_choice(shown, *(record.samples for record in columns))}</p>" + f'<div class="pair">{cells}</div>'


def _gains(before: Samples, after: Samples = ()) -> dict[int, float]:
    """Index -> change of the reward, of each prompt that both evaluations show; a missing reward counts 0."""
    return {
        index: float(later.get("reward") or 0.0) - float(earlier.get("reward") or 0.0)
        for index, (earlier, later) in enumerate(zip(before, after, strict=False))
        if earlier.get("prompt") == later.get("prompt")
    }


def _telling(before: Samples, after: Samples = ()) -> dict[int, str]:
    """Index of each shown prompt -> why it is shown: two whose reward rose, one whose reward fell, and of those whose
    reward did not change the worst and the best. Without a second evaluation: the best, the worst, and a prompt
    between."""
    gains = _gains(before, after)
    if not gains:
        rewards = [float(sample.get("reward") or 0.0) for sample in before]
        order = sorted(range(len(before)), key=lambda index: -rewards[index])
        places = [order[0], order[-1], order[len(order) // 2]]
        notes = ["the best", "the worst", ""] if rewards[order[0]] > rewards[order[-1]] else ["", "", ""]
        return dict(zip(reversed(places), reversed(notes), strict=True))
    order = sorted(gains, key=lambda index: -gains[index])
    same = sorted(
        (index for index in order if gains[index] == 0), key=lambda index: float(after[index].get("reward") or 0.0)
    )
    shown = dict.fromkeys([index for index in order if gains[index] > 0][:2], "rose")
    shown |= dict.fromkeys([index for index in reversed(order) if gains[index] < 0][:1], "fell")
    shown |= dict.fromkeys([*same[:1], *same[-1:]], "unchanged")
    lowest = min(order, key=lambda index: float(after[index].get("reward") or 0.0))
    return shown if len(shown) >= _LEAST_SHOWN else shown | {lowest: shown.get(lowest, "the lowest reward")}


def _choice(shown: Collection[int], before: Samples, after: Samples = ()) -> str:
    """One sentence: how the shown prompts were chosen, and the changes of all recorded ones."""
    gains = _gains(before, after)
    if not gains:
        return f"{len(shown)} of {len(before)} recorded prompts."
    better, worse = (sum(sign * gain > 0 for gain in gains.values()) for sign in (1, -1))
    changes = f"of {len(gains)} recorded prompts the reward of {better} rose and of {worse} fell"
    return f"Chosen by the change of the reward: {changes}."


def _answer(sample: Mapping[str, Any], note: str) -> str:
    reward, reference = sample.get("reward"), sample.get("reference")
    prompt = str(sample.get("prompt", ""))
    shown = f" reference: {visible(str(reference))}" if reference else ""
    badge = _badge(reward if isinstance(reward, int | float) else None)
    columns = {name: value for name, value in (sample.get("task") or {}).items() if value != reference}
    turns = [
        (_turn_title(number, turn.get("reward")), _given(turn.get("given", "")) + visible(turn.get("text", "")))
        for number, turn in enumerate(sample.get("turns") or ())
    ]
    return _parts(
        f"{badge}{shown}{f' ({note})' if note else ''}",
        columns,
        prompt,
        [("prompt", f'<span class="prompt">{visible(prompt)}</span>'),
         *(turns or [("completion", visible(str(sample.get("completion", ""))))])],
    )  # fmt: skip


def _parts(meta: str, columns: Mapping[str, Any], prompt: str, parts: Sequence[tuple[str, str]]) -> str:
    """A rollout: a line about it, its task, and titled parts of its text, all but the columns already HTML."""
    shown = "; ".join(f"{escape(name)} {visible(text)}" for name, text in _columns(columns, prompt).items())
    texts = "".join(f'<p class="part">{title}</p><pre>{text}</pre>' for title, text in parts)
    task = f'<p class="meta">task: {shown}</p>' if shown else ""
    return f'<div class="rollout"><p class="meta">{meta}</p>{task}{texts}</div>'


def _columns(columns: Mapping[str, Any], prompt: str) -> dict[str, str]:
    """The columns of a task as short texts, without long texts that the prompt shows."""
    texts = {
        name: value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
        for name, value in columns.items()
    }
    shown = {name: text for name, text in texts.items() if text and (len(text) < _MIN_HIDDEN or text not in prompt)}
    return {
        name: text if len(text) <= _COLUMN_CHARS else f"{text[:_COLUMN_CHARS]} ..."
        for name, text in list(shown.items())[:_MAX_COLUMNS]
    }


def _turn_title(number: int, reward: float | None, *, is_branch: bool = False) -> str:
    branch = ", the first of a branch" if is_branch else ""
    return f"turn {number}{branch}" + ("" if reward is None else f", reward {reward:.4g}")


def _given(text: str) -> str:
    return f"<span {_GIVEN}>{visible(text)}</span>" if text else ""


def one_per_group(rows: Sequence[TrainedRollout], limit: int) -> list[TrainedRollout]:
    """The first rollout of each of the first `limit` groups."""
    firsts: dict[int, TrainedRollout] = {}
    for row in rows:
        firsts.setdefault(row.group_id, row)
    return list(firsts.values())[:limit]


def _block(title: str, rows: Sequence[TrainedRollout], decode: Decode | None) -> str:
    return f"<h4>{escape(title)}</h4>" + "".join(rollout_block(row, decode) for row in rows)


def rollout_block(row: TrainedRollout, decode: Decode | None) -> str:
    """A rollout with its turns, its tokens coloured by version."""
    num = len(row.completion_token_ids)
    versions = ", ".join(
        f'<span class="v{span.version % _NUM_TINTS}">version {span.version}</span> {span.end - span.start}'
        for span in row.weight_spans
    )
    meta = (
        f"{_badge(row.reward)} group {row.group_id}, rollout {row.rollout_index}, {escape(row.actor)}; "
        f"{num} tokens: {versions}"
    )
    prompt = visible(plain_text(row.prompt_token_ids, decode))
    parts = [("prompt", f'<span class="prompt">{prompt}</span>')]
    texts = token_texts(row.completion_token_ids[:_MAX_TOKENS], decode)
    begin = 0
    for number, turn in enumerate(row.turn_spans or [TurnSpan(0, num)]):
        is_branch = any(begin <= start < turn.end for start in row.branch_starts)
        reward = row.turn_rewards[number] if row.turn_rewards else None
        title = _turn_title(number, reward, is_branch=is_branch) if row.turn_spans else "completion"
        if begin < _MAX_TOKENS:
            parts.append((title, _tokens(row, begin, min(turn.end, _MAX_TOKENS), texts)))
        begin = turn.end
    if begin < min(num, _MAX_TOKENS):
        parts.append(("given after the last turn", _tokens(row, begin, min(num, _MAX_TOKENS), texts)))
    if num > _MAX_TOKENS:
        parts.append((f"{num - _MAX_TOKENS} more tokens", ""))
    return _parts(meta, task_columns(row.task), plain_text(row.prompt_token_ids, decode), parts)


def _tokens(row: TrainedRollout, first: int, last: int, texts: Sequence[str]) -> str:
    """The completion tokens [first, last), each run of the same version and use in its colour."""
    use_C = row.loss_mask.astype(np.int8) + row.loss_mask_trained
    pieces = []
    for version, start, end in row.weight_spans:
        for begin, stop in _runs(use_C, max(start, first), min(end, last)):
            text = visible("".join(texts[begin:stop]))
            stale = "" if row.loss_mask_trained[begin] else " stale"
            look = f'class="v{version % _NUM_TINTS}{stale}" title="version {version}"'
            pieces.append(f"<span {look if row.loss_mask[begin] else _GIVEN}>{text}</span>")
    return "".join(pieces)


def _runs(use_C: np.ndarray, start: int, end: int) -> list[tuple[int, int]]:
    """Subranges of [start, end) in which the use of the tokens is constant."""
    if end <= start:
        return []
    cuts = np.flatnonzero(np.diff(use_C[start:end])) + start + 1
    edges = [start, *cuts.tolist(), end]
    return list(itertools.pairwise(edges))


def plain_text(token_ids: np.ndarray, decode: Decode | None) -> str:
    """The text of tokens; token ids if `decode` is None."""
    if decode is None:
        return "".join(f"{token_id} " for token_id in token_ids.tolist())
    return decode(token_ids.tolist())


def token_texts(token_ids: np.ndarray, decode: Decode | None) -> list[str]:
    """The text that each token adds to the text of the tokens before it; token ids if `decode` is None.

    Several tokens may make one character: the last of them has its text, the others have none.
    """
    ids = token_ids.tolist()
    if decode is None:
        return [f"{token_id} " for token_id in ids]
    texts: list[str] = []
    first = begin = 0  # the text of a token may depend on the token before it
    for end in range(1, len(ids) + 1):
        text = decode(ids[first:end])[len(decode(ids[first:begin])) :]
        is_open = text.endswith(_INCOMPLETE) and end - begin < _MAX_PER_CHARACTER and end < len(ids)
        texts.append("" if is_open else text)
        if not is_open:
            first, begin = begin, end
    return texts


def visible(text: str) -> str:
    """HTML-escaped text with visible line ends, and control characters as JSON escapes."""
    shown = "".join(letter if letter.isprintable() or letter == "\n" else json.dumps(letter)[1:-1] for letter in text)
    return escape(shown).replace("\n", _RETURN)


def _badge(reward: float | None) -> str:
    if reward is None:
        return '<b class="reward none">no reward</b>'
    return f'<b class="reward {"good" if reward > 0.5 else "bad"}">reward {reward:.4g}</b>'
