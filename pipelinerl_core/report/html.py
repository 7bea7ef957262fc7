"""report.html: a self-contained page about a run, without scripts and without external resources."""

import json
import shlex
import string
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from html import escape
from typing import Any

from pipelinerl_core.interfaces import ObjectStore
from pipelinerl_core.report import charts, figures, samples
from pipelinerl_core.report.document import held_out_name, report_of, weights_table
from pipelinerl_core.report.equal_rewards import example_of
from pipelinerl_core.report.facts import RunFacts, collect
from pipelinerl_core.report.markup import table_row, template
from pipelinerl_core.report.parts import parts_section
from pipelinerl_core.report.samples import Decode
from pipelinerl_core.run.records import REPORT_HTML_KEY, REPORT_JSON_KEY, WEIGHTS_TABLE_KEY
from pipelinerl_core.telemetry.redact import flatten, redact

# Texts of rollouts below a finding.
_SHOWN_ROLLOUTS = 2


def styles() -> str:
    """The text of the page's style element."""
    return template("report.css")


def served_styles() -> str:
    """The text of the second style element of the pages that `pipelinerl serve` shows."""
    return template("served.css")


def write_report(store: ObjectStore, *, decode: Decode | None = None) -> dict[str, Any]:
    """Write report.json, report.html and weights.parquet, reading the run once; returns the report."""
    facts = collect(store)
    report = _report(store, facts, decode)
    store.put(REPORT_JSON_KEY, json.dumps(report, indent=2, allow_nan=False).encode())
    store.put(WEIGHTS_TABLE_KEY, weights_table(facts))
    store.put(REPORT_HTML_KEY, _page(store, facts, report, decode).encode())
    return report


def page_of(store: ObjectStore, facts: RunFacts, decode: Decode | None, *, has_browser: bool = False) -> str:
    """The page of a run from facts already read. has_browser: rollouts have pages, `rollouts/12.3` (web.py)."""
    return _page(store, facts, _report(store, facts, decode), decode, has_browser=has_browser)


def _report(store: ObjectStore, facts: RunFacts, decode: Decode | None) -> dict[str, Any]:
    """The report, with `equal_reward_example` if all rewards are equal."""
    report = report_of(facts)
    example = None
    if report["equal_reward"] is not None:
        decode = decode or samples.token_decoder(facts.run.model_path)
        example = example_of(store, facts.trained_commits[-1], facts.run.config, decode)
    return {**report, "equal_reward_example": example}


def _page(
    store: ObjectStore,
    facts: RunFacts,
    report: Mapping[str, Any],
    decode: Decode | None,
    *,
    has_browser: bool = False,
) -> str:
    decode = decode or samples.token_decoder(facts.run.model_path)
    return string.Template(template("report.html")).substitute(
        css=styles(),
        run_id=escape(facts.run.run_id),
        summary=_summary(report),
        emulation=escape(report["emulation"]["note"] if report["emulation"] else ""),
        advice=escape(report["advice"] or ""),
        example=_example(report["equal_reward_example"]),
        diagnosis=_diagnosis(facts, report["findings"], decode, has_browser=has_browser),
        meta=_meta(facts, report),
        tiles=_tiles(facts, report),
        reward_over_time=figures.reward_over_time(facts),
        reward_over_samples=figures.reward_over_samples(facts),
        reward_components=figures.reward_components(facts),
        policy_curves=figures.policy_curves(facts),
        parts=parts_section(facts, report["parts"]),
        timeline=figures.timeline(facts),
        lag_histogram=figures.lag_histogram(facts),
        length_histogram=figures.length_histogram(facts),
        swap_pauses=figures.swap_pauses(facts),
        effective_sample_size=figures.effective_sample_size(facts),
        ledger=_ledger(report["ledger"]),
        length_bias=_length_bias(report["ledger"], report["length_bias"]),
        ledger_over_steps=figures.ledger_over_steps(facts),
        evaluations=figures.evaluations(facts),
        evaluation_table=samples.evaluation_table(facts),
        held_out=samples.held_out_section(facts),
        rollouts=samples.rollout_section(store, facts, decode),
        configuration=_configuration(facts.run.config),
    )


def _example(example: Mapping[str, str] | None) -> str:
    """A completion beside its reference answer; empty unless all rewards are equal."""
    rows = "".join(table_row((name, f"<pre>{escape(text)}</pre>")) for name, text in (example or {}).items())
    return f'<table class="example"><tbody>{rows}</tbody></table>' if rows else ""


