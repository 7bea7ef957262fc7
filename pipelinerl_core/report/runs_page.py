"""The page with the runs of a root: filters, and links to the page of each run and to two runs side by side."""

from collections.abc import Mapping, Sequence
from html import escape
from urllib.parse import quote, urlencode

from pipelinerl_core.report.html import duration, served_styles, styles
from pipelinerl_core.report.markup import table_row
from pipelinerl_core.report.run_list import SORTS, STATES, ListedRun, Wanted, age

SCRIPT = """
async function renew() {
  const note = document.getElementById("note");
  try {
    if (!document.querySelector("input:checked") && !document.querySelector("form :focus")) {
      const answer = await fetch(location.href);
      if (!answer.ok) throw new Error(answer.status);
      const next = new DOMParser().parseFromString(await answer.text(), "text/html");
      document.getElementById("runs").replaceWith(next.getElementById("runs"));
      note.textContent = "";
    }
  } catch (error) {
    note.textContent = "This list is not up to date: the server of this page or its store does not answer.";
  }
  setTimeout(renew, 5000);
}
setTimeout(renew, 5000);
"""
_HEADS = (
    ("", "run"),
    ("owner", "owner"),
    ("state", "state"),
    ("step", "progress"),
    ("reward", "reward"),
    ("held_out", "held-out"),
    ("tokens", "tokens"),
    ("hours", "time"),
    ("gpu_hours", "GPU-hours"),
    ("", "model"),
    ("", "tags"),
    ("started", "started"),
)
"""(key of SORTS or empty, heading) of each column."""


def document(title: str, main: str, script: str = "", css: str = "") -> str:
    """A page of `pipelinerl serve`. title is text; main and script are HTML and JavaScript; css: class of <main>."""
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f'<meta name="color-scheme" content="light dark">\n<title>{escape(title)}</title>\n'
        f"<style>{styles()}</style>\n<style>{served_styles()}</style>\n</head>\n<body>\n"
        f'<main class="{css}">{main}</main>\n{f"<script>{script}</script>" if script else ""}\n</body>\n</html>\n'
    )


def runs_page(root: str, runs: Sequence[ListedRun], wanted: Wanted, sort: str = "started") -> str:
    """The page. runs: those that match `wanted`, in the order of `sort`, a key of SORTS."""
    active = sum(run.state == "running" for run in runs)
    header = (
        f'<header><p class="kicker">PipelineRL</p><h1>Runs</h1><p class="meta"><span>{escape(root)}</span>'
        f"<span><b>{len(runs):,}</b> shown</span><span><b>{active:,}</b> running</span>"
        f'<span><a href="runs/latest/">newest run</a></span></p></header>'
    )
    query = {"owner": wanted.owner, "tag": wanted.tag, "state": wanted.state}
    main = f'{header}{_filters(query, sort)}<p id="note" class="empty"></p>{_table(runs, query, sort)}'
    return document("PipelineRL runs", main, SCRIPT, "list")


def _filters(query: Mapping[str, str], sort: str) -> str:
    texts = "".join(
        f'<label>{name}<input name="{name}" value="{escape(query[name])}" placeholder="{hint}"></label>'
        for name, hint in (("owner", "any"), ("tag", "any, or team:alice"))
    )
    options = "".join(
        f"<option{' selected' if state == query['state'] else ''}>{state}</option>" for state in ("", *STATES)
    )
    return (
        f'<form class="filters">{texts}<label>state<select name="state">{options}</select></label>'
        f'<input type="hidden" name="sort" value="{escape(sort)}"><button>Filter</button></form>'
        '<form class="filters" id="pair" action="compare"><button>Compare two selected runs</button></form>'
    )


def _table(runs: Sequence[ListedRun], query: Mapping[str, str], sort: str) -> str:
    if not runs:
        text = "No run matches." if any(query.values()) else "No runs yet. Start one with `pipelinerl train`."
        return f'<p id="runs" class="empty">{text}</p>'
    kept = {name: value for name, value in query.items() if value}
    rows = table_row((_head(key, name, kept, sort) for key, name in _HEADS), "th") + "".join(map(_row, runs))
    return f'<div id="runs" class="wide-table"><table class="runs"><tbody>{rows}</tbody></table></div>'


def _head(key: str, name: str, query: Mapping[str, str], sort: str) -> str:
    if key not in SORTS:
        return name
    mark = " &darr;" if key == sort else ""
    return f'<a href="?{escape(urlencode({**query, "sort": key}))}">{name}{mark}</a>'


def _row(run: ListedRun) -> str:
    name = escape(run.run_id)
    link = f'<a href="runs/{quote(run.name)}/">{name}</a>' if run.state != "unreadable" else name
    note = f"<small>{escape(run.problem or run.notes)}</small>" if run.problem or run.notes else ""
    tags = " ".join(f'<a href="?{escape(urlencode({"tag": tag}))}">{escape(tag)}</a>' for tag in run.tags)
    steps = f'<progress max="{run.steps}" value="{run.step}"></progress>{run.step:,} of {run.steps:,}'
    hours = run.seconds / 3600
    cells = [
        f'<input type="checkbox" form="pair" name="run" value="{escape(run.name)}" aria-label="select {name}"> '
        f"{link}{note}",
        escape(run.owner),
        f'<span class="state {run.state}"><i class="key"></i>{run.state}</span>',
        steps if run.steps else "",
        "" if run.reward is None else f"{run.reward:.3f}",
        " &rarr; ".join(f"{value:.3f}" for value in (run.held_out_first, run.held_out_last) if value is not None),
        f"{run.tokens:,}" if run.tokens else "",
        duration(run.seconds) if run.seconds else "",
        f"{hours * run.gpus:,.1f}" if run.gpus else "",
        escape(run.parent or run.model),
        tags,
        age(run.created_at),
    ]
    return table_row(cells)
