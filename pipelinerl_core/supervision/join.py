"""`pipelinerl actor`: add an actor to a live run, until the run ends or the command is stopped."""

import os
import signal
import socket
import subprocess
from types import FrameType

from pipelinerl_core.errors import ConfigError
from pipelinerl_core.run.context import TOKEN_VARIABLE, open_run
from pipelinerl_core.run.hub_status import HubWatch
from pipelinerl_core.storage.object_store import open_store
from pipelinerl_core.supervision.role_commands import ending_with_parent, role_command, role_environment
from pipelinerl_core.supervision.temporary_directories import own_temporary


def join_run(url: str, name: str) -> int:
    """Run an actor of a live run as a child of this process; returns its exit code. Raises ConfigError.

    SIGTERM and Ctrl-C are forwarded to the actor as SIGTERM: the actor logs the state of its open groups and ends.
    """
    token = os.environ.get(TOKEN_VARIABLE, "")
    if not token:
        raise ConfigError(
            f"{TOKEN_VARIABLE} is not set: the hub admits no actor without the token. Set the same value here and "
            "where the run is started"
        )
    run = open_run(url)
    if HubWatch(open_store(url)).find_live() is None:
        raise ConfigError(
            f"{url}: this run is not live. Start the run with `pipelinerl resume {run.run_id}`, then join"
        )
    actor = name or f"{socket.gethostname()}-{os.getpid()}"
    with own_temporary(role_environment(run.config.placement.threads, token)) as environment:
        process = subprocess.Popen(
            ending_with_parent(role_command("actor", {"run": url, "name": actor})),
            env=environment,
            start_new_session=True,  # the terminal's Ctrl-C must reach the actor only once, through `stop`
        )

        def stop(number: int, frame: FrameType | None) -> None:
            del number, frame
            process.send_signal(signal.SIGTERM)

        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, stop)
        return process.wait()