def _diagnosis(
    facts: RunFacts, findings: Sequence[Mapping[str, Any]], decode: Decode | None, *, has_browser: bool
) -> str:
    """A section with each finding, its query and rollouts that show it; empty without findings."""
    by_name = {row.name: row for row in facts.newest_rows}
    items = []
    for finding in findings:
        shown = [by_name[name] for name in finding["rollouts"] if name in by_name][:_SHOWN_ROLLOUTS]
        texts = "".join(samples.rollout_block(row, decode) for row in shown)
        sql = finding["sql"]
        quoted = (
            shlex.quote(sql) if any(letter in sql for letter in '"$`\\!') else f'"{sql}"'
        )  # SQL has quotes itself
        command = f"pipelinerl sql {facts.run.run_id} {quoted}"
        query = f"<p>All of them: <code>{escape(command)}</code></p>" if finding["sql"] else ""
        names = ", ".join(
            f'<a href="rollouts/{name}">{name}</a>' if has_browser else name for name in finding["rollouts"]
        )
        names = f' <span class="meta">rollouts {names}</span>' if names else ""
        items.append(f"<details><summary>{escape(finding['text'])}{names}</summary>{query}{texts}</details>")
    return f'<section id="diagnosis"><h2>Diagnosis</h2>{"".join(items)}</section>' if items else ""


def _summary(report: Mapping[str, Any]) -> str:
    text = f"{report['steps']:,} optimizer steps in {duration(report['wall_seconds'])}"
    parts = [f"{name} {duration(seconds)}" for name, seconds in report["seconds"].items() if seconds >= 1]
    text += f" ({', '.join(parts)})" if parts else ""
    if report["reward_first"] is not None:
        text += f": training reward {report['reward_first']:.2f} &rarr; {report['reward_last']:.2f}"
    if report["eval_first"] is not None and report["eval_last"] is not None:
        text += f", {held_out_name(report)} {report['eval_first']:.3f} &rarr; {report['eval_last']:.3f}"
    if report["steps_with_rows"] < report["steps"]:
        text += f". Lengths and lags are those of the {report['steps_with_rows']:,} steps whose rows are kept"
    return text + "."


def _meta(facts: RunFacts, report: Mapping[str, Any]) -> str:
    created = datetime.fromtimestamp(facts.run.created_at, tz=UTC).strftime("%Y-%m-%d %H:%M UTC")
    parts = {
        "created": created,
        "owner": facts.run.owner,
        "tags": ", ".join(facts.run.config.get("tracking", {}).get("tags", ())),
        "notes": facts.run.config.get("tracking", {}).get("notes"),
        "schedule": report["schedule"],
        "engine": report["engine"],
        "model": facts.run.config.get("model", {}).get("path"),
        "code": facts.run.code_version,
        "your code": ", ".join(sorted({commit[:7] + commit[40:] for commit in facts.run.commits.values()})),
        "MLflow": report["mlflow"],
        "MLflow run": facts.run.mlflow_run_id,
    }
    return "".join(f"<span>{name} <b>{_linked(str(value))}</b></span>" for name, value in parts.items() if value)


def _linked(text: str) -> str:
    shown = escape(text)
    return f'<a href="{shown}">{shown}</a>' if text.startswith(("http://", "https://")) else shown


def _tiles(facts: RunFacts, report: Mapping[str, Any]) -> str:
    lag, pauses, length = report["lag"], report["swap_pause_seconds"], report["completion_length"]
    weights = report["weights"]
    max_lag = facts.run.config.get("schedule", {}).get("max_lag", "?")
    window = report["reward_window_steps"]
    reward_steps = "step" if window == 1 else f"{window} steps"
    samples_text = f"{report['samples']:,} rollouts, {_number(report['rollouts_per_second'], '{:,.1f}')} per second"
    tiles = [
        (
            held_out_name(report).capitalize(),
            _change(report["eval_first"], report["eval_last"], "{:.3f}".format),
            _interval_note(report),
        ),
        (
            "Training reward",
            _change(report["reward_first"], report["reward_last"], "{:.2f}".format),
            f"first and last {reward_steps}",
        ),
        *(
            (
                f"Reward: {escape(name)}",
                _change(mean["first"], mean["last"], "{:.2f}".format),
                "component, unweighted",
            )
            for name, mean in report["reward_components"].items()
        ),
        ("Generation", _number(report["tokens_per_second"], "{:,.0f} tokens/s"), samples_text),
        ("Actor slots idle", _number(report["actor_idle_fraction"], "{:.1%}"), "pauses and restarts included"),
        ("Trainer waiting", _number(report["trainer_idle_fraction"], "{:.1%}"), "for the groups of a step"),
        (
            "Swap pause",
            _milliseconds(pauses["p50"]),
            f"median of {report['num_swaps']:,} swap{'s' * (report['num_swaps'] != 1)}, at most "
            f"{_milliseconds(pauses['max'])}"
            if report["num_swaps"]
            else "no swap was reported before the last step",
        ),
        (
            "Weight versions",
            _number(weights["share"], "{:.1%}"),
            f"of the training time: {_milliseconds(weights['copy_seconds'])} to copy, beside training "
            f"{_milliseconds(weights['published_seconds'])} to publish (medians)"
            if weights["copy_seconds"] is not None
            else "not measured",
        ),
        (
            "Lag of trained tokens",
            _number(lag["mean"], "{:.2f}"),
            f"p99 {_number(lag['p99'], '{}')}, max {_number(lag['max'], '{}')}, allowed {escape(str(max_lag))}",
        ),
        (
            "Rollouts with several versions",
            _number(report["multi_version_fraction"], "{:.0%}"),
            f"up to {report['max_versions_in_a_rollout'] or 0} versions in one",
        ),
        ("Effective sample size", _number(report["ess_mean"], "{:.3f}"), "mean over steps, 1 is on-policy"),
        (
            "Completion length",
            _number(length["median"], "{:,.0f} tokens"),
            f"median; p99.5 {_number(length['p99.5'], '{:,.0f}')}, max {_number(length['max'], '{:,.0f}')}",
        ),
    ]
    return "".join(
        f'<div class="tile"><dt>{name}</dt><dd>{value}</dd><p>{note}</p></div>' for name, value, note in tiles
    )


