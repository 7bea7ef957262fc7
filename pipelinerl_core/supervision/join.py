"""`pipelinerl actor`: one more actor for a run that is under way, until the run ends or somebody stops it."""

import os
import signal
import socket
import subprocess
from types import FrameType

from pipelinerl_core.errors import ConfigError
from pipelinerl_core.run.context import TOKEN_VARIABLE, open_run
from pipelinerl_core.run.hub_status import is_live, read_hub
from pipelinerl_core.storage.object_store import open_store
from pipelinerl_core.supervision.role_commands import guarded, role_command, role_environment
from pipelinerl_core.supervision.temporary_directories import own_temporary


def join_run(url: str, name: str) -> int:
    """Run an actor of a live run as a child of this process; returns its exit code. Raises ConfigError.

    SIGTERM and Ctrl-C reach the actor as SIGTERM: it writes down what its open groups have come to, and leaves.
    """
    token = os.environ.get(TOKEN_VARIABLE, "")
    if not token:
        raise ConfigError(
            f"{TOKEN_VARIABLE} is not set: the hub admits nobody without it. Set it to the same value here and "
            "where the run is started"
        )
    run = open_run(url)
    if not is_live(read_hub(open_store(url))):
        raise ConfigError(
            f"{url}: nobody runs this run. Start it with `pipelinerl resume {run.run_id}`, then join it"
        )
    actor = name or f"{socket.gethostname()}-{os.getpid()}"
    with own_temporary(role_environment(run.config.placement.threads, token)) as environment:
        process = subprocess.Popen(
            guarded(role_command("actor", {"run": url, "name": actor})),
            env=environment,
            start_new_session=True,  # Ctrl-C is passed on by us, once
        )

        def stop(number: int, frame: FrameType | None) -> None:
            del number, frame
            process.send_signal(signal.SIGTERM)

        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, stop)
        return process.wait()
