"""Arguments and options that several commands share, and their completion in a shell."""

from typing import Annotated

import typer


def complete_run(ctx: typer.Context, incomplete: str) -> list[str]:
    """Ids of the runs below --root; no completion for a store that is not on this host."""
    from pipelinerl_core.report.run_list import run_names
    from pipelinerl_core.run.locate import root_url
    from pipelinerl_core.storage.object_store import open_store

    root = root_url(ctx.params.get("root") or "")
    names = run_names(open_store(root)) if root.startswith("file://") else []
    return [name for name in ["latest", *names] if name.startswith(incomplete)]


def complete_preset(incomplete: str) -> list[str]:
    """Names of presets; the shell completes files by itself."""
    from pipelinerl_core.config import preset_names

    return [name for name in preset_names() if name.startswith(incomplete)]


def complete_setting(incomplete: str) -> list[tuple[str, str]]:
    """Keys of the configuration with their help, and after the `=` the values of a key that has few."""
    from typing import Literal, get_args, get_origin

    from pipelinerl_core.config.load import fields, variants

    key, separator, value = incomplete.partition("=")
    completions = []
    for name, field in fields():
        help_text = " ".join((field.description or "").split()).partition(". ")[0]
        if not separator and name.startswith(key):
            completions.append((f"{name}=", help_text))
        elif separator and name == key:
            section, _, last = name.partition(".")
            literal = get_args(field.annotation) if get_origin(field.annotation) is Literal else ()
            values = variants(section) if last == "kind" and variants(section) else literal
            completions += [(f"{key}={choice}", help_text) for choice in values if str(choice).startswith(value)]
    return completions


Root = Annotated[
    str,
    typer.Option(
        help="A path or s3://bucket/prefix below which runs are stored. Default: $PIPELINERL_ROOT, else ./runs."
    ),
]
Tag = Annotated[str | None, typer.Option(help="Only runs with this tag: team:alice, or team for any value.")]
State = Annotated[str | None, typer.Option(help="Only running, stopped, finished or unreadable runs.")]
OlderThan = Annotated[
    str | None,
    typer.Option(metavar="AGE", help="Only runs whose newest commit, else whose start, is older: 90min, 12h, 30d."),
]
Limit = Annotated[int, typer.Option(help="Most runs at the same time.")]
Deployment = Annotated[
    str,
    typer.Option(
        metavar="FLOW/NAME",
        help="Prefect deployment that carries out each run on its work pool, for example compared-run/compared-run. "
        "Default: this host.",
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON document.")]
Run = Annotated[
    str,
    typer.Argument(
        help="A run: id under the root, `latest` (your newest; if you have none, that of all users), path or URL.",
        autocompletion=complete_run,
    ),
]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[KEY=VALUE]...",
        help="Settings, for example trainer.steps=20.",
        autocompletion=complete_setting,
    ),
]
