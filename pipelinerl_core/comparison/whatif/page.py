"""whatif.html and the text of a what-if replay. Beyond its limit an arm is drawn grey and is not ranked."""

import string
from collections.abc import Mapping, Sequence
from html import escape
from importlib import resources
from typing import Any

from pipelinerl_core.comparison.figure import NUM_COLOURS
from pipelinerl_core.comparison.whatif.plan import RECORDED
from pipelinerl_core.report import charts
from pipelinerl_core.report.charts import Axis, Point, Series
from pipelinerl_core.run.records import Commit

_TEMPLATES = resources.files("pipelinerl_core.report") / "templates"


def page(document: Mapping[str, Any]) -> str:
    """HTML text of the page; `document` is whatif.json."""
    template = string.Template((_TEMPLATES / "whatif.html").read_text(encoding="utf-8"))
    arms = document["arms"]
    return template.substitute(
        title=escape(f"{document['run_id']}: steps {document['first']} to {document['last']}, trained again"),
        css=(_TEMPLATES / "report.css").read_text(encoding="utf-8"),
        arm_css=_colours((_TEMPLATES / "comparison.css").read_text(encoding="utf-8")),
        lead=escape(lead(document)),
        limits=escape(" ".join(limits(document))),
        bound=escape(bound_text(document)),
        legend="".join(f'<span><i class="key {_css(arms, name)}"></i>{escape(name)}</span> &nbsp; ' for name in arms),
        accuracy=_chart(document, "Held-out accuracy", _accuracy, Axis("weight version", is_whole=True)),
        ess=_chart(document, "Effective sample size", _metric("ess_sequence"), _STEPS),
        loss=_chart(document, "Loss", _metric("loss"), _STEPS),
        kl=_chart(document, "KL", _metric("kl"), _STEPS),
        table=_table(document),
    )


def lead(document: Mapping[str, Any]) -> str:
    """One sentence: the ranking, or why there is none."""
    ranked = document["ranking"]
    if not ranked:
        return f"Nothing is ranked: {document['unranked'][RECORDED]}."
    order = ", ".join(f"{one['arm']} {one['accuracy']:.3f}" for one in ranked)
    return f"Held-out accuracy of version {document['ranked_version']}, best first: {order}."


def limits(document: Mapping[str, Any]) -> list[str]:
    """One sentence per arm: how far its answer holds."""
    found = []
    for name, one in document["arms"].items():
        if name == RECORDED:
            continue
        if one["limit"] is None:
            found.append(f"{name}: the recorded rollouts represent its policy up to the last step.")
        else:
            found.append(
                f"{name}: holds up to step {one['limit'] - 1}; from step {one['limit']} the recorded rollouts no "
                "longer represent its policy, and it is not ranked there."
            )
    return found


def bound_text(document: Mapping[str, Any]) -> str:
    """The bound of the limit in words."""
    return (
        f"The limit of an arm is the first step at which the mean over {document['ess_window']} steps is below "
        f"{document['ess_share']:g} times that of the recorded run."
    )


def lines(document: Mapping[str, Any]) -> list[str]:
    """The result as text for a terminal."""
    width = max(map(len, document["arms"]))
    found = []
    for name, one in document["arms"].items():
        last = one["accuracy"][-1] if one["accuracy"] else None
        accuracy = f"held-out {_interval(last)} (version {last['version']})" if last else "not evaluated"
        limit = (
            "" if name == RECORDED else f"  limit {'none' if one['limit'] is None else 'step ' + str(one['limit'])}"
        )
        found.append(f"{name:<{width}}  {accuracy}{limit}  {' '.join(one['settings'])}".rstrip())
    if document["exact"]:
        found.append("the recorded objective came out bit for bit")
    return [*found, *limits(document), lead(document)]


def step_line(commit: Commit, last: int) -> str:
    """Progress of a replay. Example: step 12 of 60: loss 0.013  ess 0.981  kl 0.00712  grad norm 0.2110."""
    found = commit.metrics
    shown = (
        ("loss", "train/loss", ".6f"),
        ("ess", "importance/ess", ".4f"),
        ("kl", "importance/kl", ".5f"),
        ("grad norm", "train/grad_norm", ".4f"),
    )
    return f"step {commit.step} of {last}: " + "  ".join(
        f"{name} {found[key]:{form}}" for name, key, form in shown if key in found
    )


_STEPS = Axis("optimizer step", is_whole=True)


def _metric(name: str) -> Any:
    return lambda one: [(float(point["step"]), point[name]) for point in one["steps"] if name in point]


def _accuracy(one: Mapping[str, Any]) -> list[Point]:
    return [(float(point["version"]), point["accuracy"]) for point in one["accuracy"]]


def _chart(document: Mapping[str, Any], title: str, points_of: Any, axis: Axis) -> str:
    """Lines of all arms: in colour up to the limit of each arm, grey from there; the area in which no changed arm
    holds is grey too."""
    series = []
    ends = [one["limit"] for name, one in document["arms"].items() if name != RECORDED]
    shade = max(ends) if ends and None not in ends else None
    for name, one in document["arms"].items():
        points, limit = points_of(one), one["limit"]
        css = _css(document["arms"], name)
        # A version before the limit step was trained within the limit; a metric of the limit step was not.
        valid = points if limit is None else [point for point in points if point[0] < limit]
        series.append(Series(name, valid, css))
        if limit is not None:
            beyond = [*valid[-1:], *(point for point in points if point[0] >= limit)]
            series.append(Series(f"{name}, beyond its limit", beyond, css, kind="beyond"))
    return charts.line_chart(title, series, axis, Axis(title), shade_from=shade)


def _css(arms: Mapping[str, Any], name: str) -> str:
    return f"arm{list(arms).index(name) % NUM_COLOURS}"


def _colours(css: str) -> str:
    """The colours of the arms, for a page instead of a figure."""
    return css.replace("svg.comparison", ".comparison")


def _table(document: Mapping[str, Any]) -> str:
    heads = ["arm", "rank", "held-out accuracy", "recorded run", "version", "prompts", "limit", "CPU s", "settings"]
    ranks = {one["arm"]: str(place) for place, one in enumerate(document["ranking"], 1)}
    base = {point["version"]: point for point in document["arms"][RECORDED]["accuracy"]}
    rows = [_cells(name, one, base, ranks.get(name, "not ranked")) for name, one in document["arms"].items()]
    head = "".join(f"<th>{escape(name)}</th>" for name in heads)
    body = "".join(f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in row)}</tr>" for row in rows)
    return f"<thead><tr>{head}</tr></thead><tbody>{body}</tbody>"


def _cells(name: str, one: Mapping[str, Any], base: Mapping[int, Any], rank: str) -> Sequence[str]:
    """The newest evaluated version before the limit of the arm, beside the recorded run at the same version."""
    valid = [p for p in one["accuracy"] if one["limit"] is None or p["version"] < one["limit"]]
    last = valid[-1] if valid else None
    return (
        name,
        rank,
        _interval(last) if last else "-",
        _interval(base[last["version"]]) if last and last["version"] in base else "-",
        str(last["version"]) if last else "-",
        str(last["num_prompts"]) if last else "-",
        "-" if one["limit"] is None else f"step {one['limit']}",
        f"{one['cpu_seconds']:.0f}" if "cpu_seconds" in one else "-",
        " ".join(one["settings"]),
    )


def _interval(point: Mapping[str, Any]) -> str:
    if point["low"] is None or point["high"] is None:
        return f"{point['accuracy']:.3f}"
    return f"{point['accuracy']:.3f} ({point['low']:.3f} to {point['high']:.3f})"
