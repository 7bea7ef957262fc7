"""Sample rollouts for report.html, with tokens coloured by the weight version that sampled them."""

import itertools
import json
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from html import escape
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from pipelinerl_core.errors import BrokenRecord
from pipelinerl_core.interfaces import ObjectStore
from pipelinerl_core.report.facts import RunFacts, TrainedRollout, read_batch
from pipelinerl_core.run.records import Commit, EvalRecord

Decode = Callable[[int], str]
Samples = Sequence[Mapping[str, Any]]
"""Recorded completions of an evaluation (EvalRecord.samples)."""

# Rollouts shown of the first step, of the last step, and of the step with the most versions in a rollout.
_PER_GROUP = 3
_MAX_TOKENS = 400
_SHOWN_PROMPTS = 4
"""Held-out prompts shown of the first and the last evaluation."""
_NUM_TINTS = 6
_GIVEN = 'class="prompt" title="given by the environment"'
_RETURN = "&#8629;\n"


def token_decoder(model_path: str) -> Decode | None:
    """A function from token id to text, by the tokenizer.json of a model directory; None without this file."""
    path = Path(model_path) / "tokenizer.json"
    if not path.is_file():
        return None
    tokenizer = Tokenizer.from_file(str(path))
    return lambda token_id: str(tokenizer.decode([token_id], skip_special_tokens=False))


def rollout_section(store: ObjectStore, facts: RunFacts, decode: Decode | None) -> str:
    """Rollouts of the first and the last step, and the rollouts with most versions; not chosen by reward."""
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
        _block(f"Most weight versions in one rollout: step {mixed}", most_versions, decode),
    ]
    return "".join(parts)


def _batch(store: ObjectStore, commit: Commit) -> list[TrainedRollout]:
    """The rows of a step; empty if the batch is damaged, which `pipelinerl audit` reports."""
    try:
        return read_batch(store, commit)
    except BrokenRecord:
        return []


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
        "accuracy": lambda record: _percent(record.known_accuracy),
        "95 % interval": lambda record: " to ".join(filter(None, (_percent(record.low), _percent(record.high)))),
        "best": lambda record: _percent(record.best),
        "greedy": lambda record: _percent(record.greedy),
        **{name: partial(_component, name) for name in names},
        "tokens": lambda record: f"{record.mean_tokens:,.1f}",
        "seconds": lambda record: f"{record.seconds:,.1f}",
        "failed": lambda record: f"{record.errors:,}" if record.errors else "",
        "lag": lambda record: f"{record.lag}",
    }
    cells = {head: [text(record) for record in records] for head, text in columns.items()}
    shown = {escape(head): column for head, column in cells.items() if any(column)}
    rows = ["".join(f"<th>{head}</th>" for head in shown)]
    rows += ["".join(f"<td>{cell}</td>" for cell in row) for row in zip(*shown.values(), strict=True)]
    table = "".join(f"<tr>{row}</tr>" for row in rows)
    return f'<table class="ledger"><tbody>{table}</tbody></table>' if records else ""


def _component(name: str, record: EvalRecord) -> str:
    return f"{record.components[name]:.3f}" if name in record.components else ""


def _percent(value: float | None) -> str:
    return "" if value is None else f"{value:.1%}"


def held_out_section(facts: RunFacts) -> str:
    """Held-out samples of the first and last evaluation side by side."""
    records = [record for record in facts.evals.values() if record.samples]
    if not records:
        return '<p class="empty">No held-out samples were recorded.</p>'
    columns = [records[0], records[-1]] if len(records) > 1 else records
    shown = _telling(*(record.samples for record in columns))
    cells = "".join(
        f"<div><h4>Version {record.version}: {record.accuracy:.1%} of {record.num_prompts:,} held-out prompts</h4>"
        + "".join(_answer(record.samples[index]) for index in shown if index < len(record.samples))
        + "</div>"
        for record in columns
    )
    return f"<p>{_choice(shown, *(record.samples for record in columns))}</p>" + f'<div class="pair">{cells}</div>'


def _gains(before: Samples, after: Samples = ()) -> list[float]:
    """Change of the reward of each prompt that both evaluations show; a missing reward counts 0."""
    is_same = [earlier.get("prompt") == later.get("prompt") for earlier, later in zip(before, after, strict=False)]
    rewards = [[float(sample.get("reward") or 0.0) for sample in each] for each in (before, after)]
    return [later - earlier for earlier, later, same in zip(*rewards, is_same, strict=False) if same]


