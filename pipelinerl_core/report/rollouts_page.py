"""The browser of rollouts of `pipelinerl serve`: those of a step, filtered and sorted, and each with its tokens.

C = tokens of a completion.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from html import escape
from typing import NamedTuple
from urllib.parse import urlencode

import numpy as np

from pipelinerl_core.errors import ConfigError
from pipelinerl_core.report.diagnosis import Decoder
from pipelinerl_core.report.facts import TrainedRollout
from pipelinerl_core.report.runs_page import document
from pipelinerl_core.report.samples import Decode, plain_text, rollout_block, token_texts, visible
from pipelinerl_core.report.trace import Place, TracedRow, TracedRun, rollout_of, trace_lines
from pipelinerl_core.types import FinishReason, Outcome

PAGE_ROLLOUTS = 25
_MAX_TOKENS = 2000
_NUM_TINTS = 6


@dataclass(frozen=True, slots=True)
class WantedRollouts:
    """What a reader has selected; texts as in the query of the address."""

    step: str = ""
    """Empty: the newest trained step; `all`: all steps."""
    beside: str = ""
    """Another step, shown beside the step."""
    sort: str = "order"
    outcome: str = ""
    finish_reason: str = ""
    source: str = ""
    reward: str = ""
    """A range: 0.5.. or ..0 or 0.2..0.4, or one value."""
    text: str = ""
    """In the prompt, the completion or the task; upper and lower case are equal."""
    where: str = ""
    """A condition in SQL on the view `rollouts`."""
    page: str = "1"

    @property
    def needs_search(self) -> bool:
        """Whether the rollouts of one step are not enough."""
        return self.step == "all" or bool(self.where)

    @property
    def number(self) -> int:
        """Of the page, from 1."""
        return int(self.page)

    def check(self) -> None:
        """Raises ConfigError for a text that is no selection."""
        if self.sort.removeprefix("-") not in SORTS:
            raise ConfigError(f"sort must be {', '.join(SORTS)}, or -reward for the other direction")
        if not (self.page.isascii() and self.page.isdigit() and len(self.page) < 10 and self.number > 0):
            raise ConfigError("page must be a number from 1")
        for step in {self.step, self.beside} - {"", "all" if self.step == "all" else ""}:
            if not (step.isascii() and step.isdigit() and len(step) < 16):
                raise ConfigError("step must be a number, or all, and beside a number")
        if self.beside and self.needs_search:
            raise ConfigError("beside needs one step, and no where")
        self.reward_range()

    def reward_range(self) -> tuple[float, float]:
        """Lowest and highest reward. Raises ConfigError."""
        low, is_range, high = self.reward.partition("..")
        try:
            lowest = float(low) if low else -np.inf
            return lowest, (float(high) if high else np.inf) if is_range or not low else lowest
        except ValueError:
            raise ConfigError("reward must be a range like 0.5.. or ..0 or 0.2..0.4") from None

    def matches(self, row: TrainedRollout) -> bool:
        """Whether a rollout is selected, apart from its text."""
        low, high = self.reward_range()
        reward = row.reward is not None and low - 1e-6 <= row.reward <= high + 1e-6
        same = all(
            wanted in ("", value)
            for wanted, value in (
                (self.outcome, row.outcome), (self.finish_reason, row.finish_reason), (self.source, row.source)
            )
        )  # fmt: skip
        return same and (reward or not self.reward)


def _lag(row: TrainedRollout) -> float:
    """Steps between the version of the first token and the trained version."""
    return row.step - 1 - row.weight_spans[0].version if row.weight_spans else 0


SORTS: Mapping[str, Callable[[TrainedRollout], float]] = {
    "order": lambda row: 0.0,
    "step": lambda row: row.step,
    "reward": lambda row: -np.inf if row.reward is None else row.reward,
    "length": lambda row: len(row.completion_token_ids),
    "advantage": lambda row: row.advantage,
    "lag": _lag,
}
"""Name -> key of the order; `order`: as trained."""


def chosen(rows: Sequence[TrainedRollout], wanted: WantedRollouts, texts: Decoder | None) -> list[TrainedRollout]:
    """The selected rollouts in their order. texts: of whole sequences, for the search; None: token ids."""
    rows = [row for row in rows if wanted.matches(row)]
    if wanted.text:
        text = wanted.text.casefold()
        rows = [row for row in rows if text in _whole_text(row, texts).casefold()]
    key = SORTS[wanted.sort.removeprefix("-")]
    return sorted(rows, key=key, reverse=wanted.sort.startswith("-"))


def _whole_text(row: TrainedRollout, texts: Decoder | None) -> str:
    parts = [row.prompt_token_ids, row.completion_token_ids]
    return "\n".join([*(plain_text(ids, None) if texts is None else texts(ids) for ids in parts), row.task])


class Listing(NamedTuple):
    """The selected rollouts of a step, or of all steps."""

    title: str
    rows: Sequence[TrainedRollout]
    """Of the page."""
    num_selected: int
    """On all pages."""
    summary: str
    """Their number, for readers."""
    sources: Sequence[str] = ()
    """Sources to choose from."""


def listing_of(rows: Sequence[TrainedRollout], wanted: WantedRollouts, texts: Decoder | None = None) -> Listing:
    """The listing of a step. rows: all of the step; texts: of a sequence, for the search; None: token ids."""
    selected = chosen(rows, wanted, texts)
    begin = (wanted.number - 1) * PAGE_ROLLOUTS
    return Listing(
        f"step {int(wanted.step):,}", selected[begin : begin + PAGE_ROLLOUTS], len(selected),
        f"{len(selected):,} of {len(rows):,} rollouts", sorted({row.source for row in rows}),
    )  # fmt: skip


def rollouts_page(
    run_id: str,
    steps: Sequence[int],
    listings: Sequence[Listing],
    wanted: WantedRollouts,
    decode: Decode | None,
    problem: str = "",
) -> str:
    """The page of one or two listings.

    steps: all trained steps, in order; decode: of a token; problem: why there is no listing.
    """
    title = " and ".join(listing.title for listing in listings) or "all steps"
    counts = " | ".join(listing.summary for listing in listings)
    columns = "".join(f"<section>{_blocks(listing, wanted, decode)}</section>" for listing in listings)
    if len(listings) > 1:
        columns = f'<div class="pair">{columns}</div>'
    pages = _pages(max((listing.num_selected for listing in listings), default=0), wanted)
    main = (
        f'<header><p class="kicker"><a href="../../">all runs</a> &middot; <a href=".">{escape(run_id)}</a></p>'
        f'<h1>Rollouts of {title}</h1><p class="meta"><span>{counts}</span>{_steps(steps, wanted)}</p></header>'
        f"{_form(listings, wanted)}{_problem(problem)}{pages}{columns}{pages}"
    )
    return document(f"{run_id}: rollouts of {title}", main)


def _problem(text: str) -> str:
    return f'<p class="empty">{escape(text)}</p>' if text else ""


def _blocks(listing: Listing, wanted: WantedRollouts, decode: Decode | None) -> str:
    blocks = "".join(
        f'<p class="meta"><a href="rollouts/{row.name}">{row.name}</a> '
        f"{f'step {row.step:,}, ' if wanted.step == 'all' else ''}advantage {row.advantage:.3g}, lag "
        f"{_lag(row):g}, {escape(row.finish_reason)}, {escape(row.source)}</p>{rollout_block(row, decode)}"
        for row in listing.rows
    )
    return blocks or f'<p class="empty">No rollout of {listing.title} is selected.</p>'


def _steps(steps: Sequence[int], wanted: WantedRollouts) -> str:
    """Links to the steps before and after, and to all steps."""
    if wanted.step == "all":
        return ""
    step = int(wanted.step)
    before = max((other for other in steps if other < step), default=None)
    after = min((other for other in steps if other > step), default=None)
    links = [
        f"<span>{_link(f'step {other}', replace(wanted, step=str(other), page='1'))}</span>"
        for other in (before, after) if other is not None
    ]  # fmt: skip
    return "".join([*links, f"<span>{_link('all steps', replace(wanted, step='all', beside='', page='1'))}</span>"])


def _pages(num_selected: int, wanted: WantedRollouts) -> str:
    """Links to the pages before and after; empty for one page."""
    last = max(1, -(-num_selected // PAGE_ROLLOUTS))
    if last == 1:
        return ""
    numbers = {"previous": min(wanted.number - 1, last), "next": wanted.number + 1}
    links = [
        _link(title, replace(wanted, page=str(number)))
        for title, number in numbers.items() if 1 <= number <= last
    ]  # fmt: skip
    return f'<p class="meta">page {wanted.number:,} of {last:,} {" ".join(links)}</p>'


def _link(title: str, wanted: WantedRollouts) -> str:
    query = {name: value for name, value in asdict(wanted).items() if value and (name, value) not in _DEFAULTS}
    return f'<a href="?{escape(urlencode(query))}">{escape(title)}</a>'


_DEFAULTS = {(each.name, each.default) for each in fields(WantedRollouts)}


def _form(listings: Sequence[Listing], wanted: WantedRollouts) -> str:
    hints = {
        "step": "a number, or all", "beside": "a second step", "reward": "0.5.. or ..0",
        "text": "in prompt, completion, task", "where": "SQL: task->>'level' = '3'",
    }  # fmt: skip
    inputs = "".join(
        f'<label>{name}<input name="{name}" value="{escape(getattr(wanted, name))}" '
        f'placeholder="{escape(hint)}"></label>'
        for name, hint in hints.items()
    )
    values = {
        "sort": [sign + name for name in SORTS for sign in (("", "-") if name != "order" else ("",))],
        "outcome": ["", *Outcome],
        "finish_reason": ["", *FinishReason],
        "source": ["", *sorted({source for listing in listings for source in listing.sources})],
    }
    selects = "".join(
        f'<label>{name.replace("_", " ")}<select name="{name}">{_options(options, getattr(wanted, name))}</select>'
        "</label>"
        for name, options in values.items()
    )
    return f'<form class="filters">{inputs}{selects}<button>Show</button></form>'


def _options(values: Sequence[str], value: str) -> str:
    known = values if value in values else [*values, value]
    return "".join(
        f'<option value="{escape(each)}"{" selected" if each == value else ""}>{escape(each)}</option>'
        for each in known
    )


COLOURS = ("version", "log-probability", "ratio", "advantage")
"""What the colours of tokens may tell."""


def rollout_page(run: TracedRun, place: Place, colours: str) -> str:
    """The page of a rollout: what `pipelinerl trace` tells, and its tokens. Raises ConfigError, as `rollout_of`."""
    if colours not in COLOURS:
        raise ConfigError(f"colours must be {', '.join(COLOURS)}")
    traced, row, siblings = rollout_of(run, place)
    choices = " ".join(
        f"<span>{each}</span>" if each == colours else f'<span><a href="?colours={each}">{each}</a></span>'
        for each in COLOURS
    )
    if colours == "ratio" and row.ratios_C is None:
        choices += " (no ratio is stored: store.trainer_logprobs was not set, or the row was not computed)"
    links = " ".join(
        f'<a href="{other.name}">{other.name}</a> ({_reward(other)})' for other in siblings if other is not row
    )
    prompt_id = row.rollout.prompt_id.replace("'", "''")
    same_prompt = urlencode({"step": "all", "sort": "step", "where": f"prompt_id = '{prompt_id}'"})
    step = traced["step"]
    of_step = f'<a href="../rollouts?step={step["step"]}">step {step["step"]}</a>' if step else "not trained"
    lines = escape("\n".join(line for line in trace_lines(traced) if not line.startswith("  completion")))
    run_id = run.follower.run.run_id
    main = (
        f'<header><p class="kicker"><a href="../../../">all runs</a> &middot; <a href="../">{escape(run_id)}</a> '
        f"&middot; {of_step}</p><h1>Rollout {row.name}</h1>"
        f'<p class="meta">Of the same prompt: {links or "no other rollout"}; '
        f'<a href="../rollouts?{escape(same_prompt)}">this prompt in all steps</a></p></header><pre>{lines}</pre>'
        f'<p class="meta">Colours: {choices}. The title of a token has its figures.</p>'
        f'<div class="rollout"><p class="part">prompt</p><pre><span class="prompt">'
        f"{visible(plain_text(row.rollout.prompt_token_ids, run.decode))}</span></pre>"
        f'<p class="part">completion</p><pre>{_tokens(row, run.decode, colours)}</pre></div>'
    )
    return document(f"{run_id}: rollout {row.name}", main)


def _reward(row: TracedRow) -> str:
    return "no reward" if row.rollout.reward is None else f"{row.rollout.reward:.3g}"


def _tokens(row: TracedRow, decode: Decode | None, colours: str) -> str:
    """The first tokens of a completion, each with its figures as title."""
    own = row.rollout
    num = min(len(own.completion_token_ids), _MAX_TOKENS)
    versions_C = np.zeros(len(own.completion_token_ids), dtype=np.int64)
    for span in own.weight_spans:
        versions_C[span.start : span.end] = span.version
    advantages_C = row.advantages_C if row.training is not None else np.zeros(num)
    ratios_C = row.ratios_C
    far_C = np.zeros(num) if ratios_C is None else np.abs(np.log2(ratios_C[:num]))
    tints_C = {
        "version": versions_C[:num] % _NUM_TINTS,
        # A tint more for each factor of the square root of 2 between the two probabilities.
        "ratio": np.clip(2 * np.nan_to_num(far_C), 0, _NUM_TINTS - 1).astype(int),
        "log-probability": np.clip(-np.nan_to_num(own.rollout_logprobs[:num]), 0, _NUM_TINTS - 1).astype(int),
        "advantage": np.sign(np.nan_to_num(advantages_C[:num])).astype(int) + 1,
    }[colours]
    turns = {turn.start for turn in own.turn_spans}
    pieces = []
    for place, text in enumerate(map(visible, token_texts(own.completion_token_ids[:num], decode))):
        mark = '</pre><p class="part">turn</p><pre>' if place in turns and place else ""
        if not own.loss_mask[place]:
            pieces.append(f'{mark}<span class="prompt" title="{place}: given by the environment">{text}</span>')
            continue
        trained = f"advantage {advantages_C[place]:.3g}" if advantages_C[place] else "no advantage"
        stale = row.training is not None and not row.training.loss_mask[place]
        ratio = "" if ratios_C is None else f"ratio {ratios_C[place]:.3f}, "
        logprob = f"log-probability {own.rollout_logprobs[place]:.3f}"
        title = f"{place}: version {versions_C[place]}, {logprob}, {ratio}{trained}"
        look = f"v{tints_C[place]}{' stale' if stale else ''}"
        pieces.append(f'{mark}<span class="{look}" title="{title}">{text}</span>')
    more = len(own.completion_token_ids) - num
    return "".join(pieces) + (f"</pre><p>{more:,} more tokens</p><pre>" if more else "")
