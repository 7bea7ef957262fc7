"""placement.cores=own with the real roles as processes."""

import contextlib
import os

import pytest

from tests.integration.pipeline import make_run, role
from tests.waiting import wait_for


def affinity(process):
    """Cores of every thread of a process, as a set of sets."""
    core_sets = set()
    for thread in os.listdir(f"/proc/{process.pid}/task"):
        with contextlib.suppress(ProcessLookupError):  # it has ended
            core_sets.add(frozenset(os.sched_getaffinity(int(thread))))
    return core_sets


@pytest.mark.slow
def test_trainer_and_actor_run_on_different_cores(tmp_path, prepared_model):
    url = f"file://{tmp_path}/run"
    make_run(url, "placement.cores=own", f"model.path={prepared_model}")
    first, second = sorted(os.sched_getaffinity(0))[:2]
    logs = [tmp_path / "trainer.log", tmp_path / "actor.log"]
    with role("trainer", url, logs[0]) as trainer, role("actor", url, logs[1], "--name", "actor-0") as actor:
        wait_for(lambda: all("keeps to cores" in log.read_text() for log in logs), "pinning", seconds=150)
        assert affinity(trainer) == {frozenset({first})}
        assert affinity(actor) == {frozenset({second})}


@pytest.mark.slow
def test_a_role_without_enough_cores_ends_with_one_line_and_code_2(tmp_path):
    url = f"file://{tmp_path}/run"
    make_run(url, "placement.cores=own", "placement.threads=4096")
    log = tmp_path / "trainer.log"
    with role("trainer", url, log) as trainer:
        assert trainer.wait(timeout=150) == 2
    assert "x placement.threads=4096 = 8192 cores, but this process may use" in log.read_text().splitlines()[-1]