def _telling(before: Samples, after: Samples = ()) -> list[int]:
    """Indices of the shown prompts: those whose reward rose, then a prompt whose reward fell, then others.

    At least one of four places is for a prompt that did not improve.
    """
    gains = _gains(before, after)
    order = sorted(range(len(gains)), key=lambda index: -gains[index])
    better = [index for index in order if gains[index] > 0][: _SHOWN_PROMPTS - 1]
    worse = [index for index in reversed(order) if gains[index] < 0][:1]
    rest = [index for index in range(len(before)) if index not in (*better, *worse)]
    return [*better, *worse, *rest][:_SHOWN_PROMPTS]


def _choice(shown: Sequence[int], before: Samples, after: Samples = ()) -> str:
    """One sentence: how the shown prompts were chosen, and the changes of all recorded ones."""
    gains = _gains(before, after)
    if not any(gains):
        return f"The first {len(shown)} of {len(before)} recorded prompts."
    better, worse = sum(gain > 0 for gain in gains), sum(gain < 0 for gain in gains)
    changes = f"of {len(gains)} recorded prompts the reward of {better} rose and of {worse} fell"
    return f"Chosen by the change of the reward: {changes}."


def _answer(sample: Mapping[str, Any]) -> str:
    reward, reference = sample.get("reward"), sample.get("reference")
    shown = f" reference: {_visible(str(reference))}" if reference else ""
    badge = _badge(reward if isinstance(reward, int | float) else None)
    return (
        f'<div class="rollout"><p class="meta">{badge}{shown}</p>'
        f'<pre><span class="prompt">{_visible(str(sample.get("prompt", "")))}</span>'
        f"{_visible(str(sample.get('completion', '')))}</pre></div>"
    )


def one_per_group(rows: Sequence[TrainedRollout], limit: int) -> list[TrainedRollout]:
    """The first rollout of each of the first `limit` groups."""
    firsts: dict[int, TrainedRollout] = {}
    for row in rows:
        firsts.setdefault(row.group_id, row)
    return list(firsts.values())[:limit]


def _block(title: str, rows: Sequence[TrainedRollout], decode: Decode | None) -> str:
    return f"<h4>{escape(title)}</h4>" + "".join(_rollout(row, decode) for row in rows)


def _rollout(row: TrainedRollout, decode: Decode | None) -> str:
    num = len(row.completion_token_ids)
    versions = ", ".join(
        f'<span class="v{span.version % _NUM_TINTS}">version {span.version}</span> {span.end - span.start}'
        for span in row.weight_spans
    )
    meta = (
        f"{_badge(row.reward)} group {row.group_id}, rollout {row.rollout_index}, {escape(row.actor)}; "
        f"{num} tokens: {versions}"
    )
    pieces = [f'<span class="prompt">{_text(row.prompt_token_ids, decode)}</span>']
    use_C = row.loss_mask.astype(np.int8) + row.loss_mask_trained
    for version, start, end in row.weight_spans:
        for begin, stop in _runs(use_C, start, min(end, _MAX_TOKENS)):
            text = _text(row.completion_token_ids[begin:stop], decode)
            stale = "" if row.loss_mask_trained[begin] else " stale"
            look = f'class="v{version % _NUM_TINTS}{stale}" title="version {version}"'
            pieces.append(f"<span {look if row.loss_mask[begin] else _GIVEN}>{text}</span>")
    more = f" ... {num - _MAX_TOKENS} more tokens" if num > _MAX_TOKENS else ""
    return f'<div class="rollout"><p class="meta">{meta}</p><pre>{"".join(pieces)}{more}</pre></div>'


def _runs(use_C: np.ndarray, start: int, end: int) -> list[tuple[int, int]]:
    """Subranges of [start, end) in which the use of the tokens is constant."""
    if end <= start:
        return []
    cuts = np.flatnonzero(np.diff(use_C[start:end])) + start + 1
    edges = [start, *cuts.tolist(), end]
    return list(itertools.pairwise(edges))


def _text(token_ids: np.ndarray, decode: Decode | None) -> str:
    text = plain_text(token_ids, decode)
    return text if decode is None else _visible(text)


def plain_text(token_ids: np.ndarray, decode: Decode | None) -> str:
    """The text of tokens; token ids if `decode` is None."""
    if decode is None:
        return "".join(f"{token_id} " for token_id in token_ids.tolist())
    return "".join(decode(token_id) for token_id in token_ids.tolist())


def _visible(text: str) -> str:
    """HTML-escaped text with visible line ends, and control characters as JSON escapes."""
    shown = "".join(letter if letter.isprintable() or letter == "\n" else json.dumps(letter)[1:-1] for letter in text)
    return escape(shown).replace("\n", _RETURN)


def _badge(reward: float | None) -> str:
    if reward is None:
        return '<b class="reward none">no reward</b>'
    return f'<b class="reward {"good" if reward > 0.5 else "bad"}">reward {reward:g}</b>'
