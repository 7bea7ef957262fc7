"""The memory that an environment process shares with its parent."""

import os
import signal
import time

from pipelinerl_core.environments.running_step import NO_EPISODE, RunningStep, new_descriptor


def test_a_reader_never_sees_a_half_written_step():
    """A time of 0 would let the parent kill a process that works."""
    shared = RunningStep(new_descriptor())
    assert shared.get() == (NO_EPISODE, 0.0)
    began = time.monotonic()
    shared.set(7, began)
    writer = os.fork()
    if writer == 0:
        while True:  # killed below
            shared.set(7, time.monotonic())
    try:
        steps = [shared.get() for _ in range(200_000)]
        deadline = time.monotonic() + 60
        while len({since for _, since in steps}) <= 10 and time.monotonic() < deadline:  # on a busy machine
            steps += [shared.get() for _ in range(1000)]
    finally:
        os.kill(writer, signal.SIGKILL)
        os.waitpid(writer, 0)
    assert {episode for episode, _ in steps} == {7}
    assert min(since for _, since in steps) >= began
    assert len({since for _, since in steps}) > 10, "the writer wrote meanwhile"
