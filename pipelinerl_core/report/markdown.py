"""The report of a run as Markdown."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from pipelinerl_core.report.document import held_out_name
from pipelinerl_core.run.records import EvalRecord

_SHOWN_PROMPTS = 4
_MAX_LETTERS = 1200


def report_markdown(report: Mapping[str, Any], evals: Sequence[EvalRecord] = ()) -> str:
    """The report as a page: what was learned, how fast, completions before and after, then all figures.

    evals: the evaluations of the run, by version; the completions are those of the first and the last one. Figures
    that are None, and the list of evaluations, are left out.
    """
    flat = _flat({name: value for name, value in report.items() if name not in ("evaluations", "advice", "findings")})
    rows = [f"| {name} | {_figure(value)} |" for name, value in flat if value is not None]
    parts = [
        f"# {report['run_id']}",
        _outcome(report),
        f"> {report['advice']}" if report.get("advice") else "",
        "\n".join(f"> {finding['text']}" for finding in report.get("findings", ())),
        _completions(evals),
        f"`pipelinerl serve` shows the whole report; `pipelinerl audit {report['run_id']}` "
        "checks that nothing was lost or trained twice.",
        "\n".join(["## All figures", "", "| figure | value |", "| --- | ---: |", *rows]),
    ]
    return "\n\n".join(part for part in parts if part)


def _outcome(report: Mapping[str, Any]) -> str:
    """Accuracy, reward, duration, speed and lag as a table of two columns; figures that are None are left out."""
    low, high = report.get("eval_last_low"), report.get("eval_last_high")
    interval = f" (95 % interval {low:.3f} to {high:.3f})" if low is not None and high is not None else ""
    lines = {
        held_out_name(report): _change(report, "eval", "{:.3f}", interval),
        "training reward": _change(report, "reward", "{:.3f}"),
        "steps": f"{report['steps']:,} in {report['wall_seconds']:,.0f} s" if report.get("wall_seconds") else "",
        "generation": f"{report['tokens_per_second']:,.0f} tokens/s" if report.get("tokens_per_second") else "",
        "mean lag": f"{report['lag']['mean']:.2f} steps" if (report.get("lag") or {}).get("mean") is not None else "",
        "MLflow": f"`{report['mlflow']}`" if report.get("mlflow") else "",
    }
    shown = [f"| {name} | {text} |" for name, text in lines.items() if text]
    return "\n".join(["| | |", "| --- | --- |", *shown]) if shown else ""


def _change(report: Mapping[str, Any], name: str, form: str, note: str = "") -> str:
    first, last = report.get(f"{name}_first"), report.get(f"{name}_last")
    return "" if first is None or last is None else f"{form.format(first)} → **{form.format(last)}**{note}"


def _completions(evals: Sequence[EvalRecord]) -> str:
    """Some held-out prompts with the completions of the first and of the last evaluation, as blocks of code."""
    shown = [record for record in evals if record.samples]
    if len(shown) < 2:
        return ""
    before, after = shown[0], shown[-1]
    lines = [f"## Held-out prompts, version {before.version} and version {after.version}"]
    for earlier, later in list(zip(before.samples, after.samples, strict=False))[:_SHOWN_PROMPTS]:
        rewards = [sample.get("reward") for sample in (earlier, later)]
        first, last = ("none" if reward is None else f"{reward:g}" for reward in rewards)
        text = "\n".join(f"{sample.get('prompt', '')}{sample.get('completion', '')}" for sample in (earlier, later))
        lines += [f"Reward {first}, then {last}:", _code(text)]
    return "\n\n".join(lines)


def _code(text: str) -> str:
    """A block of code; its fence is longer than any row of backticks in the text."""
    longest = max((len(backticks) for backticks in re.findall(r"`+", text)), default=0)
    fence = "`" * max(3, longest + 1)
    shown = text if len(text) <= _MAX_LETTERS else f"{text[:_MAX_LETTERS]} ..."
    return f"{fence}text\n{shown}\n{fence}"


def _flat(values: Mapping[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    flat: list[tuple[str, Any]] = []
    for key, value in values.items():
        flat += _flat(value, f"{prefix}{key}.") if isinstance(value, Mapping) else [(f"{prefix}{key}", value)]
    return flat


def _figure(value: Any) -> str:
    return f"{value:,.4g}" if isinstance(value, float) else f"{value:,}" if isinstance(value, int) else str(value)
