"""Ask a live run to stop after its next commit."""

import getpass
import socket
from typing import Any

from pipelinerl_core.errors import ConfigError
from pipelinerl_core.run.drain import ask_to_drain
from pipelinerl_core.run.hub_status import is_live, read_hub
from pipelinerl_core.run.records import parse_commit_key
from pipelinerl_core.storage.object_store import open_store


def drain(url: str) -> dict[str, Any]:
    """Write the wish into the run at a URL; ConfigError when nobody runs it."""
    store = open_store(url)
    if not is_live(read_hub(store)):
        raise ConfigError(f"{url}: this run is not live, there is nothing to drain")
    ask_to_drain(store, by=f"{getpass.getuser()}@{socket.gethostname()}")
    steps = [parse_commit_key(key)[0] for key in store.list("commits")]
    return {"run_id": url.rpartition("/")[2], "step": max(steps, default=-1)}
