"""The generated pages of the documentation: `python -m infra.reference` writes the files of PAGES."""

import inspect
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from typer.main import get_command

from pipelinerl.flows.cli import app
from pipelinerl.flows.cli.config import every_key
from pipelinerl_core.data.schema import BATCH_SCHEMA, PARTIAL_SCHEMA, ROLLOUT_SCHEMA
from pipelinerl_core.gym.options import known_options, max_level, shown, type_name
from pipelinerl_core.gym.tasks import COMPOSITE, EVALUATING, GATES
from pipelinerl_core.report.query.views import VIEWS
from pipelinerl_core.telemetry.metrics import ALL_ROLES, METRICS, Group, Metric

_WRITTEN = "<!-- Written by `make docs-reference`. -->"


def configuration_page() -> str:
    """Every key of the configuration: default, allowed values, meaning."""
    lines = [
        "# Configuration",
        "",
        _WRITTEN,
        "",
        "All keys. `pipelinerl init FILE.toml` writes them as comments into a file, `pipelinerl config --keys` "
        "prints them. On the command line and in `overrides` a key is written `section.key=value`, with the value as "
        "in TOML; text needs no quotes.",
    ]
    section = kinds = None
    for entry in every_key():
        name, separator, _ = entry["key"].partition(".")
        name = name if separator else "Top level"
        if name != section:
            section, kinds = name, None
            lines += ["", f"## {name}", ""]
        if entry["kinds"] != (kinds or []):
            kinds = entry["kinds"]
            only = ", ".join(f"`{kind}`" for kind in kinds)
            lines += ["", f"**Only with `{name}.kind`** {only}" if kinds else "**With every kind**", ""]
        values = f" One of {', '.join(f'`{_toml(value)}`' for value in entry['values'])}." if entry["values"] else ""
        bounds = f" {entry['bounds'].capitalize()}." if entry["bounds"] else ""
        lines.append(f"* `{entry['key']}` = `{entry['default']}`.{values}{bounds} {_plain(entry['meaning'])}")
    return "\n".join(lines) + "\n"


def cli_page() -> str:
    """Every command with its help, arguments and options."""
    group = get_command(app)
    commands: dict[str, Any] = group.commands  # type: ignore[attr-defined]
    uses = Counter(line for command in commands.values() for _, line in _parameters(command.params))
    common = {line: name for command in commands.values() for name, line in _parameters(command.params)
              if uses[line] >= _COMMON}  # fmt: skip
    lines = [
        "# Commands",
        "",
        _WRITTEN,
        "",
        inspect.cleandoc(group.help or ""),
        "",
        "## Common arguments",
        "",
        *common,
    ]
    for name, command in commands.items():
        lines += ["", f"## pipelinerl {name}", "", inspect.cleandoc(command.help or ""), ""]
        own = [line for _, line in _parameters(command.params)]
        lines += [line for line in own if line not in common]
        if shared := [common[line] for line in own if line in common]:
            lines.append(f"* common: {', '.join(shared)}")
    return "\n".join(lines) + "\n"


_COMMON = 5
"""Commands with the same argument or option, from which on the page describes it once."""


def _parameters(parameters: Iterable[Any]) -> Iterable[tuple[str, str]]:
    """(name, line of the page) of each argument and option."""
    for parameter in parameters:
        if parameter.param_type_name == "argument":
            name = f"`{parameter.metavar or parameter.name.upper()}`"
            yield name, f"* {name}: {_plain(parameter.help or '')}"
        elif parameter.name != "help":
            default = (
                parameter.default
                if parameter.default not in (None, "", False, []) and not callable(parameter.default)
                else ""
            )
            note = f" Default: `{default}`." if default != "" else ""
            name = f"`{', '.join(parameter.opts)}`"
            yield name, f"* {name}: {_plain(parameter.help or '')}{note}"


def schemas_page() -> str:
    """The columns of the Arrow files."""
    lines = [
        "# Schemas",
        "",
        _WRITTEN,
        "",
        "The columns of the Arrow files of a run ([storage](../storage.md)). `batches/` has all columns of "
        "`rollouts/`, and the columns of training.",
    ]
    known: set[str] = set()
    for title, schema in (
        ("rollouts/: finished groups", ROLLOUT_SCHEMA),
        ("batches/: the rows of a step, further columns", BATCH_SCHEMA),
        ("partials/: tokens of unfinished rollouts", PARTIAL_SCHEMA),
    ):
        lines += ["", f"## {title}", "", "| column | type | null | meaning |", "|---|---|---|---|"]
        known = set() if schema is PARTIAL_SCHEMA else known
        for field in schema:
            if field.name in known:
                continue
            meaning = (field.metadata or {}).get(b"description", b"").decode()
            null = "yes" if field.nullable else ""
            lines.append(
                f"| `{field.name}` | `{field.type}` | {null} | {_plain(meaning).replace('|', chr(92) + '|')} |"
            )
        known |= set(schema.names)
    return "\n".join(lines) + "\n"


def views_page() -> str:
    """The views of `pipelinerl sql` and their columns."""
    lines = ["# Views", "", _WRITTEN, "", "The views of [`pipelinerl sql`](../sql.md)."]
    for name, view in VIEWS.items():
        lines += ["", f"## {name}", "", view.meaning, "", "| column | meaning |", "|---|---|"]
        for column, entry in view.columns.items():
            meaning = _plain(entry.meaning).replace("|", chr(92) + "|").replace("](", "](../")
            lines.append(f"| `{column}` | {meaning} |")
    return "\n".join(lines) + "\n"


