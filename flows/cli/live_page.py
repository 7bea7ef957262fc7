"""`pipelinerl status --web`: serves the page of a run until Ctrl-C."""

import threading
import time
from collections.abc import Sequence

from pipelinerl.flows.cli.console import say
from pipelinerl_core.models.paths import resolve_model_path
from pipelinerl_core.models.resolve import build_config
from pipelinerl_core.report.samples import token_decoder
from pipelinerl_core.report.web import LivePage, build_server
from pipelinerl_core.run.follow import RunFollower
from pipelinerl_core.run.locate import locate_run
from pipelinerl_core.storage.object_store import open_store

LATEST_SECONDS = 10.0
"""Shortest time between two look-ups of `latest`."""


class CurrentPage:
    """The page of a run; for `latest`, of the run that `latest` names now. Thread-safe."""

    def __init__(self, run: str, root: str) -> None:
        """run: id, path, URL or `latest`, see `locate_run`."""
        self._run = run
        self._root = root
        self._lock = threading.Lock()
        self._url = ""
        self._located_at = 0.0
        self._page: LivePage | None = None

    def __call__(self) -> LivePage:
        """The page. Raises ConfigError while there is no such run, StoreError if the run cannot be read."""
        with self._lock:
            now = time.monotonic()
            if self._page is None or (self._run == "latest" and now - self._located_at >= LATEST_SECONDS):
                url = locate_run(self._run, self._root)
                if self._page is None or url != self._url:
                    self._url, self._page = url, _open_page(url)
                self._located_at = now
            return self._page


def _open_page(url: str) -> LivePage:
    store = open_store(url)
    model = resolve_model_path(build_config(RunFollower(store).run.config).model.path)
    return LivePage(store, token_decoder(str(model)) if model else None)


def serve(run: str, root: str, host: str, port: int, names: Sequence[str] = ()) -> None:
    """Serve the page until Ctrl-C. port: 0 for any free port. names: further host names of the server.

    Raises ConfigError if the address cannot be bound, or if there is no such run, except for `latest`, which the
    first run of the root sets later.
    """
    find_page = CurrentPage(run, root)
    if run != "latest":
        find_page()
    server = build_server(find_page, host, port, names)
    say(f"http://{host}:{server.server_address[1]}/ follows {run} until Ctrl-C")
    try:
        server.serve_forever()
    except KeyboardInterrupt:
        say("the page is closed; the run continues")
    finally:
        server.server_close()
