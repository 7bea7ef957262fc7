"""`pipelinerl status`: shows the progress of a run."""

from typing import TYPE_CHECKING

from pipelinerl.flows.cli.arguments import Json, Root, Run
from pipelinerl.flows.cli.console import answer, say
from pipelinerl_core.errors import PipelineRLError

if TYPE_CHECKING:
    from pipelinerl_core.interfaces import ObjectStore


def status(run: Run = "latest", root: Root = "", as_json: Json = False) -> None:
    """Show the progress of a run, whether the run is live, and the totals of its hub. Reads only stored objects.

    `pipelinerl serve` shows the same as a page, with the report.

    Examples: `pipelinerl status`, `pipelinerl status quickstart-1a2b3c4d --json`
    """
    from pipelinerl_core.report.live_view import format_status, run_status
    from pipelinerl_core.run.locate import locate_run
    from pipelinerl_core.storage.object_store import open_store

    store = open_store(locate_run(run, root))
    document = {**run_status(store), "url": store.url}
    document["last_errors"] = _last_errors(store, document["run_id"]) if document["state"] == "stopped" else {}
    texts = [f"{role} ended with: {line}" for role, line in (document["last_errors"] or {}).items()]
    texts += [f"more: pipelinerl logs {document['run_id']}"] if texts else []
    answer(document, [] if as_json else [format_status(store, document), *texts, f"at: {store.url}"], as_json=as_json)


def _last_errors(store: "ObjectStore", run_id: str) -> dict[str, str] | None:
    """Role -> the last line of its newest log, if the line is no event of a normal end. None: unknown."""
    from pipelinerl_core.run.context import log_directory
    from pipelinerl_core.supervision.log_copies import all_logs
    from pipelinerl_core.telemetry.log_lines import level_of, printable
    from pipelinerl_core.telemetry.redact import redact_text

    errors: dict[str, str] = {}
    try:
        logs = all_logs(log_directory(store.url, run_id), store, 1)
    except (PipelineRLError, OSError) as error:
        say(f"the logs of the roles cannot be read: {error}")
        return None
    for log in reversed(logs):
        line = printable(redact_text(" ".join(log["last_lines"]).strip()))
        errors[log["role"]] = line if level_of(line) in ("", "ERROR", "CRITICAL") else ""
    return {role: line for role, line in errors.items() if line}
