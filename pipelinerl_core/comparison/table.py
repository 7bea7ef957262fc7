"""The table of a comparison or a sweep and its notes, for the terminal, Markdown and the page.

`document` is comparison.json throughout.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

EMULATED = "emulated accelerators"

Document = Mapping[str, Any]
Entry = Mapping[str, Any]
"""One arm of document["arms"]."""


def headers(document: Document) -> list[str]:
    """Names of the columns."""
    return ["arm", *_columns(document)]


def rows(document: Document) -> list[list[str]]:
    """One row per arm, in order."""
    cells = _columns(document).values()
    return [[name, *(cell(entry) for cell in cells)] for name, entry in document["arms"].items()]


def notes(document: Document) -> list[str]:
    """Notes below the table: emulation, what was left out, failures, resumed runs, different code versions."""
    lines = []
    if document["emulated"]:
        lines.append(f"{EMULATED.capitalize()}: steps last as long as on accelerators that are not there")
    lines += [
        f"{run}: real work exceeded the emulated durations by {share:.0%} of the run's time, so its times depend on "
        "this machine"
        for run, share in document["overrun"].items()
    ]
    if len(document["seeds"]) == 1 and len(document["arms"]) > 1:
        lines.append("one seed: a difference may be chance. Give several seeds, such as 0,1,2, for its spread")
    lines += [
        f"{arm} is left out: it has run with {seeds_text({'seeds': seeds})} only"
        for arm, seeds in document["left_out"].items()
    ]
    lines += [str(line) for line in document["dropped"]]
    lines += [f"{run} failed: {reason}" for run, reason in document["failed"].items()]
    longer = [run for run in document["runs"] if run.get("trained_to", 0) > run["figures"]["steps"]]
    lines += [
        f"{run['run_id']} was trained further, to step {run['trained_to']}: its last reward, tokens/s, ESS, lags and "
        f"idle times are of all steps, its other figures of the first {run['figures']['steps']:.0f}"
        for run in longer
    ]
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


def _columns(document: Document) -> dict[str, Callable[[Entry], str]]:
    """Name of each column but the first -> the function that makes the cell of an arm."""
    target, reference = document["target"], document["reference"]

    def of(figure: str, form: str, deviation: str = "") -> Callable[[Entry], str]:
        return lambda entry: _text(entry.get(figure), form, deviation)

    if not target:
        return {
            "last accuracy": of("last_accuracy", "{:.3f}", "half_width"),
            "difference": of("minus_reference", "{:+.3f}", "half_width"),
            "best accuracy": of("best_accuracy", "{:.3f}", "half_width"),
            "reward at the end": of("reward_last", "{:.3f}", "half_width"),
            "tokens/s": of("tokens_per_second", "{:,.0f}", "half_width"),
            "seconds": of("seconds", "{:,.0f}", "half_width"),
        }
    return {
        f"seconds to {target:g}": partial(_to_target, "time_to_target_seconds", "{:.0f}"),
        f"seconds / seconds of {reference}": lambda entry: ratio_text(
            entry.get("over_reference", {}).get("time_to_target_seconds")
        ),
        f"samples to {target:g}": partial(_to_target, "samples_to_target", "{:,.0f}"),
        "samples/s": of("samples_per_second", "{:.0f}"),
        "rollouts/s": of("rollouts_per_second", "{:.0f}", "std"),
        "ESS": of("ess_mean", "{:.3f}"),
        "lag mean": of("lag_mean", "{:.2f}"),
        "lag max": lambda entry: "-" if entry["lag_max"]["high"] is None else f"{entry['lag_max']['high']:.0f}",
        "trainer idle": of("trainer_idle_fraction", "{:.1%}"),
        "actor idle": of("actor_idle_fraction", "{:.1%}"),
        "best accuracy": of("best_accuracy", "{:.3f}"),
        "emulated": lambda entry: "yes" if entry["emulated"] else "no",
    }


def ratio_text(spread: Entry | None) -> str:
    """Example: 1.82 (1.75 to 1.90)."""
    text = _text(spread, "{:.2f}", "")
    return f"{text} ({spread['low']:.2f} to {spread['high']:.2f})" if spread and spread["std"] is not None else text


def _to_target(figure: str, form: str, entry: Entry) -> str:
    """Mean over the seeds that reached the target, and their number unless all seeds reached the target."""
    spread = entry[figure]
    values = spread["by_seed"].values()
    num_reached = sum(value is not None for value in values)
    if not num_reached:
        return f"not reached ({_text(entry['best_accuracy'], '{:.3f}', '')})"
    text = _text(spread, form, "std")
    return text if num_reached == len(values) else f"{text} ({num_reached} of {len(values)} seeds)"


def with_interval(spread: Entry, form: str) -> str:
    """Mean and half of the 95 % interval. Example: 0.512 ± 0.034."""
    return _text(spread, form, "half_width")


def _text(spread: Entry | None, form: str, deviation: str) -> str:
    """The mean, and the entry `deviation` of the spread if it has one."""
    if spread is None or spread["mean"] is None:
        return "-"
    text, half = form.format(spread["mean"]), spread.get(deviation)
    return text if half is None else f"{text} ± {form.replace('+', '').format(half)}"
