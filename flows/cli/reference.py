"""The generated reference pages: `python -m pipelinerl.flows.cli.reference DIRECTORY` writes the files of PAGES."""

import inspect
import sys
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from pipelinerl.flows.cli.config import every_key

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
    from typer.main import get_command

    from pipelinerl.flows.cli import app

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
    from pipelinerl_core.data.schema import BATCH_SCHEMA, PARTIAL_SCHEMA, ROLLOUT_SCHEMA

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
    from pipelinerl_core.report.query.views import VIEWS

    lines = ["# Views", "", _WRITTEN, "", "The views of [`pipelinerl sql`](../sql.md)."]
    for name, view in VIEWS.items():
        lines += ["", f"## {name}", "", view.meaning, "", "| column | meaning |", "|---|---|"]
        for column, entry in view.columns.items():
            meaning = _plain(entry.meaning).replace("|", chr(92) + "|").replace("](", "](../")
            lines.append(f"| `{column}` | {meaning} |")
    return "\n".join(lines) + "\n"


PAGES = {
    "configuration.md": configuration_page,
    "cli.md": cli_page,
    "schemas.md": schemas_page,
    "views.md": views_page,
}


def _plain(text: str) -> str:
    """Help as one line of Markdown in which angle brackets are text."""
    return " ".join(text.split()).replace("<", "&lt;")


def _toml(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


if __name__ == "__main__":
    directory = Path(sys.argv[1])
    directory.mkdir(parents=True, exist_ok=True)
    for page, write in PAGES.items():
        (directory / page).write_text(write(), encoding="utf-8")
