"""`pipelinerl serve`: serves pages of all runs below a root until Ctrl-C."""

import os
from typing import Annotated

import typer

from pipelinerl.flows.cli.arguments import Root
from pipelinerl.flows.cli.console import say

TOKEN_VARIABLE = "PIPELINERL_SERVE_TOKEN"


def serve(
    root: Root = "",
    host: Annotated[str, typer.Option(help="Address to listen on; other than loopback, a token is needed.")] = (
        "127.0.0.1"
    ),
    port: Annotated[int, typer.Option(help="Port; 0: any free port.", min=0, max=65535)] = 0,
    allowed_host: Annotated[
        list[str] | None,
        typer.Option(help="A further host name under which a browser may open the pages; repeatable."),
    ] = None,
) -> None:
    """Serve pages of the runs below a root: the list, the live report of each run, and two runs side by side.

    /metrics and /targets.json are for Prometheus, /runs.json for programs. The server only reads stored objects.
    The environment variable PIPELINERL_SERVE_TOKEN sets the token (without it, a token is chosen and printed).

    Examples: `pipelinerl serve`, `pipelinerl serve --root s3://bucket/runs --host 0.0.0.0 --port 9464`
    """
    import secrets
    from socket import gethostname
    from urllib.parse import quote

    from pipelinerl_core.errors import ConfigError
    from pipelinerl_core.host import is_loopback
    from pipelinerl_core.report.root_pages import RootPages
    from pipelinerl_core.report.web import build_server
    from pipelinerl_core.run.locate import root_url
    from pipelinerl_core.storage.object_store import open_store

    given = os.environ.get(TOKEN_VARIABLE, "")
    if not given.isascii():
        raise ConfigError(f"{TOKEN_VARIABLE}: must be ASCII text")
    token = given or ("" if is_loopback(host) else secrets.token_urlsafe(18))
    store = open_store(root_url(root))
    server = build_server(RootPages(store), host, port, allowed_host or (), token)
    query = "" if given or not token else f"?token={quote(token)}"  # a token of the environment stays out of logs
    needed = f"; open it with ?token= and the value of {TOKEN_VARIABLE}" if given else ""
    shown = gethostname() if host in ("0.0.0.0", "::", "") else host
    shown = f"[{shown}]" if ":" in shown else shown
    say(f"http://{shown}:{server.server_address[1]}/{query} shows the runs of {store.url} until Ctrl-C{needed}")
    try:
        server.serve_forever()
    except KeyboardInterrupt:
        say("the pages are closed; runs continue")
    finally:
        server.server_close()
