"""The table of a comparison or a sweep and its notes, for the terminal, Markdown and the page.

`document` is comparison.json throughout.
"""

from collections.abc import Callable, Mapping
from typing import Any

EMULATED = "emulated accelerators"

Document = Mapping[str, Any]
Entry = Mapping[str, Any]
"""One arm of document["arms"]."""


def headers(document: Document) -> list[str]:
    """Names of the columns."""
    target, reference = document["target"], document["reference"]
    if not target:
        return ["arm", "last accuracy", "difference", "best accuracy", "reward at the end", "tokens/s", "seconds"]
    return [
        "arm",
        f"seconds to {target:g}",
        f"seconds / seconds of {reference}",
        f"samples to {target:g}",
        "samples/s",
        "rollouts/s",
        "ESS",
        "lag mean",
        "lag max",
        "trainer idle",
        "actor idle",
        "best accuracy",
        "emulated",
    ]


def rows(document: Document) -> list[list[str]]:
    """One row per arm, in order."""
    row = _row if document["target"] else _row_of_steps
    return [row(name, entry) for name, entry in document["arms"].items()]


def notes(document: Document) -> list[str]:
    """Notes below the table: emulation, seeds that were left out, failures, resumed runs, different code versions."""
    lines = []
    if document["emulated"]:
        lines.append(f"{EMULATED.capitalize()}: steps last as long as on accelerators that are not there")
    lines += [
        f"{run}: real work exceeded the emulated durations by {share:.0%} of the run's time, so its times depend on "
        "this machine"
        for run, share in document["overrun"].items()
    ]
    if len(document["seeds"]) == 1 and len(document["arms"]) > 1:
        lines.append("one seed: a difference may be chance. Set --seeds 0,1,2 for its spread")
    lines += [str(line) for line in document["dropped"]]
    lines += [f"{run} failed: {reason}" for run, reason in document["failed"].items()]
    if document["resumed"]:
        lines.append(
            f"runs were resumed {document['resumed']} times, after an interruption or because they were stopped "
            "below the target; the time between a stop and a resume is not counted"
        )
    if len(document["code_versions"]) > 1:
        versions = ", ".join(document["code_versions"])
        lines.append(f"the runs come from different code versions ({versions}); to run all of them again, set --root")
    return lines


def markdown(document: Document) -> str:
    """The table, its caption and the notes."""
    names = headers(document)
    table = [names, ["---", *["---:"] * (len(names) - 1)], *rows(document)]
    lines = [f"| {' | '.join(row)} |" for row in table]
    return "\n".join([*lines, "", caption(document), *[f"{line}." for line in notes(document)]])


def caption(document: Document) -> str:
    """What the table shows, as a sentence."""
    seeds = seeds_text(document).capitalize()
    if len(document["seeds"]) < 2:
        return f"{seeds}."
    if document["target"]:
        return f"{seeds}: mean ± standard deviation; ratios seed by seed, with their range."
    return (
        f"{seeds}: mean ± half of the 95 % confidence interval (Student's t); difference: last accuracy minus that "
        f"of {document['reference']}, seed by seed."
    )


def seeds_text(document: Document) -> str:
    """Example: seeds 0, 1."""
    seeds = document["seeds"]
    return f"seed{'s' * (len(seeds) != 1)} {', '.join(map(str, seeds)) or 'none'}"


def _row(name: str, entry: Entry) -> list[str]:
    over = entry.get("over_reference")
    return [
        name,
        _to_target(entry, "time_to_target_seconds", "{:.0f}"),
        ratio_text(over["time_to_target_seconds"]) if over else "-",
        _to_target(entry, "samples_to_target", "{:,.0f}"),
        _mean(entry["samples_per_second"], "{:.0f}".format),
        _with_std(entry["rollouts_per_second"], "{:.0f}"),
        _mean(entry["ess_mean"], "{:.3f}".format),
        _mean(entry["lag_mean"], "{:.2f}".format),
        _largest(entry["lag_max"]),
        _mean(entry["trainer_idle_fraction"], "{:.1%}".format),
        _mean(entry["actor_idle_fraction"], "{:.1%}".format),
        _mean(entry["best_accuracy"], "{:.3f}".format),
        "yes" if entry["emulated"] else "no",
    ]


def _row_of_steps(name: str, entry: Entry) -> list[str]:
    difference = entry.get("minus_reference")
    return [
        name,
        with_interval(entry["last_accuracy"], "{:.3f}"),
        with_interval(difference, "{:+.3f}") if difference else "-",
        with_interval(entry["best_accuracy"], "{:.3f}"),
        with_interval(entry["reward_last"], "{:.3f}"),
        with_interval(entry["tokens_per_second"], "{:,.0f}"),
        with_interval(entry["seconds"], "{:,.0f}"),
    ]


def ratio_text(spread: Entry) -> str:
    """Example: 1.82 (1.75 to 1.90)."""
    if spread["mean"] is None:
        return "-"
    if spread["std"] is None:
        return f"{spread['mean']:.2f}"
    return f"{spread['mean']:.2f} ({spread['low']:.2f} to {spread['high']:.2f})"


def _to_target(entry: Entry, figure: str, form: str) -> str:
    """Mean over the seeds that reached the target, and their number unless all seeds reached the target."""
    spread = entry[figure]
    values = spread["by_seed"].values()
    num_reached = sum(value is not None for value in values)
    if not num_reached:
        best = _mean(entry["best_accuracy"], "{:.3f}".format)
        return f"not reached ({best})"
    text = _with_std(spread, form)
    return text if num_reached == len(values) else f"{text} ({num_reached} of {len(values)} seeds)"


def _with_std(spread: Entry, form: str, deviation: str = "std") -> str:
    if spread["mean"] is None:
        return "-"
    text = form.format(spread["mean"])
    return text if spread[deviation] is None else f"{text} ± {form.replace('+', '').format(spread[deviation])}"


def with_interval(spread: Entry, form: str) -> str:
    """Mean and half of the 95 % interval. Example: 0.512 ± 0.034."""
    return _with_std(spread, form, "half_width")


def _mean(spread: Entry, form: Callable[[float], str]) -> str:
    return "-" if spread["mean"] is None else form(spread["mean"])


def _largest(spread: Entry) -> str:
    return "-" if spread["high"] is None else f"{spread['high']:.0f}"