def _interval_note(report: Mapping[str, Any]) -> str:
    low, high = report["eval_last_low"], report["eval_last_high"]
    interval = "" if low is None or high is None else f"; 95 % interval at the end {low:.3f} to {high:.3f}"
    return f"first and last version{interval}"


def _ledger(ledger: Mapping[str, int]) -> str:
    if not ledger:
        return '<p class="empty">No step was committed.</p>'
    classes = [(name, ledger[name], _css(name)) for name in _classes(ledger) if ledger[name] > 0]
    return charts.stacked_bar("Token ledger", classes)


def _length_bias(ledger: Mapping[str, int], length_bias: Mapping[str, Any]) -> str:
    """The ledger as a table: tokens per class, mean length of their completions, share in first and last thirds."""
    if not ledger:
        return ""
    total = ledger.get("generated", 0)
    heads = ("class", "tokens", "share", "mean length", "first third", "last third")
    rows = [table_row(heads, "th")]
    for name in [*_classes(ledger), "generated"]:
        num, length_class = ledger.get(name, 0), length_bias["classes"].get(name, {})
        cells = [
            f'<i class="key {_css(name)}"></i>{escape(name)}' if name != "generated" else "generated",
            f"{num:,}",
            f"{num / total:.1%}" if total else "",
            _number(length_class.get("mean_length"), "{:,.1f}"),
            _number(length_class.get("first_third"), "{:.1%}"),
            _number(length_class.get("last_third"), "{:.1%}"),
        ]
        rows.append(table_row(cells, "th" if name == "generated" else "td"))
    is_balanced = sum(ledger[name] for name in _classes(ledger)) == total
    verdict = (
        "The classes account for every generated token."
        if is_balanced
        else "The classes do not account for every generated token: run `pipelinerl audit`."
    )
    if length_bias["bias"] is not None:
        verdict += f" Trained over generated mean length: {length_bias['bias']:.2f}."
    return f'<table class="ledger"><tbody>{"".join(rows)}</tbody></table><p>{verdict}</p>'


def _classes(ledger: Mapping[str, int]) -> list[str]:
    """The token classes without `generated`, in drawing order."""
    names = ledger.keys() - {"generated"}
    return [name for name in figures.LEDGER_CSS if name in names] + sorted(names - figures.LEDGER_CSS.keys())


def _css(name: str) -> str:
    return figures.LEDGER_CSS.get(name, "other")


def _configuration(config: Mapping[str, Any]) -> str:
    flat = redact(flatten(config))
    return "".join(table_row(map(escape, setting)) for setting in sorted(flat.items()))


def duration(seconds: float) -> str:
    """Example: 252.3 -> 4 min 12 s."""
    whole = round(seconds)
    hours, minutes = divmod(whole // 60, 60)
    if hours:
        return f"{hours} h {minutes:02d} min"
    return f"{minutes} min {whole % 60:02d} s" if minutes else f"{seconds:.1f} s"


def _number(value: float | None, form: str) -> str:
    return form.format(value) if value is not None else "&ndash;"


def _milliseconds(seconds: float | None) -> str:
    return f"{seconds * 1000:.1f} ms" if seconds is not None else "&ndash;"


def _change(first: float | None, last: float | None, form: Any) -> str:
    if first is None or last is None:
        return "&ndash;"
    return f'<span class="from">{form(first)} &rarr;</span> {form(last)}'