_METRIC_TITLES: Mapping[Group, tuple[str, ...]] = {
    "trainer": ("## In the commit of every step (and in MLflow)",),
    "evaluator": ("## Of every evaluation (in MLflow)",),
    "tracker": ("## Derived from commits",),
    "system": ("## Of the host of the flow, every 10 s, at step = seconds since the start of the run (MLflow only)",),
    "run": (
        "## For Prometheus",
        "",
        "From `pipelinerl serve` (/metrics), of each run that is running or was during the last day, with the label",
        "`run`: the newest value of each metric of steps and evaluations, named `pipelinerl_`, its key with `_` for",
        "`/`, and its unit (tokens, steps, nats, seconds, bytes) unless the key has it: `pipelinerl_lag_max_steps`,",
        "and",
    ),
    "role": ("From each role (its own /metrics); /targets.json gives Prometheus the labels run, role and name:",),
}


def metrics_page() -> str:
    """Every metric with its unit, reduction and meaning."""
    lines = [
        "# Metrics",
        "",
        _WRITTEN,
        "",
        "Every metric is logged at step = optimizer step = weight version. A metric without a value is left out.",
        "A chart's x axis in MLflow can be a metric: `progress/samples`, `progress/tokens` or `progress/seconds`.",
    ]
    for group, title in _METRIC_TITLES.items():
        rows = [_metric_cells(metric) for metric in METRICS.values() if metric.group == group]
        table = [list(rows[0]), ["---"] * len(rows[0]), *(row.values() for row in rows)]
        lines += ["", *title, "", *(f"| {' | '.join(cells)} |" for cells in table)]
    return "\n".join(lines) + "\n"


def _metric_cells(metric: Metric) -> dict[str, str]:
    """Column -> text of the metric's row."""
    if "/" in metric.name:
        figures = {"key": f"`{metric.name}`", "unit": metric.unit, "reduction": metric.reduction}
    else:
        label = ", ".join(metric.labels) + (f": {', '.join(metric.values)}" if metric.values else "")
        roles = {"roles": "all" if metric.roles == ALL_ROLES else ", ".join(metric.roles)} if metric.roles else {}
        figures = {"Prometheus": f"`{metric.prometheus}`", "kind": metric.kind, **roles, "label": label}
    return {**figures, "meaning": metric.help}


_GYM_HEAD = """# Tasks of reasoning-gym

<!-- Written by `make docs-reference`. -->

```
pipelinerl train my.toml prompts.kind=reasoning_gym 'prompts.tasks=["chain_sum","gcd"]' \\
    prompts.levels.chain_sum=3 prompts.options.gcd.max_numbers=3
```

* Level: difficulty in the library's curriculum, which sets several options. Options replace values of the level.
* Option: with its default; the type is named where the default does not show it. Another option or type is refused.
* Gate: what an answer must look like before the library's scorer gets the answer ([security](security.md)). No gate:
  the scorer compares texts. **evaluates**: the scorer evaluates the answer, which needs `reward.isolation=auto`.

The library cannot make entries at some levels (caesar_cipher 3, knight_swap, rubiks_cube 4, survo 3), and needs many
seconds at others (jugs 3, n_queens 4, zebra_puzzles 5): the start is refused.

| task | gate | levels | options |
|---|---|---|---|
"""


def gym_page() -> str:
    """The tasks of reasoning-gym with their levels and options."""
    return _GYM_HEAD + "".join(_gym_row(task) for task in sorted([*GATES, COMPOSITE]))


def _gym_row(task: str) -> str:
    gate = GATES.get(task, "that of each entry's task").replace("none", "")
    if task == COMPOSITE or GATES[task] in EVALUATING:
        gate += ", **evaluates**"
    highest = max_level(task)
    options = ", ".join(
        f"`{name}={shown(default)}`{_type_note(type_name(kind), default)}"
        for name, (kind, default) in known_options(task).items()
    )
    levels = "" if highest is None else f"0-{highest}"
    return f"| `{task}` | {gate} | {levels} | {options.replace('|', chr(92) + '|')} |\n"


def _type_note(name: str, default: Any) -> str:
    """The type in brackets, if the default does not show the type."""
    return "" if default is not None and name.startswith(_SHOWN_BY_DEFAULT) else f" ({name})"


_SHOWN_BY_DEFAULT = ("int", "float", "bool", "str", "list", "tuple", "Sequence", "time", "date")


PAGES = {
    "reference/configuration.md": configuration_page,
    "reference/cli.md": cli_page,
    "reference/schemas.md": schemas_page,
    "reference/views.md": views_page,
    "metrics.md": metrics_page,
    "gym_tasks.md": gym_page,
}
"""Path below docs/ -> its text."""


def _plain(text: str) -> str:
    """Help as one line of Markdown in which angle brackets are text."""
    return " ".join(text.split()).replace("<", "&lt;")


def _toml(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


if __name__ == "__main__":
    for page, write in PAGES.items():
        (Path(__file__).parents[1] / "docs" / page).write_text(write(), encoding="utf-8")
